"""`MultiWorkerMirroredStrategy`: all ranks of the job train together, on however many nodes."""

from __future__ import annotations

import logging
from typing import Any

from mpidist.cluster import roles
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.collectives.communicator import Communicator
from mpidist.cross_device_ops import AllReduceCrossDeviceOps, NcclAllReduce
from mpidist.errors import quoted
from mpidist.options import CommunicationImplementation, CommunicationOptions
from mpidist.strategies.base import MirroredExtended, Strategy
from mpidist.strategies.devices_of_ranks import own_device
from mpidist.world import launched_communicator

_log = logging.getLogger("mpidist")

#: Tasks that train together, or evaluate by themselves.
_TRAINING_JOBS = ("chief", "worker", "evaluator")


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on all ranks: every rank is a worker with one replica, variables are on all of them.

    Collective: every rank makes it in the same order.  With one rank it is the same machinery for one replica.  The
    chief logs the cluster, its device and the communication.

    Parameters
    ----------
    cluster_resolver : ClusterResolver, optional
        By default MPI's ranks, all of them workers.  In its place, or as `communication`, the old guides'
        ``CollectiveCommunication`` is taken, and the resolver as the second argument.
    communication_options : CommunicationOptions, optional
        Those of every collective; a call's own are put over them.
    communication : CommunicationImplementation or str, optional
        The same as ``CommunicationOptions(implementation=communication)``.

    Raises
    ------
    ValueError
        An argument of another type; a resolver with a cluster but no task type and id, without tasks that train, or for
        another number of ranks than there are.
    MissingDependencyError
        NCCL is asked for and this rank has no GPU.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | CommunicationImplementation | str | None = None,
        communication_options: CommunicationOptions | ClusterResolver | None = None,
        communication: CommunicationImplementation | str | None = None,
    ) -> None:
        resolver, options = _sorted_arguments(cluster_resolver, communication_options, communication)
        communicator = launched_communicator()
        if resolver is None:
            resolver = MPIClusterResolver(rank=communicator.rank, hosts=communicator.topology.hosts)
        _check_cluster(resolver, communicator)
        self._cluster_resolver = resolver
        device = _device_name(resolver, communicator)
        is_nccl = options.implementation is CommunicationImplementation.NCCL
        cross_device_ops = NcclAllReduce() if is_nccl else AllReduceCrossDeviceOps()
        self.extended = MirroredExtended(self, communicator, device, (device,), cross_device_ops, options)
        if communicator.rank == 0:
            _log_start(resolver, communicator, device, options.implementation)


def _sorted_arguments(
    first: Any, second: Any, communication: CommunicationImplementation | str | None
) -> tuple[ClusterResolver | None, CommunicationOptions]:
    """Return resolver and options from the arguments of either signature, the present and the old one."""
    if isinstance(first, (CommunicationImplementation, str)):
        first, communication = None, first
    if isinstance(second, ClusterResolver) and first is None:
        first, second = second, None
    if first is not None and not isinstance(first, ClusterResolver):
        raise ValueError(f"cluster_resolver must be a ClusterResolver, got {quoted(first)}")
    if second is not None and not isinstance(second, CommunicationOptions):
        raise ValueError(f"communication_options must be a CommunicationOptions, got {quoted(second)}")
    options = CommunicationOptions() if second is None else second
    if communication is None:
        return first, options
    asked = CommunicationOptions(implementation=CommunicationImplementation.parse(communication))
    return first, options.merge(asked)


def _check_cluster(resolver: ClusterResolver, communicator: Communicator) -> None:
    """Check that the resolver's cluster can train and is the one MPI started; an empty one is a single worker."""
    spec = resolver.cluster_spec()
    if not spec:
        return
    if resolver.task_type is None or resolver.task_id is None:
        raise ValueError(
            "When `cluster_spec` is given, you must also specify `task_type` and `task_id`, got "
            f"{resolver.task_type!r} and {resolver.task_id!r} from {resolver!r}"
        )
    if not any(job in _TRAINING_JOBS for job in spec.jobs):
        raise ValueError(
            f"the cluster has no tasks of type {', '.join(_TRAINING_JOBS)}, which train: its jobs are {spec.jobs}"
        )
    workers = roles.worker_count(spec, resolver.task_type)
    if workers != communicator.size:
        raise ValueError(
            f"rank {communicator.rank} of {communicator.size}: the cluster of {resolver!r} has {workers} tasks that "
            f"train, but MPI started {communicator.size} ranks. Start `mpidist run -n {workers} SCRIPT`, or leave "
            "cluster_resolver and TF_CONFIG out to train on the ranks there are"
        )


def _device_name(resolver: ClusterResolver, communicator: Communicator) -> str:
    """Return this rank's device as a device of its task; a task without GPUs has one CPU, number 0."""
    device = own_device(communicator)
    if communicator.size == 1 or resolver.task_type is None:
        return device.name
    return device.name_in(resolver.task_type, resolver.task_id or 0)


def _log_start(
    resolver: ClusterResolver, communicator: Communicator, device: str, implementation: CommunicationImplementation
) -> None:
    communication = f"CollectiveCommunication.{implementation.name}"
    if communicator.size == 1:
        _log.info(
            "Single-worker MultiWorkerMirroredStrategy with local_devices = %r, communication = %s",
            (device,),
            communication,
        )
        return
    _log.info(
        "MultiWorkerMirroredStrategy with cluster_spec = %r, task_type = %r, task_id = %r, num_workers = %r, "
        "local_devices = %r, communication = %s",
        resolver.cluster_spec().as_dict(),
        resolver.task_type,
        resolver.task_id,
        communicator.size,
        (device,),
        communication,
    )
