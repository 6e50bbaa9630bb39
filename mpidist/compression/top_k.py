"""`TopK`: the values of largest magnitude alone."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist.compression.base import Compression
from mpidist.errors import quoted

#: Positions are sent as 32-bit numbers.
_MOST_ELEMENTS = 1 << 32


class TopK(Compression):
    """The largest values in magnitude with their positions; all others are kept for the next call.

    Taken over the packed list as a whole, dtype by dtype.  Each rank chooses by itself; sums have the values that any
    rank chose.  Where nothing is rounded in between (``values=None``), what the calls have returned and what is still
    kept come to the sum of all that was given.  Values that are not finite are taken first, so an overflow is seen.

    Parameters
    ----------
    ratio : float
        How many of the values are sent: above 0, at most 1.  At least one is.
    values : Compression, optional
        The stage that codes the chosen values, such as ``Float16()``; by default they are sent as they are.
    error_feedback : bool
        Whether what is not sent is added to the values of the next call.  Without it, small gradients are lost, and
        training mostly ends elsewhere.

    Raises
    ------
    ValueError
        A ratio out of its range.
    """

    is_gathered = True

    def __init__(self, ratio: float = 0.01, values: Compression | None = None, error_feedback: bool = True) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"TopK sends a part of the values: ratio must be above 0 and at most 1, got {ratio!r}")
        if values is not None and not isinstance(values, Compression):
            raise TypeError(f"values must be a Compression or None, got {quoted(values)}")
        self.ratio, self.values, self.error_feedback = float(ratio), values, bool(error_feedback)

    def chosen(self, elements: int) -> int:
        """Return how many of so many values are sent.  Local."""
        return min(elements, max(1, round(self.ratio * elements)))

    def code_bytes(self, elements: int, dtype: numpy.dtype) -> int:
        """Return 4 bytes for each position, up to a multiple of 8, and what the chosen values take."""
        if elements > _MOST_ELEMENTS:
            raise ValueError(f"TopK has positions of 32 bits, got {elements} values of {dtype}; reduce them in parts")
        count = self.chosen(elements)
        coded = count * dtype.itemsize if self.values is None else self.values.code_bytes(count, dtype)
        return _positions_bytes(count) + coded

    def encode(self, values: numpy.ndarray, code: numpy.ndarray) -> None:
        """Write the positions in ascending order, and the values there."""
        count = self.chosen(values.size)
        places = numpy.argpartition(numpy.abs(values), values.size - count)[values.size - count :]  # NaNs are last
        places.sort()
        end = _positions_bytes(count)
        code[:end] = 0
        code[: 4 * count].view(numpy.uint32)[:] = places
        if self.values is None:
            code[end:].view(values.dtype)[:] = values[places]
        else:
            self.values.encode(values[places], code[end:])

    def decode(self, code: numpy.ndarray, values: numpy.ndarray) -> None:
        """Write the chosen values to their places, and 0 to all others."""
        values[:] = 0
        places, chosen = self._parts(code, values)
        values[places] = chosen

    def add(self, code: numpy.ndarray, total: numpy.ndarray) -> None:
        """Add the chosen values to those at their places."""
        places, chosen = self._parts(code, total)
        total[places] += chosen

    def _parts(self, code: numpy.ndarray, like: numpy.ndarray) -> tuple[Any, Any]:
        """Return positions and values of a code."""
        count = self.chosen(like.size)
        end = _positions_bytes(count)
        places = code[: 4 * count].view(numpy.uint32)
        if self.values is None:
            return places, code[end:].view(like.dtype)
        chosen = numpy.empty(count, like.dtype)
        self.values.decode(code[end:], chosen)
        return places, chosen


def _positions_bytes(count: int) -> int:
    """Return the length of so many positions, at whose end 8-byte values may lie."""
    return -(-4 * count // 8) * 8
