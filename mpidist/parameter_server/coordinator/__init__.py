"""A chief that schedules functions on workers: the coordinator style of `ParameterServerStrategy`."""

from mpidist.parameter_server.coordinator.coordinator import ClusterCoordinator
from mpidist.parameter_server.coordinator.recovery import Restore
from mpidist.parameter_server.coordinator.values import (
    PerWorkerDataset,
    PerWorkerValues,
    RemoteValue,
    experimental_get_current_worker_index,
)

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerValues",
    "RemoteValue",
    "Restore",
    "experimental_get_current_worker_index",
]
