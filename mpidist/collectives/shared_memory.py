"""All-reduce of a small buffer through the shared segments of a node: flags, no message.

Every rank writes its values into its own segment, posts the call on the status board, waits until all have, and sums
all segments itself, or its share of them, in rank order.  So all ranks get the same bits, and the barrier is the check
of the call as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy

from mpidist.arrays import reduction
from mpidist.collectives.pieces import shares
from mpidist.runtime.control import Watch
from mpidist.transports.node_memory import SharedSegments

#: By rank, the first two apart: what is added up.
_Values = tuple[Any, Any, tuple[Any, ...]]


class SegmentAllReduce:
    """The all-reduce of an array of `shape` and `dtype`, bound to the segments.

    Parameters
    ----------
    segments : SharedSegments
    rank : int
        Of this process, among those that share the segments.
    shape : tuple of int
    dtype : numpy.dtype
    op : str
        ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.
    """

    def __init__(self, segments: SharedSegments, rank: int, shape: tuple[int, ...], dtype: Any, op: str) -> None:
        nbytes = prod(shape) * dtype.itemsize
        values = [[room[:nbytes].view(dtype).reshape(shape) for room in by_rank] for by_rank in self._rooms(segments)]
        self._mine = tuple(by_rank[rank] for by_rank in values)
        self._values = tuple((first, second, tuple(rest)) for first, second, *rest in values)
        self._combine = reduction(op, numpy)

    @staticmethod
    def _rooms(segments: SharedSegments) -> Sequence[Sequence[Any]]:
        return segments.segments

    def slot(self, call: int) -> Any:
        """Return where this rank writes its values for collective `call`, before it begins it."""
        return self._mine[call % len(self._mine)]

    def combine(self, watch: Watch, out: Any) -> None:
        """Write the reduced values into `out`; `watch` is that of the call, which all ranks have come to."""
        self._add_up(self._values[watch.call % len(self._values)], out)

    def _add_up(self, values: _Values, out: Any) -> None:
        first, second, rest = values
        self._combine(first, second, out=out)
        for other in rest:
            self._combine(out, other, out=out)


class PlaceAllReduce(SegmentAllReduce):
    """The same through the places of `DirectSum`, which are longer: it takes one turn.

    All have posted this call when a rank goes on to its next one, which they did after they had taken the turns before:
    so nobody reads what it fills then.
    """

    def __init__(self, segments: SharedSegments, rank: int, shape: tuple[int, ...], dtype: Any, op: str) -> None:
        super().__init__(segments, rank, shape, dtype, op)
        self._segments = segments

    @staticmethod
    def _rooms(segments: SharedSegments) -> Sequence[Sequence[Any]]:
        return segments.places[:2]  # the fewer, the more of them stays in cache

    def slot(self, call: int) -> Any:
        """Return where this rank writes its values for the next call, before it begins it."""
        return self._mine[self._segments.turn % len(self._mine)]

    def combine(self, watch: Watch, out: Any) -> None:
        """Write the reduced values into `out`; `watch` is that of the call, which all ranks have come to."""
        turn = self._segments.turn
        self._segments.turn = turn + 1
        self._add_up(self._values[turn % len(self._values)], out)


class ShareAllReduce(PlaceAllReduce):
    """The same for more than two ranks, of which each adds up a share, and copies what the others have added up.

    A rank puts the sums over its own values of its share, which no other rank reads before they are there.
    """

    def __init__(self, segments: SharedSegments, rank: int, shape: tuple[int, ...], dtype: Any, op: str) -> None:
        super().__init__(segments, rank, shape, dtype, op)
        size = len(segments.filled_words)
        cuts = shares(prod(shape), size)
        parts = [slice(start, stop) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
        self._rank, self._part = rank, parts[rank]
        others = [each for each in range(size) if each != rank]
        self._reduced = tuple(segments.reduced_words[each] for each in others)
        self._shares, self._sums = [], []
        for first, second, rest in self._values:
            by_rank = [values.reshape(-1) for values in (first, second, *rest)]
            mine = [values[parts[rank]] for values in by_rank]
            self._shares.append((mine[0], mine[1], tuple(mine[2:])))
            self._sums.append([(parts[each], by_rank[each][parts[each]]) for each in others])

    def combine(self, watch: Watch, out: Any) -> None:
        """Write the reduced values into `out`; `watch` is that of the call, which all ranks have come to."""
        segments, flat, part = self._segments, out.reshape(-1), self._part
        turn, at = segments.turn, segments.turn % len(self._values)
        self._add_up(self._shares[at], flat[part])
        self._mine[at].reshape(-1)[part] = flat[part]
        segments.turn = turn + 1
        segments.say_reduced(self._rank, turn + 1)
        segments.wait(self._reduced, turn + 1, watch)
        for where, sums in self._sums[at]:
            flat[where] = sums
