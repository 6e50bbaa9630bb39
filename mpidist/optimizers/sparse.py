"""Gradients that are some rows of their variable (`IndexedSlices`): checked, summed over replicas.

The rows of all replicas are joined in the order of the replicas, and those of one number added in that order: all ranks
get the same bits.
"""

from __future__ import annotations

import math
from typing import Any

from mpidist import arrays
from mpidist.errors import UnsupportedDtypeError
from mpidist.variables import IndexedSlices


def rows_of_variable(gradient: IndexedSlices, variable: Any) -> IndexedSlices:
    """Return the rows in the variable's dtype, every row once.  Local.

    ValueError where they are no rows of the variable.
    """
    try:
        gradient.check(variable.shape)
    except ValueError as error:
        raise ValueError(f"the gradient for variable {variable.name!r} does not fit: {error}") from None
    return IndexedSlices(of_dtype(gradient.values, variable), gradient.indices, variable.shape).coalesced()


def of_dtype(values: Any, variable: Any) -> Any:
    """Return values of a gradient in its variable's dtype.  Local.

    UnsupportedDtypeError where they are no numbers, or are complex ones for a variable that is not.
    """
    if values.dtype == variable.dtype:
        return values
    if not arrays.keeps_meaning(values.dtype, variable.dtype):
        raise UnsupportedDtypeError(
            f"the gradient for variable {variable.name!r} has dtype {values.dtype}, expected {variable.dtype}"
        )
    return values.astype(variable.dtype)


def sum_over_replicas(gradient: IndexedSlices, extended: Any) -> IndexedSlices:
    """Return the sum of the rows of all replicas, every row once.

    Collective: every rank calls it in the same order, with rows of the same array.
    """
    if extended.num_replicas == 1:
        return gradient.coalesced()
    values = extended.gather_array(gradient.values, 0)
    indices = extended.gather_array(gradient.indices.astype("int64"), 0)
    return IndexedSlices(values, indices, gradient.dense_shape).coalesced()


def rows_within(gradient: IndexedSlices, start: int, stop: int) -> IndexedSlices:
    """Return those of the rows whose first element is from `start` to `stop`, counted through all values.  Local."""
    width = gradient.values[:1].size or 1
    rows = slice(-(-start // width), -(-stop // width))
    return IndexedSlices(gradient.values[rows], gradient.indices[rows], gradient.dense_shape)


def dense_within(gradient: IndexedSlices, where: slice) -> Any:
    """Return a span of the flat array of which the gradient has some rows, each once.  Local."""
    assert gradient.dense_shape is not None
    _, *others = gradient.dense_shape
    width = math.prod(others) or 1
    first, last = where.start // width, -(-where.stop // width)
    inside = (gradient.indices >= first) & (gradient.indices < last)
    dense = arrays.namespace(gradient.values).zeros((last - first, *others), gradient.values.dtype)
    dense[gradient.indices[inside] - first] = gradient.values[inside]
    return dense.reshape(-1)[where.start - first * width : where.stop - first * width]


def values_of(gradient: Any) -> Any:
    """Return the elements of a summed gradient that may differ from 0.  Local."""
    return gradient.values if isinstance(gradient, IndexedSlices) else gradient
