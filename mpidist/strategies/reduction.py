"""`Strategy.reduce` with an axis: this rank's part before the collective, and the result after it.  All Local."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

from mpidist import arrays

Axis = int | Sequence[int]


def normalized_axes(axis: Axis, dimensions: int) -> tuple[int, ...]:
    """Return axes counted from the front; ValueError when one is out of range or comes twice."""
    axes = (axis,) if isinstance(axis, (int, numpy.integer)) else tuple(axis)
    for each in axes:
        if not -dimensions <= each < dimensions:
            raise ValueError(f"Invalid reduction dimension {each} for input with {dimensions} dimensions")
    counted = tuple(int(each) % dimensions for each in axes)
    if len(set(counted)) < len(counted):
        raise ValueError(f"Invalid reduction arguments: axes {axes} name the same dimension more than once")
    return counted


def local_sum(value: Any, axes: tuple[int, ...], for_mean: bool = False) -> Any:
    """Return the sum over `axes`, in the dtype of `value`, or in float32 for 16-bit floats."""
    arrays.check_reducible(value.dtype, "sum")
    is_wide = for_mean and value.dtype.kind in "iu"
    dtype = f"{value.dtype.kind}8" if is_wide else arrays.wire_dtype(value.dtype)
    return arrays.to_array(value.sum(axis=axes, dtype=dtype))


def local_count(value: Any, axes: tuple[int, ...]) -> Any:
    """Return how many elements go into each of those sums, in integers: exact for any number of rows.

    An array of no dimensions, in the memory of `value`.
    """
    return arrays.in_memory_of(value, numpy.array(math.prod(value.shape[axis] for axis in axes), dtype=numpy.int64))


def quotient(total: Any, count: Any, dtype: Any) -> Any:
    """Return the mean; in the `dtype` of the values, float64 for integers, NaN where nothing was summed."""
    dtype = numpy.dtype(dtype)
    with numpy.errstate(divide="ignore", invalid="ignore"):
        mean = total / (count if arrays.is_device(total) else numpy.float64(count))
    return mean if dtype.kind in "iu" else mean.astype(dtype)
