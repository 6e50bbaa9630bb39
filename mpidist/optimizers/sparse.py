"""Gradients that are some rows of their variable (`IndexedSlices`): checked, summed over replicas.

The rows of all replicas are joined in the order of the replicas, and those of one number added in that order: all ranks
get the same bits.
"""

from __future__ import annotations

from typing import Any

from mpidist.variables import IndexedSlices


def rows_of_variable(gradient: IndexedSlices, variable: Any) -> IndexedSlices:
    """Return the rows in the variable's dtype, every row once.  Local.

    Raises
    ------
    ValueError
        They are no rows of the variable.
    """
    try:
        gradient.check(variable.shape)
    except ValueError as error:
        raise ValueError(f"the gradient for variable {variable.name!r} does not fit: {error}") from None
    values = gradient.values if gradient.values.dtype == variable.dtype else gradient.values.astype(variable.dtype)
    return IndexedSlices(values, gradient.indices, variable.shape).coalesced()


def sum_over_replicas(gradient: IndexedSlices, extended: Any) -> IndexedSlices:
    """Return the sum of the rows of all replicas, every row once.

    Collective: every rank calls it in the same order, with rows of the same array.
    """
    if extended.num_replicas == 1:
        return gradient.coalesced()
    values = extended.gather_array(gradient.values, 0)
    indices = extended.gather_array(gradient.indices.astype("int64"), 0)
    return IndexedSlices(values, indices, gradient.dense_shape).coalesced()


def values_of(gradient: Any) -> Any:
    """Return the elements of a summed gradient that may differ from 0.  Local."""
    return gradient.values if isinstance(gradient, IndexedSlices) else gradient
