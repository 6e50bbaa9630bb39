"""All-reduce of a small buffer through the shared segments of a node: flags, no message.

Every rank writes its values into its own segment, posts the call on the status board, waits until all have, and sums
all segments itself, or its share of them, in rank order.  So all ranks get the same bits, and the barrier is the check
of the call as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy

from mpidist.arrays import reduction
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.pieces import Pieces, Transform, shares
from mpidist.runtime.control import Watch
from mpidist.transports.node_memory import SharedSegments

#: Up to so many ranks, and for more bytes a rank, one call for each is quicker than `numpy.ufunc.reduce`.
_MOST_PAIRS, _MOST_REDUCED_BYTES = 3, 1 << 14


def rank_order(op: str, slots: Any) -> Callable[[Any], object]:
    """Return ``fn(out)``, which reduces `slots` over its first axis, the ranks, in their order.

    `slots`, of two ranks or more, are read each time.
    """
    combine: Any = reduction(op, numpy)
    dtype, size = slots.dtype, len(slots)
    first, second, *rest = (slots[rank, ...] for rank in range(size))
    if not rest:
        return lambda out: combine(first, second, out=out)
    if first.size == 1:  # `reduce` adds the values of one element pairwise
        accumulate, running = combine.accumulate, numpy.empty(size, dtype)
        column, last = slots.reshape(-1), running[-1:].reshape(())

        def reduce_one(out: Any) -> None:
            accumulate(column, 0, dtype, running)
            out[...] = last

        return reduce_one
    if size <= _MOST_PAIRS or first.nbytes > _MOST_REDUCED_BYTES:
        return lambda out: _one_by_one(combine, first, second, rest, out)
    reduce = combine.reduce
    if op == "sum" and dtype.kind in "fc":  # by itself `reduce` begins with 0, and so loses the sign of -0
        zero = dtype.type(-0.0 if dtype.kind == "f" else complex(-0.0, -0.0))
        return lambda out: reduce(slots, 0, dtype, out, False, zero)
    return lambda out: reduce(slots, 0, dtype, out)


def _one_by_one(combine: Callable[..., Any], first: Any, second: Any, rest: Sequence[Any], out: Any) -> None:
    combine(first, second, out=out)
    for other in rest:
        combine(out, other, out=out)


class SegmentAllReduce(BucketReduction):
    """The all-reduce of an array of `shape` and `dtype`, bound to the segments.

    Each rank puts its values into its `slot` before it begins a call.  Results belong to `targets`, by default one of
    this shape and dtype; they are multiplied by `scale`.
    """

    def __init__(
        self,
        segments: SharedSegments,
        rank: int,
        shape: tuple[int, ...],
        dtype: Any,
        op: str,
        scale: float | None = None,
        targets: Pieces | None = None,
    ) -> None:
        self.owned = [(0, prod(shape))]
        self._scale, self._targets = scale, targets
        self._sums = None if targets is None else numpy.empty(shape, dtype)
        nbytes = prod(shape) * dtype.itemsize
        rooms = self._rooms(segments)
        self._slots = [room[:, :nbytes].view(dtype).reshape(len(room), *shape) for room in rooms]
        self._mine = tuple(slots[rank, ...] for slots in self._slots)
        self._reduce_fns = tuple(rank_order(op, slots) for slots in self._slots)

    @staticmethod
    def _rooms(segments: SharedSegments) -> Sequence[Any]:
        return segments.segments

    def slot(self, call: int) -> Any:
        """Return where this rank writes its values for collective `call`, before it begins it."""
        return self._mine[call & 1]

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """Reduce what lies in the slots; each rank transforms all of it by itself."""
        if self._sums is None and transform is None:
            out = targets[0]
            self._reduce_fns[watch.call & 1](out)
            if self._scale is not None:
                numpy.multiply(out, self._scale, out=out)
        else:
            self._deliver(self._reduce_fns[watch.call & 1], targets, transform)

    def _deliver(self, reduce: Callable[[Any], object], targets: Sequence[Any], transform: Transform | None) -> None:
        """Reduce by ``reduce(out)``, and bring the values to where they belong."""
        if self._sums is not None:
            out = self._sums
        else:
            out = targets[0] if transform is None else numpy.empty_like(self._mine[0])
        reduce(out)
        if self._scale is not None:
            numpy.multiply(out, self._scale, out=out)
        if transform is not None:
            transform(0, out.reshape(-1))
        elif self._targets is not None:
            self._targets.scatter(0, out.reshape(-1), targets)


class PlaceAllReduce(SegmentAllReduce):
    """The same through the places of `DirectSum`, which are longer: it takes one turn.

    A rank fills its place for the next call when all ranks have posted this one.  They posted it after their last turn,
    so nobody reads the place any more.
    """

    def __init__(self, segments: SharedSegments, *like: Any) -> None:
        super().__init__(segments, *like)
        self._segments = segments

    @staticmethod
    def _rooms(segments: SharedSegments) -> Sequence[Any]:
        return segments.places[:2]  # the fewer, the more of them stays in cache

    def slot(self, call: int) -> Any:
        """Return where this rank writes its values for the next call, before it begins it."""
        return self._mine[self._segments.turn & 1]

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """As for short ones."""
        turn = self._segments.turn
        self._segments.turn = turn + 1
        self._deliver(self._reduce_fns[turn & 1], targets, transform)


class ShareAllReduce(PlaceAllReduce):
    """The same for more than two ranks, of which each adds up a share, and copies what the others have added up.

    A rank writes the sums of its share over its own values there.  No other rank reads them before they are complete.
    """

    def __init__(
        self, segments: SharedSegments, rank: int, shape: tuple[int, ...], dtype: Any, op: str, *more: Any
    ) -> None:
        super().__init__(segments, rank, shape, dtype, op, *more)
        size = len(segments.filled_words)
        cuts = shares(prod(shape), size)
        parts = [slice(start, stop) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
        others = [each for each in range(size) if each != rank]
        self._rank, self._part = rank, parts[rank]
        self._reduced = tuple(segments.reduced_words[each] for each in others)
        flat = [slots.reshape(size, -1) for slots in self._slots]
        self._share_fns = tuple(rank_order(op, slots[:, parts[rank]]) for slots in flat)
        self._shares = tuple(slots[rank, parts[rank]] for slots in flat)
        self._others = tuple([(parts[each], slots[each, parts[each]]) for each in others] for slots in flat)

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """As for short ones."""
        self._deliver(partial(self._add_up, watch), targets, transform)

    def _add_up(self, watch: Watch, out: Any) -> None:
        segments, flat, part = self._segments, out.reshape(-1), self._part
        turn, at = segments.turn, segments.turn & 1
        sums = flat[part]
        self._share_fns[at](sums)
        self._shares[at][...] = sums
        segments.turn = turn + 1
        segments.say_reduced(self._rank, turn + 1)
        segments.wait(self._reduced, turn + 1, watch)
        for where, theirs in self._others[at]:
            flat[where] = theirs
