"""All-reduce of a small buffer through the shared segments of a node: one flag barrier, no message.

Every rank writes its values into its own segment, posts the call on the status board, waits until all have, and sums
all segments itself, in rank order.  So all ranks get the same bits, and the barrier is the check of the call as well.
"""

from __future__ import annotations

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
        self._values = tuple(
            tuple(segment[:nbytes].view(dtype).reshape(shape) for segment in segments.segments[parity])
            for parity in (0, 1)
        )
        self._mine = tuple(self._values[parity][rank] for parity in (0, 1))
        self._combine = reduction(op, numpy)

    def slot(self, call: int) -> Any:
        """Return where this rank writes its values for collective `call`, before it begins it."""
        return self._mine[call & 1]

    def combine(self, call: int, out: Any) -> None:
        """Write the reduced values of `call`, which all ranks have come to, into `out`."""
        first, second, *rest = self._values[call & 1]
        self._combine(first, second, out=out)
        for values in rest:
            self._combine(out, values, out=out)
