"""Undocumented names of frameworks that adapters rely on: what breaks without each, and the test that looks after it.

An adapter's package calls `require` before it imports anything, so a release without one of the names says which.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import NamedTuple

from mpidist.errors import MissingDependencyError

_KERAS = "tests/frameworks/test_keras_canaries.py"
_JAX = "tests/frameworks/test_jax_canaries.py"
_TORCH = "tests/frameworks/test_torch_canaries.py"


class PrivateName(NamedTuple):
    """A private name, or a public one that is not documented.

    The `name` begins with the framework's package; what an object has only when it is made, and what a function takes,
    comes behind ``()``.  `canary` is the test that fails where the name is gone, or means something else.
    `is_in_all_builds`: else a build of the framework may lack it.
    """

    name: str
    use: str
    canary: str
    is_in_all_builds: bool = True

    @property
    def package(self) -> str:
        """The framework."""
        return self.name.partition(".")[0]

    @property
    def is_importable(self) -> bool:
        """Whether it is there before an object is made."""
        return self.is_in_all_builds and "()" not in self.name


PRIVATE_NAMES = (
    PrivateName(
        "keras.src.trainers.data_adapters.get_data_adapter",
        "whole batches of all inputs",
        f"{_KERAS}::test_an_adapter_is_taken_as_the_input",
    ),
    PrivateName(
        "keras.src.trainers.data_adapters.data_adapter.DataAdapter",
        "parts of batches as an input",
        f"{_KERAS}::test_an_adapter_is_taken_as_the_input",
    ),
    PrivateName(
        "keras.src.saving.object_registration.GLOBAL_CUSTOM_NAMES",
        "saving models of registered classes",
        f"{_KERAS}::test_registered_classes_are_found_by_their_names",
    ),
    PrivateName(
        "keras.src.backend.get_keras_mask",
        "refusing masks of outputs and of losses",
        f"{_KERAS}::test_masks_are_found",
    ),
    PrivateName(
        "keras.Model()._compile_loss",
        "refusing losses that are no means over rows",
        f"{_KERAS}::test_the_losses_of_compile_are_found",
    ),
    PrivateName(
        "keras.src.trainers.compile_utils.CompileLoss()._flat_losses",
        "refusing losses that are no means over rows",
        f"{_KERAS}::test_the_losses_of_compile_are_found",
    ),
    PrivateName(
        "keras.metrics.MeanMetricWrapper()._fn",
        "refusing metrics that are one number for all rows",
        f"{_KERAS}::test_the_metrics_of_compile_are_found",
    ),
    PrivateName(
        "keras.src.backend.compute_output_spec",
        "building a model, and looking at shapes of losses, without values",
        f"{_KERAS}::test_a_model_is_built_without_values",
    ),
    PrivateName(
        "keras.src.backend.in_stateless_scope",
        "knowing a model's call from a traced one",
        f"{_KERAS}::test_a_stateless_scope_is_seen",
    ),
    PrivateName(
        "keras.src.random.seed_generator.global_seed_generator",
        "random numbers without a seed that differ between replicas",
        f"{_KERAS}::test_numbers_without_a_seed_ask_one_generator",
    ),
    PrivateName(
        "keras.src.random.seed_generator",
        "random numbers without a seed that differ between replicas",
        f"{_KERAS}::test_numbers_without_a_seed_ask_one_generator",
    ),
    PrivateName(
        "keras.src.backend.torch.random",
        "dropout that differs between replicas, on PyTorch",
        f"{_KERAS}::test_dropout_without_a_seed_asks_the_generator_of_pytorch",
    ),
    PrivateName(
        "keras.src.backend.torch.random.dropout",
        "dropout that differs between replicas, on PyTorch",
        f"{_KERAS}::test_dropout_without_a_seed_asks_the_generator_of_pytorch",
    ),
    PrivateName(
        "keras.src.backend.torch.random.torch_seed_generator",
        "dropout that differs between replicas, on PyTorch",
        f"{_KERAS}::test_dropout_without_a_seed_asks_the_generator_of_pytorch",
    ),
    PrivateName("keras.Layer._flatten_layers", "finding all layers", f"{_KERAS}::test_layers_of_layers_are_found"),
    PrivateName(
        "keras.Model._flatten_metrics_in_order",
        "the list that evaluate returns",
        f"{_KERAS}::test_results_are_listed_in_the_order_of_metrics",
    ),
    PrivateName(
        "keras.Model._symbolic_build",
        "building a model on servers by one batch",
        f"{_KERAS}::test_a_model_is_built_by_the_first_batch_of_an_iterator",
    ),
    PrivateName(
        "keras.src.backend.jax.trainer.JAXEpochIterator",
        "validating a model on servers, on JAX",
        f"{_KERAS}::test_how_a_model_was_compiled_and_validates",
    ),
    PrivateName(
        "keras.src.backend.torch.trainer.TorchEpochIterator",
        "validating a model on servers, on PyTorch",
        f"{_KERAS}::test_how_a_model_was_compiled_and_validates",
    ),
    PrivateName(
        "keras.Model()._eval_epoch_iterator",
        "validating a model on servers",
        f"{_KERAS}::test_how_a_model_was_compiled_and_validates",
    ),
    PrivateName(
        "keras.Model.evaluate()._use_cached_eval_dataset",
        "validating a model on servers",
        f"{_KERAS}::test_how_a_model_was_compiled_and_validates",
    ),
    PrivateName(
        "keras.Model()._compile_config",
        "compiling a model on workers as on the chief",
        f"{_KERAS}::test_how_a_model_was_compiled_and_validates",
    ),
    PrivateName(
        "keras.optimizers.Optimizer()._iterations",
        "steps on servers",
        f"{_KERAS}::test_what_an_optimizer_keeps_of_its_steps_and_its_learning_rate",
    ),
    PrivateName(
        "keras.optimizers.Optimizer()._trainable_variables",
        "slots on servers",
        f"{_KERAS}::test_how_a_model_was_compiled_and_validates",
    ),
    PrivateName(
        "keras.Model()._initial_epoch",
        "resuming by BackupAndRestore",
        f"{_KERAS}::test_the_first_epoch_may_be_set_in_on_train_begin",
    ),
    PrivateName(
        "keras.Layer()._trainable_variables",
        "telling a layer's weights from its statistics",
        f"{_KERAS}::test_a_layer_says_what_it_computes_in",
    ),
    PrivateName(
        "keras.Layer()._non_trainable_variables",
        "telling a layer's weights from its statistics",
        f"{_KERAS}::test_a_layer_has_its_statistics_in_a_list",
    ),
    PrivateName(
        "keras.Variable()._autocast",
        "overflow in float16",
        f"{_KERAS}::test_a_layer_says_what_it_computes_in",
    ),
    PrivateName(
        "keras.optimizers.Optimizer()._learning_rate",
        "schedules on servers",
        f"{_KERAS}::test_where_a_schedule_is",
    ),
    PrivateName(
        "keras.optimizers.Optimizer()._exclude_from_weight_decay",
        "refusing weight decay of some variables on servers",
        f"{_KERAS}::test_what_is_excluded_from_weight_decay",
    ),
    PrivateName(
        "keras.optimizers.Optimizer()._exclude_from_weight_decay_pattern",
        "refusing weight decay of some variables on servers",
        f"{_KERAS}::test_what_is_excluded_from_weight_decay",
    ),
    PrivateName(
        "torch._C._current_graph_task_id",
        "telling backward passes apart",
        f"{_TORCH}::test_the_private_names_of_pytorch_are_what_they_were",
    ),
    PrivateName(
        "torch._C._current_autograd_node",
        "the end of a backward pass inside another",
        f"{_TORCH}::test_what_pytorch_says_of_a_pass_inside_a_pass",
    ),
    PrivateName(
        "torch.autograd.Variable._execution_engine.queue_callback",
        "the end of a backward pass",
        f"{_TORCH}::test_the_private_names_of_pytorch_are_what_they_were",
    ),
    PrivateName(
        "torch.nn.modules.batchnorm._LazyNormBase",
        "refusing layers of batch normalization without a size yet",
        f"{_TORCH}::test_layers_of_batch_normalization_have_a_class_in_common",
    ),
    PrivateName(
        "torch.nn.modules.batchnorm._BatchNorm",
        "finding layers of batch normalization",
        f"{_TORCH}::test_layers_of_batch_normalization_have_a_class_in_common",
    ),
    PrivateName(
        "torch.Tensor._version", "seeing that a gradient was changed", f"{_TORCH}::test_tensors_count_their_changes"
    ),
    PrivateName(
        "torch.optim.Optimizer()._optimizer_step_pre_hooks",
        "seeing the steps of an optimizer",
        f"{_TORCH}::test_an_optimizer_has_hooks_when_it_is_made",
    ),
    PrivateName(
        "torch.nn.Module()._parameters",
        "finding parameters that nobody reduces",
        f"{_TORCH}::test_a_module_has_tables_of_its_parts",
    ),
    PrivateName(
        "torch.nn.Module()._modules",
        "finding parameters that nobody reduces",
        f"{_TORCH}::test_a_module_has_tables_of_its_parts",
    ),
    PrivateName(
        "torch.nn.Module._load_from_state_dict",
        "loading the state of a module around a DistributedDataParallel",
        f"{_TORCH}::test_a_module_loads_its_part_of_a_state",
    ),
    PrivateName(
        "torch.nn.Module.load_state_dict()._metadata",
        "the versions of layers in a DistributedDataParallel inside of a module",
        f"{_TORCH}::test_a_module_loads_its_part_of_a_state",
    ),
    PrivateName(
        "torch.optim.Optimizer().found_inf",
        "seeing that a GradScaler has looked for infinities",
        f"{_TORCH}::test_a_scaler_tells_an_optimizer_of_infinities",
    ),
    PrivateName(
        "torch.jit.ScriptModule().original_name",
        "refusing layers of batch normalization that are compiled",
        f"{_TORCH}::test_a_compiled_layer_has_the_name_of_its_class",
    ),
    PrivateName(
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks",
        "knowing PyTorch's communication hooks",
        f"{_TORCH}::test_where_communication_hooks_are",
        is_in_all_builds=False,
    ),
    PrivateName("jax.Array().weak_type", "giving arrays back as they were", f"{_JAX}::test_arrays_have_weak_types"),
    PrivateName(
        "jax.Device.local_hardware_id",
        "reducing arrays on the GPU where they are",
        f"{_JAX}::test_a_device_has_a_number_in_its_machine",
    ),
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
