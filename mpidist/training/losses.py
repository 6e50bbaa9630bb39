"""Losses over the global batch: every replica divides by the rows of all replicas, so that the sum is the mean."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy

from mpidist import arrays, context
from mpidist.errors import quoted


def compute_average_loss(per_example_loss: Any, sample_weight: Any = None, global_batch_size: Any = None) -> Any:
    """Return this replica's share of the average loss; the sum over the replicas is the average.

    Local with `global_batch_size`; without it collective: every replica calls it in the same order.

    Parameters
    ----------
    per_example_loss : array, shape (rows, ...)
        All its elements are summed.  Without rows the share is 0.
    sample_weight : float or array, optional
        Multiplies the losses.  With fewer dimensions than these it is one weight for each row.
    global_batch_size : int, optional
        Rows to divide by; with 0 the result is 0.  Default: the true number of rows of all replicas, summed over them.

    Returns
    -------
    scalar
        In the dtype of the losses; float64 for whole numbers.

    Raises
    ------
    ValueError
        If the loss is a scalar, or `global_batch_size` is negative or not a scalar.
    TypeError
        If `global_batch_size` is not an integer.
    RuntimeError
        If called in cross-replica context.
    """
    _require_replica_context("compute_average_loss")
    loss = _as_array(per_example_loss)
    if not loss.shape:
        raise ValueError(
            "Invalid value passed for `per_example_loss`. Expected a tensor with at least rank 1. "
            f"Received per_example_loss={per_example_loss} with rank 0"
        )
    rows = _global_rows(loss) if global_batch_size is None else _batch_size(global_batch_size)
    values = _wide(loss)
    if sample_weight is not None:
        values = values.astype("float64") if values.dtype.kind in "biu" else values  # or weights would be cut off
        weights = _as_array(sample_weight).astype(values.dtype)
        values = values * weights.reshape(shape_of_weights(weights.shape, values.shape))
    return _share(values.sum(), rows, loss.dtype)


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Return the sum of a loss that all replicas have alike, divided by their number.  Local.

    Parameters
    ----------
    regularization_loss : array
        Of any shape, the same on all replicas.

    Raises
    ------
    RuntimeError
        If called in cross-replica context.
    """
    _require_replica_context("scale_regularization_loss")
    loss = _as_array(regularization_loss)
    return _share(_wide(loss).sum(), context.get_strategy().num_replicas_in_sync, loss.dtype)


def _require_replica_context(name: str) -> None:
    if context.has_strategy() and context.in_cross_replica_context():
        raise RuntimeError(
            f"You are calling `{name}` in cross replica context, while it was expected to be called in replica context."
        )


def _as_array(value: Any) -> Any:
    """Return `value` as an array; numbers of Python become float32, as in TensorFlow."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return value
    array = arrays.to_array(value)
    return array.astype("float32") if array.dtype == numpy.float64 else array


def _wide(loss: Any) -> Any:
    """Return losses in the dtype in which they are added up: a sum of 16-bit floats would stop to grow, or overflow."""
    is_short = loss.dtype.kind not in "biu" and loss.dtype.itemsize < 4
    return loss.astype("float32") if is_short else loss


def _share(total: Any, number: int, dtype: Any) -> Any:
    """Return a total over a number, 0 for none, in the dtype of the losses; that of whole numbers in the quotient's."""
    # NumPy 1 gives float64 for two scalars
    divisor = total.dtype.type(number) if total.dtype.kind in "fc" else number
    share = total / divisor if number else total * divisor
    return share if dtype.kind in "biu" or share.dtype == dtype else share.astype(dtype)


def _global_rows(loss: Any) -> int:
    replica = context.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return len(loss)
    return int(replica.all_reduce("SUM", numpy.array([len(loss)], "int64"))[0])


def _batch_size(value: Any) -> int:
    shape = numpy.shape(value)
    if shape:
        raise ValueError(f"global_batch_size must be scalar.. Expected scalar shape, saw shape: {shape}.")
    try:
        size = operator.index(value)
    except TypeError:
        raise TypeError(f"global_batch_size must be an int, got {quoted(value)}") from None
    if size < 0:
        raise ValueError(f"global_batch_size must be non-negative, got {size}")
    return size


def shape_of_weights(weights: Sequence[int], losses: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in which weights multiply losses: one for each row where they have fewer dimensions.  Local.

    ValueError where they do not fit.
    """
    shape = tuple(weights)
    if len(shape) == len(losses) + 1 and shape[-1] == 1:
        shape = shape[:-1]
    if shape:
        shape += (1,) * (len(losses) - len(shape))
    if len(shape) > len(losses) or any(own not in (1, all_) for own, all_ in zip(shape, losses, strict=False)):
        raise ValueError(f"sample_weight has shape {tuple(weights)}, which does not fit the losses' {tuple(losses)}")
    return shape
