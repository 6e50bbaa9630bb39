"""`TPUStrategy`: a mesh of ranks, data parallel across groups and model parallel inside."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy

from mpidist import arrays
from mpidist.cluster.devices import device_of_rank
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.collectives.communicator import Communicator
from mpidist.strategies.base import Strategy
from mpidist.strategies.devices_of_ranks import gpus_of_ranks
from mpidist.strategies.tpu.device_assignment import DeviceAssignment
from mpidist.strategies.tpu.mesh import MeshExtended, MeshReplicaContext
from mpidist.strategies.tpu.topology import MeshTopology
from mpidist.variables.components import component
from mpidist.variables.partition import check_partition, part_of
from mpidist.variables.variable import DistributedVariable
from mpidist.world import launched_communicator

_log = logging.getLogger("mpidist")


class TPUStrategy(Strategy):
    """Synchronous training on a mesh of ranks, in which a replica may be a group of ranks.

    There are no TPUs behind MPI: every *logical device* is a rank.  Without a device assignment each rank is a replica,
    as in MultiWorkerMirroredStrategy.  With one, the ranks of a group get the same part of each batch and share one
    replica's work: weights may be split over them (`Variable` with `partition_dimensions`), and
    ``get_replica_context().logical_all_reduce`` and ``logical_all_gather`` put together what they compute.  Gradients
    are summed between ranks that are the same logical device of different replicas.

    Collective: every rank makes it in the same order.

    Parameters
    ----------
    tpu_cluster_resolver : ClusterResolver, optional
    experimental_device_assignment : DeviceAssignment, optional
        Which ranks form which replica: ``mpidist.tpu.experimental.DeviceAssignment.build(...)``.
    experimental_spmd_xla_partitioning : bool
        Accepted for TensorFlow's sake: nothing is compiled here.
    device_assignment : DeviceAssignment, optional
        The old name of `experimental_device_assignment`.

    Raises
    ------
    TypeError
        The assignment is no `DeviceAssignment`, or the resolver no `ClusterResolver`.
    ValueError
        The assignment is for another number of ranks.
    """

    extended: MeshExtended

    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        device_assignment: DeviceAssignment | None = None,
    ) -> None:
        if not (tpu_cluster_resolver is None or isinstance(tpu_cluster_resolver, ClusterResolver)):
            raise TypeError(f"tpu_cluster_resolver must be a ClusterResolver, got {tpu_cluster_resolver!r}")
        communicator = launched_communicator()
        given = device_assignment if experimental_device_assignment is None else experimental_device_assignment
        assignment = _assignment(given, communicator)
        self._cluster_resolver = tpu_cluster_resolver
        self.extended = MeshExtended(self, communicator, assignment, _device_names(communicator))
        if communicator.rank == 0:
            _log.info(
                "Using TPUStrategy on MPI ranks: %d replicas of %d ranks",
                assignment.num_replicas,
                assignment.num_cores_per_replica,
            )

    def _make_replica_context(self) -> MeshReplicaContext:
        return MeshReplicaContext(self, self.extended)

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Return the value that a logical device of this replica has for a tensor, on every rank of the replica.

        Collective: every rank calls it in the same order, with the same `logical_device_id`.

        Parameters
        ----------
        tensor : array or number
            On the logical device named, the value; what the others of its replica give, None included, does not count,
            except that to one that gives an array on its GPU the value comes there.
        logical_device_id : int
            From 0.

        Raises
        ------
        ValueError
            A replica has no such logical device.
        """
        devices = self.extended.num_logical_devices
        if not 0 <= logical_device_id < devices:
            raise ValueError(
                "The logical device id presented is not consistent with total number of partitions specified by the "
                f"device assignment: got {logical_device_id}, expected 0 to {devices - 1}"
            )
        return self._from_logical_device(tensor, logical_device_id)

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Return this rank's part of a tensor that every rank of its replica gives whole.  Local.

        Parameters
        ----------
        tensor : array
        partition_dimensions : sequence of int
            How many equal parts to cut each axis into.  Logical device i gets part i, counted in C order.

        Returns
        -------
        array
            A new, contiguous one; with one logical device the tensor as it is.

        Raises
        ------
        ValueError
            There is not one number for each axis, a length is not divisible by its number, or there are not as many
            parts as logical devices.
        """
        array = component(tensor)
        check_partition(array.shape, partition_dimensions, self.extended.num_logical_devices)
        if self.extended.num_logical_devices == 1:
            return tensor
        part = part_of(array, partition_dimensions, self.extended.logical_device)
        own = arrays.empty(part.shape, part.dtype, part)
        own[...] = part
        return own

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Return logical device 0's value of a tensor, on every rank of its replica.

        Collective: every rank calls it in the same order.
        """
        return self._from_logical_device(tensor, 0)

    def _from_logical_device(self, tensor: Any, logical_device: int) -> Any:
        mesh = self.extended
        if mesh.num_logical_devices == 1:
            return tensor
        is_array = isinstance(tensor, DistributedVariable) or arrays.is_known(tensor)
        # others give an array to be checked as well, whose memory says where the value is to lie; or anything
        own = component(tensor) if is_array or mesh.logical_device == logical_device else None
        return mesh.group.broadcast_here(own, logical_device)


def _assignment(assignment: Any, communicator: Communicator) -> DeviceAssignment:
    if assignment is None:
        return DeviceAssignment.build(MeshTopology.of(communicator.topology))
    if not isinstance(assignment, DeviceAssignment):
        raise TypeError(f"experimental_device_assignment must be a DeviceAssignment, got {assignment!r}")
    if assignment.ranks.size != communicator.size:
        raise ValueError(
            f"rank {communicator.rank} of {communicator.size}: the device assignment is for {assignment.ranks.size} "
            f"ranks. Start `mpidist run -n {assignment.ranks.size} SCRIPT`, or build it for {communicator.size}"
        )
    if (numpy.diff(assignment.ranks, axis=0) < 0).any() or (numpy.diff(assignment.ranks, axis=1) < 0).any():
        raise ValueError(
            "the ranks of a replica, and those of one logical device in all replicas, must be ascending; the device "
            f"assignment has, replica by replica, {assignment.ranks.tolist()}"
        )
    return assignment


def _device_names(communicator: Communicator) -> tuple[str, ...]:
    topology, gpus = communicator.topology, gpus_of_ranks(communicator)
    return tuple(
        device_of_rank(topology.local_rank_of[rank], topology.local_size_of[rank], gpu=gpus[rank]).name_in(
            "worker", topology.node_of[rank]
        )
        for rank in range(communicator.size)
    )
