"""All-reduce of a small buffer through the shared segments of a node: one flag barrier, no message.

Every rank writes its values into its own segment, posts the call on the status board, waits until all have, and sums
all segments itself, in rank order.  So all ranks get the same bits, and the barrier is the check of the call as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy

from mpidist.arrays import reduction
from mpidist.transports.shared import SharedSegments


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

    def combine(self, call: int, out: Any) -> None:
        """Write the reduced values of `call`, which all ranks have come to, into `out`."""
        first, second, rest = self._values[call % len(self._values)]
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
        return super().slot(self._segments.turn)

    def combine(self, call: int, out: Any) -> None:
        """Write the reduced values of `call`, which all ranks have come to, into `out`."""
        turn = self._segments.turn
        self._segments.turn = turn + 1
        super().combine(turn, out)
