"""Undocumented names of frameworks that adapters rely on: what breaks without each, and the test that looks after it.

An adapter's package calls `require` before it imports anything, so a release without one of the names says which.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import NamedTuple

from mpidist.errors import MissingDependencyError


class PrivateName(NamedTuple):
    """A private name, or a public one that is not documented.

    The `name` begins with the framework's package; what an object has only when it is made, and what a function takes,
    comes behind ``()``.  `canary` is the test that fails where the name is gone, or means something else.
    """

    name: str
    use: str
    canary: str

    @property
    def package(self) -> str:
        """The framework."""
        return self.name.partition(".")[0]

    @property
    def is_importable(self) -> bool:
        """Whether it is there before an object is made."""
        return "()" not in self.name and self.name not in _IN_SOME_BUILDS


#: Canary -> the names that it looks after, each with its use.
_USES = {
    "test_an_adapter_is_taken_as_the_input": {
        "keras.src.trainers.data_adapters.get_data_adapter": "whole batches of all inputs",
        "keras.src.trainers.data_adapters.data_adapter.DataAdapter": "parts of batches as an input",
    },
    "test_batches_of_a_py_dataset_come_from_a_generator_that_may_be_replaced": {
        "keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter": "batches of a PyDataset in one order",
        "keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter()._finite_generator": "their order",
        "keras.src.trainers.data_adapters.py_dataset_adapter.PyDatasetAdapter()._standardize_batch": "their structure",
    },
    "test_registered_classes_are_found_by_their_names": {
        "keras.src.saving.object_registration.GLOBAL_CUSTOM_NAMES": "saving models of registered classes"
    },
    "test_masks_are_found": {"keras.src.backend.get_keras_mask": "refusing masks of outputs and of losses"},
    "test_the_losses_of_compile_are_found": {
        "keras.Model()._compile_loss": "refusing losses that are no means over rows",
        "keras.src.trainers.compile_utils.CompileLoss()._flat_losses": "refusing losses that are no means over rows",
    },
    "test_the_metrics_of_compile_are_found": {
        "keras.metrics.MeanMetricWrapper()._fn": "refusing metrics that are one number for all rows"
    },
    "test_a_model_is_built_without_values": {
        "keras.src.backend.compute_output_spec": "building a model, and looking at shapes of losses, without values"
    },
    "test_a_stateless_scope_is_seen": {
        "keras.src.backend.in_stateless_scope": "knowing a model's call from a traced one"
    },
    "test_numbers_without_a_seed_ask_one_generator": {
        "keras.src.random.seed_generator.global_seed_generator": "random numbers without a seed that differ "
        "between replicas",
        "keras.src.random.seed_generator": "random numbers without a seed that differ between replicas",
    },
    "test_dropout_without_a_seed_asks_the_generator_of_pytorch": {
        "keras.src.backend.torch.random": "dropout that differs between replicas, on PyTorch",
        "keras.src.backend.torch.random.dropout": "dropout that differs between replicas, on PyTorch",
        "keras.src.backend.torch.random.torch_seed_generator": "dropout that differs between replicas, on PyTorch",
    },
    "test_layers_of_layers_are_found": {"keras.Layer._flatten_layers": "finding all layers"},
    "test_results_are_listed_in_the_order_of_metrics": {
        "keras.Model._flatten_metrics_in_order": "the list that evaluate returns"
    },
    "test_a_model_is_built_by_the_first_batch_of_an_iterator": {
        "keras.Model._symbolic_build": "building a model on servers by one batch"
    },
    "test_how_a_model_was_compiled_and_validates": {
        "keras.src.backend.jax.trainer.JAXEpochIterator": "validating a model on servers, on JAX",
        "keras.src.backend.torch.trainer.TorchEpochIterator": "validating a model on servers, on PyTorch",
        "keras.Model()._eval_epoch_iterator": "validating a model on servers",
        "keras.Model.evaluate()._use_cached_eval_dataset": "validating a model on servers",
        "keras.Model()._compile_config": "compiling a model on workers as on the chief",
        "keras.optimizers.Optimizer()._trainable_variables": "slots on servers",
    },
    "test_where_keras_makes_tensors_and_takes_batches": {
        "keras.src.backend.torch.core": "working on the GPU of a rank, on PyTorch",
        "keras.src.backend.torch.core.DEFAULT_DEVICE": "working on the GPU of a rank, on PyTorch",
        "keras.src.backend.jax.trainer": "taking batches in their turn on a GPU, on JAX",
        "keras.src.backend.jax.trainer.JAXEpochIterator._get_iterator": "taking batches in their turn on a GPU, on JAX",
    },
    "test_what_an_optimizer_keeps_of_its_steps_and_its_learning_rate": {
        "keras.optimizers.Optimizer()._iterations": "steps on servers"
    },
    "test_the_first_epoch_may_be_set_in_on_train_begin": {
        "keras.Model()._initial_epoch": "resuming by BackupAndRestore"
    },
    "test_a_layer_says_what_it_computes_in": {
        "keras.Layer()._trainable_variables": "telling a layer's weights from its statistics",
        "keras.Variable()._autocast": "overflow in float16",
    },
    "test_a_layer_has_its_statistics_in_a_list": {
        "keras.Layer()._non_trainable_variables": "telling a layer's weights from its statistics"
    },
    "test_where_a_schedule_is": {"keras.optimizers.Optimizer()._learning_rate": "schedules on servers"},
    "test_what_is_excluded_from_weight_decay": {
        "keras.optimizers.Optimizer()._exclude_from_weight_decay": "refusing weight decay of some variables on servers",
        "keras.optimizers.Optimizer()._exclude_from_weight_decay_pattern": "refusing weight decay of some variables "
        "on servers",
    },
    "test_the_private_names_of_pytorch_are_what_they_were": {
        "torch._C._current_graph_task_id": "telling backward passes apart",
        "torch.autograd.Variable._execution_engine.queue_callback": "the end of a backward pass",
    },
    "test_what_pytorch_says_of_a_pass_inside_a_pass": {
        "torch._C._current_autograd_node": "the end of a backward pass inside another"
    },
    "test_layers_of_batch_normalization_have_a_class_in_common": {
        "torch.nn.modules.batchnorm._LazyNormBase": "refusing layers of batch normalization without a size yet",
        "torch.nn.modules.batchnorm._BatchNorm": "finding layers of batch normalization",
    },
    "test_tensors_count_their_changes": {"torch.Tensor._version": "seeing that a gradient was changed"},
    "test_an_optimizer_has_hooks_when_it_is_made": {
        "torch.optim.Optimizer()._optimizer_step_pre_hooks": "seeing the steps of an optimizer"
    },
    "test_a_module_has_tables_of_its_parts": {
        "torch.nn.Module()._parameters": "finding parameters that nobody reduces",
        "torch.nn.Module()._modules": "finding parameters that nobody reduces",
    },
    "test_a_module_loads_its_part_of_a_state": {
        "torch.nn.Module._load_from_state_dict": "loading the state of a module around a DistributedDataParallel",
        "torch.nn.Module.load_state_dict()._metadata": "the versions of layers in a DistributedDataParallel "
        "inside of a module",
    },
    "test_a_scaler_tells_an_optimizer_of_infinities": {
        "torch.optim.Optimizer().found_inf": "seeing that a GradScaler has looked for infinities"
    },
    "test_a_compiled_layer_has_the_name_of_its_class": {
        "torch.jit.ScriptModule().original_name": "refusing layers of batch normalization that are compiled"
    },
    "test_where_communication_hooks_are": {
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks": "knowing PyTorch's communication hooks"
    },
    "test_arrays_have_weak_types": {"jax.Array().weak_type": "giving arrays back as they were"},
    "test_a_device_has_a_number_in_its_machine": {
        "jax.Device.local_hardware_id": "reducing arrays on the GPU where they are"
    },
}

#: What a build of the framework may lack.
_IN_SOME_BUILDS = ("torch.distributed.algorithms.ddp_comm_hooks.default_hooks",)

PRIVATE_NAMES = tuple(
    PrivateName(name, use, f"tests/frameworks/test_{name.partition('.')[0]}_canaries.py::{canary}")
    for canary, names in _USES.items()
    for name, use in names.items()
)

#: The versions of a framework that have all of its names, up to the last one that the tests have run with.
VERSIONS = {"jax": "jax>=0.10,<0.11", "keras": "keras>=3.12,<3.16", "torch": "torch>=2.1,<2.14"}


def require(package: str) -> None:
    """Raise unless an installed framework has its private names that are in the list.  Local.

    MissingDependencyError says which it lacks, and the versions that have them; ImportError where it is not installed.
    """
    version = getattr(importlib.import_module(package), "__version__", "of an unknown version")
    missing = [f"{each.name} ({each.use})" for each in PRIVATE_NAMES if each.package == package and not _is_there(each)]
    if missing:
        raise MissingDependencyError(
            f"{package} {version} lacks private names that mpidist uses: {', '.join(missing)}. Install a version that "
            f"has them: pip install '{VERSIONS[package]}'"
        )


def _is_there(name: PrivateName) -> bool:
    if not name.is_importable:
        return True  # the canary alone tells
    rest = name.name.partition("keras.src.backend.")[2]
    if "." in rest and rest.partition(".")[0] != importlib.import_module("keras").backend.backend():
        return True  # of a backend that is not chosen, and may not be installed
    try:
        pkgutil.resolve_name(name.name)
    except (ImportError, AttributeError):
        return False
    return True
