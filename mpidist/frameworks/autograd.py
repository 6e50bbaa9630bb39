"""`all_reduce` and `all_gather` of NumPy arrays through which the gradients of autograd flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autograd.extend import defjvp, defvjp, primitive

from mpidist.arrays import to_array
from mpidist.collectives.exchange import plain
from mpidist.frameworks.replicas import replicas_in_force
from mpidist.options import ReduceOp

__all__ = ["all_gather", "all_reduce"]


def all_reduce(x: Any, op: str | ReduceOp = "sum") -> Any:
    """Return an array, or a number, reduced over all ranks; autograd differentiates through it, as often as one likes.

    The gradient is that of the sum of all ranks' losses: the backward pass reduces what comes back on all ranks by the
    same operation.  So it is collective too.

    Collective: every rank calls it in the same order; so is its backward pass, wherever a gradient is taken.

    Parameters
    ----------
    x : array or number
    op : str or ReduceOp
        ``"sum"`` or ``"mean"``.

    Returns
    -------
    array or scalar
        The same bits on all ranks.  Means of integers are float64.

    Raises
    ------
    ValueError
        Another operation.
    UnsupportedDtypeError
        A dtype without a sum.
    CollectiveMismatchError
        On all ranks: their shapes or dtypes differ, or one of them called something else.
    """
    return _all_reduce(x, ReduceOp.of_gradients(op).verb)


@primitive
def _all_reduce(x: Any, op: str) -> Any:
    array = to_array(x)
    replicas = replicas_in_force()
    (result,) = replicas.bind([array], op, [f"x of mpidist.autograd.all_reduce({op})"]).start([array]).wait()
    return result if array.ndim else result[()]


defvjp(_all_reduce, lambda answer, x, op: lambda g: _all_reduce(g, op), argnums=(0,))
defjvp(_all_reduce, lambda g, answer, x, op: _all_reduce(g, op), argnums=(0,))


def all_gather(x: Any, axis: int = 0) -> Any:
    """Return the arrays of all ranks joined along an axis, in rank order; autograd differentiates through it.

    The gradient is that of the sum of all ranks' losses: the backward pass adds up what comes back on all ranks, and
    each rank takes the part that is its own.  So it is collective too.

    Collective: every rank calls it in the same order; so is its backward pass, wherever a gradient is taken.

    Parameters
    ----------
    x : array of at least one dimension
        Ranks may differ in the length of `axis`, and in nothing else.
    axis : int

    Raises
    ------
    ValueError
        A scalar, or `axis` out of range.
    UnsupportedDtypeError
        A dtype that cannot be sent.
    CollectiveMismatchError
        On all ranks: their arrays do not fit together.
    """
    return _all_gather(x, axis)


@primitive
def _all_gather(x: Any, axis: int) -> Any:
    array = to_array(x)
    return replicas_in_force().communicator.all_gather(array, plain.checked_axis(array, axis))


def _own_part(answer: Any, x: Any, axis: int) -> Callable[[Any], Any]:
    replicas, axis = replicas_in_force(), plain.checked_axis(to_array(x), axis)
    own = (*[slice(None)] * axis, replicas.own_part(x.shape[axis]))
    return lambda g: _all_reduce(g, "sum")[own]


defvjp(_all_gather, _own_part, argnums=(0,))
defjvp(_all_gather, lambda g, answer, x, axis: _all_gather(g, axis), argnums=(0,))
