"""What `TPUStrategy` is made of: replicas that are groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist import context
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.group import GroupCommunicator
from mpidist.cross_device_ops import AllReduceCrossDeviceOps
from mpidist.options import ReduceOp
from mpidist.strategies.base import ReplicaContext, Strategy
from mpidist.strategies.mirrored_extended import MirroredExtended
from mpidist.strategies.replica_collectives import by_leaf
from mpidist.strategies.tpu.device_assignment import DeviceAssignment
from mpidist.variables import DistributedVariable, SplitVariable


class MeshReplicaContext(ReplicaContext):
    """The context inside `TPUStrategy.run`: one logical device of one replica.

    The methods of other strategies' contexts work over the *replicas*, between ranks that are the same logical device.
    Those beginning with ``logical_`` work over the *logical devices*, inside this rank's replica.
    """

    def __init__(self, strategy: Strategy, mesh: MeshExtended) -> None:
        super().__init__(strategy, mesh.replica_id)
        self._mesh = mesh

    @property
    def num_logical_devices(self) -> int:
        """How many ranks this replica is made of."""
        return self._mesh.num_logical_devices

    @property
    def logical_device(self) -> int:
        """Which of its replica's logical devices this rank is, from 0."""
        return self._mesh.logical_device

    def logical_all_reduce(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Reduce a value, or each value of a nested structure, over the logical devices of this replica.

        Collective: every rank calls it in the same order; replicas may differ in shapes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            Also by name in any case.
        value : array, or nested tuples, lists and dicts of arrays
            Unchanged.

        Returns
        -------
        array or nested structure
            As `value`, with new arrays; the same on every logical device.  Means of integers are float64.
        """
        context.require_replica(self)
        group, op = self._mesh.group, ReduceOp.parse(reduce_op).verb
        return by_leaf(
            group, "logical_all_reduce", None, value, lambda leaf, paths: group.all_reduce_here(leaf, op, paths)
        )

    def logical_all_gather(self, value: Any, axis: int) -> Any:
        """Return the values of all logical devices of this replica, joined along `axis` in their order.  Collective.

        Parameters
        ----------
        value : array of at least one dimension, or nested tuples, lists and dicts of them
            Logical devices may differ in the length of `axis`, replicas in all lengths.  Text has one width on all.
        """
        context.require_replica(self)
        group = self._mesh.group
        return by_leaf(
            group, "logical_all_gather", None, value, lambda leaf, paths: group.all_gather_here(leaf, axis, paths)
        )


class MeshExtended(MirroredExtended):
    """Replicas of several ranks each."""

    def __init__(
        self, strategy: Any, whole: Communicator, assignment: DeviceAssignment, device_names: tuple[str, ...]
    ) -> None:
        replica, logical_device = assignment.place_of(whole.rank)
        self.num_logical_devices = assignment.num_cores_per_replica
        self.logical_device = logical_device
        self.whole = whole
        self.group = GroupCommunicator(whole, assignment.ranks[replica].tolist())
        across = GroupCommunicator(whole, assignment.ranks[:, logical_device].tolist())
        super().__init__(
            strategy, across, device_names[whole.rank], device_names, AllReduceCrossDeviceOps(), whole=whole
        )

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the first of all, not only of those that are its logical device."""
        return self.whole.rank == 0

    def any_in_replica(self, flag: bool) -> bool:
        """Return whether a flag is set on any logical device of this replica.  Collective."""
        count = numpy.array([float(flag)])
        if self.num_logical_devices > 1:
            self.group.all_reduce(count)
        return bool(count[0])

    def first_in_replica(self, value: float) -> float:
        """Return the number of this replica's logical device 0.  Collective."""
        return float(self.group.broadcast_here(numpy.array([value], "float64"), 0)[0])

    def share_initial_value(self, variable: DistributedVariable) -> None:
        """Give every copy of a new variable the chief's value, on all logical devices.  Collective."""
        self._share_from_chief(variable, self.whole)

    def split(self, variable: DistributedVariable, partition_dimensions: Sequence[int]) -> DistributedVariable:
        """Return a variable of which each logical device of a replica holds a part.  Local."""
        return SplitVariable(variable, partition_dimensions, self._strategy)
