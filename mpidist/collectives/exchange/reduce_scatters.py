"""Each rank's share of the reduced rows: reduce_scatter, bound."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy

from mpidist.arrays import reduction
from mpidist.collectives.call import Call
from mpidist.collectives.exchange.array_bound import ArrayBound
from mpidist.collectives.exchange.call_slots import CallSlots
from mpidist.collectives.exchange.outbox import Outbox
from mpidist.collectives.kept_memory import KeptMemory
from mpidist.collectives.reductions.plan import Bucket
from mpidist.collectives.ways.pieces import shares
from mpidist.collectives.ways.shared_memory import rank_order
from mpidist.runtime.control import Watch
from mpidist.transports.node_memory import SharedSegments

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


class NodeReduceScatter(ArrayBound):
    """The reduce-scatter through the shared memory of a node, in rank order.

    A short array lies in the call slot of its rank; of a long one, each other rank's share goes through the outbox.
    """

    def __init__(
        self,
        ranks: Communicator,
        segments: SharedSegments,
        call: Call,
        like: Any,
        reduced: tuple[str, str, Bucket],
        results: KeptMemory,
    ) -> None:
        super().__init__(ranks, call, like)
        op, self._op, bucket = reduced
        self._control, self._rank, self._results = ranks.control, ranks.rank, results
        self._wire, self._given = bucket.dtype, bucket.result
        self._scale = 1.0 / ranks.size if op == "mean" else None
        rows, row = self._shape[0], prod(self._shape[1:])
        cuts = shares(rows, ranks.size)
        self._bounds = [cut * row for cut in cuts]
        self._share = (cuts[ranks.rank + 1] - cuts[ranks.rank], *self._shape[1:])
        self._combine = reduction(self._op, numpy)
        self._outbox = Outbox(segments, ranks.rank)
        nbytes = bucket.elements * self._wire.itemsize
        self._reduce_fns: Any = None
        slots = CallSlots(segments, 0)
        if nbytes <= slots.room:
            self._own = slots.view(ranks.rank, 0, self._shape, self._wire, nbytes)
            mine = slice(self._bounds[ranks.rank], self._bounds[ranks.rank + 1])
            parts = [values[:, :nbytes].view(self._wire)[:, mine] for values in slots.values]
            self._reduce_fns = [rank_order(self._op, part) for part in parts]

    def fill(self, array: Any) -> bool:
        """Return True, and put a short array into the call slot; ValueError for another kind of array.  Local."""
        self.check(array)
        if self._reduce_fns is not None:
            self._own[(self._control.call + 1) & 1][...] = array
        return True

    def move(self, watch: Watch, array: Any) -> Any:
        out = self._results.array(self._share, self._wire)
        flat = out.reshape(-1)
        if self._reduce_fns is not None:
            self._reduce_fns[watch.call & 1](flat)
            if self._scale is not None:
                numpy.multiply(flat, self._scale, out=flat)
        else:
            self._move_long(watch, array, flat)
        return out if self._given == self._wire else out.astype(self._given)

    def free_results(self) -> None:
        self._results.free()

    def _move_long(self, watch: Watch, array: Any, out: Any) -> None:
        values, bounds, rank = numpy.ascontiguousarray(array).reshape(-1), self._bounds, self._rank
        gives = [values[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        own, lengths = gives[rank], [len(each) for each in gives]

        def take(start: int, shown: dict[int, Any]) -> None:
            if not shown:  # others have longer shares
                return
            stop = start + max(map(len, shown.values()))
            shown[rank] = own[start:stop].astype(self._wire, copy=False)
            first, second, *rest = (shown[each] for each in sorted(shown))
            total = out[start:stop]
            self._combine(first, second, out=total)
            for other in rest:
                self._combine(total, other, out=total)
            if self._scale is not None:
                numpy.multiply(total, self._scale, out=total)

        counts = [lengths[rank]] * len(lengths)
        self._outbox.trade(watch, gives, counts, max(lengths), self._wire, take)
