"""Updates slice by slice: a rule written for one short flat array, applied to arrays of any size and dtype.

A slice and all that its update needs fit in the cache, so a rule of several steps reads the parameters once from
memory; and the scratch arrays are short and made once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy

from mpidist import arrays
from mpidist.device.memory import kept_empty

#: Elements of a slice: parameter, gradient, two slots and two scratch arrays of float32 fit in a 1 MiB cache.
SLICE_ELEMENTS = 1 << 15


def compute_dtype(dtype: Any) -> numpy.dtype:
    """Return the dtype in which parameters of this dtype are updated: 16-bit floats in float32.  Local."""
    dtype = numpy.dtype(dtype)
    return numpy.dtype("float32") if dtype.itemsize < 4 else dtype


class SliceScratch:
    """Short arrays for intermediate results, made on first use and kept: one set a dtype and kind of memory."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[type, numpy.dtype, int], list[Any]] = {}
        self._copies: dict[tuple[type, numpy.dtype], Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without the arrays."""
        return type(self), ()

    def arrays(self, like: Any, dtype: numpy.dtype, count: int) -> list[Any]:
        """Return `count` arrays of `dtype` for a slice of `like`, in the same kind of memory.  Local."""
        key = (type(like), dtype, count)
        size = slice_elements(like)
        found = self._arrays.get(key)
        if found is None or any(len(array) < size for array in found):
            found = self._arrays[key] = [kept_empty(size, dtype, like) for _ in range(count)]
        return found

    def flat(self, array: Any) -> Any:
        """Return an array flat, in the order of its axes: a view, or a copy that lasts until the next call.  Local.

        Gradients are often transposed views, and their parameters are not.
        """
        if array.flags.c_contiguous:
            return array.reshape(-1)
        key = (type(array), array.dtype)
        found = self._copies.get(key)
        if found is None or found.size < array.size:
            found = self._copies[key] = kept_empty(array.size, array.dtype, array)
        copy = found[: array.size]
        copy.reshape(array.shape)[...] = array
        return copy


def slice_elements(array: Any) -> int:
    """Return how many elements of `array` are updated at once: all of them in device memory.  Local."""
    return max(array.size, 1) if arrays.is_device(array) else SLICE_ELEMENTS


def bounds(array: Any) -> Iterator[slice]:
    """Yield the slices of a flat array, in order; none for an empty one.  Local."""
    step = slice_elements(array)
    for start in range(0, array.size, step):
        yield slice(start, min(start + step, array.size))


def pick(flat_arrays: Sequence[Any], where: slice) -> list[Any]:
    """Return this slice of every flat array, as views.  Local."""
    return [array[where] for array in flat_arrays]
