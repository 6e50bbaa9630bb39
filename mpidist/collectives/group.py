"""`GroupCommunicator`: the collectives of some of the ranks, while the others make the same call in groups of theirs.

The ranks of a world are dealt into groups, and all groups make their calls together: a call is numbered and compared
over the whole world, so that the control channel knows of every rank where it is, and only the data stay inside.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

from mpidist import arrays
from mpidist.cluster.topology import Topology
from mpidist.collectives.call import Call
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.exchange import plain
from mpidist.collectives.mismatch import mismatch_error
from mpidist.collectives.persistent import Once
from mpidist.collectives.ways.device_ways import memory_facts
from mpidist.collectives.ways.pieces import Pieces
from mpidist.runtime.control import Watch
from mpidist.transports import World


class GroupCommunicator(Communicator):
    """The collectives of the ranks of one group.

    Collective: every rank of `whole` makes one, in the same order.  Its methods are collective over all ranks too: each
    calls them in its own group.  `members`, ascending, are the ranks of this rank's group.
    """

    def __init__(self, whole: Communicator, members: Sequence[int]) -> None:
        transport = whole.transport.split(members[0])
        assert tuple(members) == transport.world_ranks, f"{tuple(members)} in place of {transport.world_ranks}"
        # As if on one node each: what is chosen for a size must be the same in every group.
        topology = Topology([f"{member}" for member in range(transport.size)])
        super().__init__(World(transport, topology, whole.control, "group"), whole)

    # -- on values whose shapes are the group's own affair ------------------------------------------------------------

    def all_reduce_here(self, array: Any, op: str = "sum", paths: Sequence[str] = ()) -> Any:
        """Return an array reduced over the ranks of the group; groups may differ in its shape.

        `op` and dtypes are those of the engine: the mean of integers is a float64.  `paths` are those of all leaves of
        the structure whose first one the array is; the ranks of a group compare them.

        Collective: every rank of every group calls it in the same order.  CollectiveMismatchError in a group whose
        ranks gave arrays of different shapes.
        """
        reduction = "sum" if op == "mean" else op
        array = self._arrays.checked(array, reduction)
        wide, result = arrays.reduction_dtypes(array.dtype, op)
        work = arrays.empty(array.shape, wide, array)
        work[...] = array
        flat, everything = work.reshape(-1), Pieces((0, work.size))
        name = f"all_reduce({op}) inside replicas"

        def move(watch: Watch) -> None:
            if self.size > 1:
                self._compare(Call(name, [("", array.dtype, array.shape), *memory_facts(array)]), paths, watch)
            way = self.way(work.nbytes, None, not arrays.is_device(work))
            bound = self.reduction(way, everything, everything, (work.dtype,) * 3, reduction, kind=work)
            bound.run(watch, (flat,), (flat,))

        Once(self, Call(name, [("", array.dtype, [-1] * array.ndim)]), move)(None)
        if op == "mean":
            work /= self.size
        return work.astype(result, copy=False)

    def all_gather_here(self, array: Any, axis: int, paths: Sequence[str] = ()) -> Any:
        """Return the arrays of the ranks of the group, joined along `axis`; groups may differ in all lengths.

        Collective: every rank of every group calls it in the same order.  CollectiveMismatchError in a group whose
        arrays do not fit together; ValueError for a scalar, or an `axis` out of range.
        """
        array = self._arrays.checked(array)
        axis = plain.checked_axis(array, axis)
        others = [-1 if index == axis else length for index, length in enumerate(array.shape)]
        name = f"all_gather(axis={axis}) inside replicas"
        inside = Call(name, [("", array.dtype, others)])
        bound = self._arrays.sent(inside, array, axis, partial(plain.gather, axis=axis))
        bound.enter(array)

        def move(watch: Watch) -> Any:
            if self.size > 1:
                self._compare(bound.call, paths, watch)
            return bound.move(watch, array)

        return Once(self, Call(name, [("", array.dtype, [-1] * array.ndim)]), move)(None)

    def broadcast_here(self, array: Any, root: int) -> Any:
        """Return the array of rank `root` of the group; what the others give, None included, does not matter.

        It goes by the host; to a rank that gives an array in device memory it comes there.

        Collective: every rank of every group calls it in the same order, with the same `root`.
        """
        if array is not None:
            array = self._arrays.checked(array)
        call = Call(f"broadcast(root={root}) inside replicas")
        return Once(self, call, lambda watch: self._from_root(root, array, watch))(None)

    def _from_root(self, root: int, array: Any, watch: Watch) -> Any:
        """Return the array of `root`; the others learn its shape first."""
        if self.size == 1:
            return array
        described = b"" if array is None else pickle.dumps((array.dtype, array.shape))
        dtype, shape = pickle.loads(self.transport.exchange(described, watch)[root])
        result = numpy.empty(shape, dtype)
        if self.rank == root:
            result[...] = self.devices.on_host(array, watch)
        plain.from_root(self.transport, result, root, watch)
        return result if array is None else arrays.in_memory_of(array, result)

    def _compare(self, call: Call, paths: Sequence[str], watch: Watch) -> None:
        """Raise on all ranks of the group unless they make one call, on structures of the same paths."""
        answers = self.transport.exchange(json.dumps(call.with_paths(paths).description).encode(), watch)
        if len(set(answers)) > 1:
            error = mismatch_error([json.loads(raw) for raw in answers], watch.call, self.rank)
            error.on_all_ranks = False  # other groups know nothing of it
            raise error
