"""tf.distribute.Strategy for MPI ranks, on NumPy and CuPy arrays.

Every public name is listed in `_NAMES` and loaded on first use: ``import mpidist`` starts neither MPI nor CUDA.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

#: Public name -> where it lives: "module" or "module:attribute".  Dotted names live in a namespace.  Namespaces can be
#: imported as well: ``from mpidist.experimental import MultiWorkerMirroredStrategy``.
_NAMES = {
    "AutoShardPolicy": "mpidist.input.options:AutoShardPolicy",
    "CentralStorageStrategy": "mpidist.strategies.central_storage:CentralStorageStrategy",
    "Checkpoint": "mpidist.training.checkpoint:Checkpoint",
    "CheckpointManager": "mpidist.training.checkpoint_manager:CheckpointManager",
    "ClusterSpec": "mpidist.cluster.spec:ClusterSpec",
    "CollectiveCommunication": "mpidist.options:CommunicationImplementation",
    "CommunicationImplementation": "mpidist.options:CommunicationImplementation",
    "CommunicationOptions": "mpidist.options:CommunicationOptions",
    "CrossDeviceOps": "mpidist.cross_device_ops:CrossDeviceOps",
    "DistributedDataset": "mpidist.input.distributed:DistributedDataset",
    "DistributedIterator": "mpidist.input.distributed:DistributedIterator",
    "DistributedValues": "mpidist.variables:DistributedValues",
    "HierarchicalCopyAllReduce": "mpidist.cross_device_ops:HierarchicalCopyAllReduce",
    "IndexedSlices": "mpidist.variables:IndexedSlices",
    "InputContext": "mpidist.input.from_function:InputContext",
    "InputOptions": "mpidist.input.options:InputOptions",
    "InputReplicationMode": "mpidist.input.options:InputReplicationMode",
    "MirroredStrategy": "mpidist.strategies.mirrored:MirroredStrategy",
    "MultiWorkerMirroredStrategy": "mpidist.strategies.multi_worker_mirrored:MultiWorkerMirroredStrategy",
    "NcclAllReduce": "mpidist.cross_device_ops:NcclAllReduce",
    "OneDeviceStrategy": "mpidist.strategies.one_device:OneDeviceStrategy",
    "ParameterServerStrategy": "mpidist.strategies.parameter_server:ParameterServerStrategy",
    "ReduceOp": "mpidist.options:ReduceOp",
    "ReductionToOneDevice": "mpidist.cross_device_ops:ReductionToOneDevice",
    "ReplicaContext": "mpidist.strategies.replica_context:ReplicaContext",
    "RingAllReduce": "mpidist.cross_device_ops:RingAllReduce",
    "RunOptions": "mpidist.strategies.run_options:RunOptions",
    "SidecarEvaluator": "mpidist.training.evaluator:SidecarEvaluator",
    "Strategy": "mpidist.strategies.base:Strategy",
    "StrategyExtended": "mpidist.strategies.extended:StrategyExtended",
    "TPUStrategy": "mpidist.strategies.tpu.strategy:TPUStrategy",
    "Trainer": "mpidist.training.trainer:Trainer",
    "Variable": "mpidist.variables:Variable",
    "VariableAggregation": "mpidist.options:VariableAggregation",
    "VariableSynchronization": "mpidist.options:VariableSynchronization",
    "callbacks": "mpidist.training.callbacks",
    "cluster_resolver": "mpidist.cluster.resolvers",
    "compute_average_loss": "mpidist.training.losses:compute_average_loss",
    "config.experimental_connect_to_cluster": "mpidist.cluster.connecting:experimental_connect_to_cluster",
    "config.experimental_connect_to_host": "mpidist.cluster.connecting:experimental_connect_to_host",
    "config.list_physical_devices": "mpidist.arrays:list_physical_devices",
    "coordinator": "mpidist.parameter_server.coordinator",
    "data.AUTOTUNE": "mpidist.input.dataset:AUTOTUNE",
    "data.ArraySpec": "mpidist.input.node:ArraySpec",
    "data.AutoShardPolicy": "mpidist.input.options:AutoShardPolicy",
    "data.Dataset": "mpidist.input.dataset:Dataset",
    "data.Options": "mpidist.input.options:Options",
    "errors": "mpidist.errors",
    "experimental.CentralStorageStrategy": "mpidist.strategies.central_storage:CentralStorageStrategy",
    "experimental.CollectiveCommunication": "mpidist.options:CommunicationImplementation",
    "experimental.CollectiveHints": "mpidist.options:CommunicationOptions",
    "experimental.CommunicationImplementation": "mpidist.options:CommunicationImplementation",
    "experimental.CommunicationOptions": "mpidist.options:CommunicationOptions",
    "experimental.MultiWorkerMirroredStrategy": "mpidist.strategies.multi_worker_mirrored:MultiWorkerMirroredStrategy",
    "experimental.ParameterServerStrategy": "mpidist.strategies.parameter_server:ParameterServerStrategy",
    "experimental.TPUStrategy": "mpidist.strategies.tpu.strategy:TPUStrategy",
    "experimental.ValueContext": "mpidist.input.from_function:ValueContext",
    "experimental.PreemptionCheckpointHandler": "mpidist.training.preemption:PreemptionCheckpointHandler",
    "experimental.TerminationConfig": "mpidist.training.preemption:TerminationConfig",
    "experimental.coordinator": "mpidist.parameter_server.coordinator",
    "experimental.partitioners": "mpidist.parameter_server.partitioners",
    "experimental_set_strategy": "mpidist.context:experimental_set_strategy",
    "get_replica_context": "mpidist.context:get_replica_context",
    "get_strategy": "mpidist.context:get_strategy",
    "has_strategy": "mpidist.context:has_strategy",
    "in_cross_replica_context": "mpidist.context:in_cross_replica_context",
    "metrics": "mpidist.training.metrics",
    "optimizers": "mpidist.optimizers",
    "parameter_server": "mpidist.parameter_server",
    "scale_regularization_loss": "mpidist.training.losses:scale_regularization_loss",
    "testing": "mpidist.testing",
    "tpu": "mpidist.strategies.tpu",
}


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


class _Namespace(ModuleType):
    """A module whose names are loaded on first use.

    Parameters
    ----------
    name : str
        Below ``mpidist``.
    places : dict
        Its names, each with the place it is loaded from.
    behind : str
        A module that has further names; empty for none.
    """

    def __init__(self, name: str, places: dict[str, str], behind: str = "") -> None:
        super().__init__(f"{__name__}.{name}", f"Public names of mpidist.{name}, loaded on first use.")
        self.__dict__.update(_places=places, _behind=behind)

    def __getattr__(self, name: str) -> Any:
        if name in self._places:
            value = _load(self._places[name])
        elif self._behind and not name.startswith("__"):
            value = getattr(_load(self._behind), name)
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        setattr(self, name, value)
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted([*self._places, *(getattr(_load(self._behind), "__all__", ()) if self._behind else ())])


def _namespaces() -> dict[str, _Namespace]:
    """Return the namespaces of `_NAMES`: of its dotted names, and modules that live under another name."""
    parts: dict[str, dict[str, str]] = {}
    for dotted, place in _NAMES.items():
        namespace, dot, name = dotted.rpartition(".")
        if dot:
            parts.setdefault(namespace, {})[name] = place
    elsewhere = {name: at for name, at in _NAMES.items() if ":" not in at and at != f"{__name__}.{name}"}
    return {name: _Namespace(name, places) for name, places in parts.items()} | {
        name: _Namespace(name, {}, behind) for name, behind in elsewhere.items()
    }


for _name, _namespace in _namespaces().items():
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _namespace

__all__ = sorted({name.partition(".")[0] for name in _NAMES} | {"__version__"})


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = _load(_NAMES[name])
    return value


def __dir__() -> list[str]:
    return list(__all__)
