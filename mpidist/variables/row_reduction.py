"""Gather and reduce the `IndexedSlices` of several ranks.  All Collective; ranks may differ in the number of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from mpidist import arrays
from mpidist.collectives.communicator import Communicator
from mpidist.options import ReduceOp
from mpidist.variables.indexed_slices import IndexedSlices


def gather_rows(
    communicator: Communicator, rows: IndexedSlices, timeout_seconds: float | None, names: Sequence[str] = ()
) -> IndexedSlices:
    """Return the rows of all ranks, one after another in rank order; ranks compare the names."""
    arrays.check_movable(rows.dtype)
    gather = communicator.all_gather
    own = rows.indices.astype(numpy.int64, copy=False)
    indices = gather(own, timeout_seconds=timeout_seconds, paths=tuple(names))
    return IndexedSlices(gather(rows.values, timeout_seconds=timeout_seconds), indices, rows.dense_shape)


def reduce_rows(
    communicator: Communicator,
    reduce_op: ReduceOp,
    rows: IndexedSlices,
    timeout_seconds: float | None,
    names: Sequence[str] = (),
) -> IndexedSlices:
    """Return the rows of all ranks reduced, each row named once; a mean divides by the number of ranks.

    Ranks compare the `names` of what the rows are of.

    ValueError, before any communication, for what is neither a sum nor a mean: the rows that a rank does not name are
    zeros.
    """
    if not reduce_op.adds:
        raise ValueError(f"IndexedSlices have sums and means, got {reduce_op.name}; give it `rows.to_dense(shape)`")
    dtype = rows.dtype
    arrays.check_reducible(dtype, "sum")
    wide, result = arrays.reduction_dtypes(dtype, reduce_op.verb)
    rows = gather_rows(communicator, rows, timeout_seconds, names)
    total = IndexedSlices(rows.values.astype(wide, copy=False), rows.indices, rows.dense_shape).coalesced()
    divisor = communicator.size if reduce_op is ReduceOp.MEAN else 1
    values = total.values if divisor == 1 else total.values / wide.type(divisor)
    return total.with_values(values.astype(result, copy=False))
