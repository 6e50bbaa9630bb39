"""Cases of ``tf_cases.json`` in which mpidist differs on purpose, each with the reason."""

from __future__ import annotations

DEVIATIONS: dict[str, str] = {
    "reduce_op_enum": "checked, but that there are MIN, MAX and PRODUCT besides",
    "reduce_bad_op_string": "MAX is a reduction here",
    "central_ctor": "checked, but for the name of the extended class, which is TensorFlow's own",
    "cal_neg_gbs": "a ValueError with TensorFlow's text: there is no InvalidArgumentError outside TensorFlow",
    "split_unbatched": "the ValueError that TensorFlow documents, in place of an IndexError from its inside",
    "cluster_rules_w0_nochief": "checked but for the two leaders: they are addresses of TensorFlow's "
    "collective service, which MPI replaces",
    "cluster_rules_w0_chief": "as cluster_rules_w0_nochief",
    "cluster_rules_w_out_of_range": "as cluster_rules_w0_nochief",
    "cluster_rules_type_missing": "as cluster_rules_w0_nochief",
    "cluster_rules_bad_job": "as cluster_rules_w0_nochief",
    "cluster_rules_two_chiefs": "as cluster_rules_w0_nochief",
    "mirrored_duplicate_devices": "a ValueError: a wrong argument is no failed assertion",
    "slurm_hostlist_7": "several brackets in a name are part of Slurm's grammar and are expanded",
    "slurm_resolver_basic": "checked, but the task is known before cluster_spec() is called",
    "slurm_resolver_jobs": "checked, but the task is known before cluster_spec() is called",
    "slurm_resolver_explicit_port_gpus": "checked, but the task is known before cluster_spec() is called, "
    "and CUDA_VISIBLE_DEVICES is left alone: task_gpus tells what it would be",
    "slurm_resolver_sorted_hosts": "hosts keep rank order: sorted, the task of rank 0 would have another "
    "node's address",
    "slurm_resolver_zero_gpu_per_task": "a cluster without a GPU for every task is a cluster",
    "local_results_variable": "a rank is one replica and holds one copy: (variable,)",
    "tensor_from_per_replica_outside": "no wrapper objects: a rank's plain value is its component of a distributed "
    "value, everywhere",
    "var_literal_SUM_assign_add": "a rank's plain value is its component: the same literal on all replicas is summed",
    "var_AUTO_NONE_replica_assign": "checked; copies that replicas have made to differ are read across replicas as "
    "this rank's own, locally, not as replica 0's",
    "var_AUTO_NONE_replica_assign_add": "as var_AUTO_NONE_replica_assign",
    "var_ON_WRITE_NONE_replica_assign_add": "as var_AUTO_NONE_replica_assign",
    "var_ON_WRITE_NONE_replica_assign_sub": "as var_AUTO_NONE_replica_assign",
    "mwms_keras3_fit": "here fit works on every strategy",
    "from_function_n2_t8_b4": "every rank is a worker: the function is called on each, which has its own data set; "
    "TensorFlow's case is one worker that deals batches to two devices",
    "from_function_n2_t6_b4": "as from_function_n2_t8_b4",
    "from_function_n2_t5_b4": "as from_function_n2_t8_b4",
    "from_function_n2_t10_b4_drop": "as from_function_n2_t8_b4",
    "shard_range2_w4_DATA": "a worker that has no element gets none, and feeds empty batches",
    "fit_uneven_n2": "uneven parts are weighted by rows and give what one rank gives, in place of an error",
    "fit_uneven_n4": "as fit_uneven_n2",
    "fit_model_built_outside_scope": "a ValueError with what to do, when the trainer is made, in place of an "
    "AssertionError without words",
    "preempt_no_dir": "a ValueError: TensorFlow means InvalidArgumentError, and fails to raise it",
    "coord_schedule_python_fn": "there are no graphs: any Python function can be scheduled",
    "keras2_clipnorm_n2": "gradients are clipped after the sum, so that the step does not grow with the replicas",
    "keras2_batchnorm_sync0_n2": "a layer of Keras, which is tested where Keras is there; nothing here has layers",
    "v1_ps_strategy_default_resolver": "checked, but a chief and its device have the names of its task, and the "
    "resolver is the property",
}
