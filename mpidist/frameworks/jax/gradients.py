"""`all_reduce` and `all_gather` of JAX arrays through which gradients flow; outside of `jit`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy

from mpidist import arrays
from mpidist.collectives.exchange import plain
from mpidist.frameworks.jax import cuda
from mpidist.frameworks.jax.handover import put
from mpidist.frameworks.jax.leaf import kind_of, leaf_of
from mpidist.frameworks.jax.reduction import reduce_tree
from mpidist.frameworks.replicas import replicas_in_force
from mpidist.options import ReduceOp


def all_reduce(x: Any, op: str | ReduceOp = "sum") -> jax.Array:
    """Return an array reduced over all ranks; `jax.grad` differentiates through it.

    The gradient is that of the sum of all ranks' losses: the backward pass reduces the cotangents of all ranks by the
    same operation.  So it is collective too.

    Collective: every rank calls it in the same order; so is its backward pass, wherever a gradient is taken.  Outside
    of ``jit`` and ``vmap``.

    Parameters
    ----------
    x : array of floats
    op : str or ReduceOp
        ``"sum"`` or ``"mean"``.

    Returns
    -------
    jax.Array
        The same bits on all ranks.

    Raises
    ------
    TypeError, ValueError, UnsupportedDtypeError, CollectiveMismatchError
        As `reduce_tree`.
    """
    return _all_reduce(_array(x), ReduceOp.of_gradients(op).verb)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_reduce(x: jax.Array, op: str) -> jax.Array:
    return reduce_tree(x, op)


def _all_reduce_forward(x: jax.Array, op: str) -> tuple[jax.Array, None]:
    return _all_reduce(x, op), None


def _all_reduce_backward(op: str, _: None, cotangent: jax.Array) -> tuple[jax.Array]:
    return (_all_reduce(cotangent, op),)


_all_reduce.defvjp(_all_reduce_forward, _all_reduce_backward)


def all_gather(x: Any, axis: int = 0) -> jax.Array:
    """Return the arrays of all ranks joined along an axis, in rank order; `jax.grad` differentiates through it.

    The gradient is that of the sum of all ranks' losses: the backward pass adds up the cotangents of all ranks, and
    each rank takes the part that is its own.  So it is collective too.

    Collective: every rank calls it in the same order; so is its backward pass, wherever a gradient is taken.  Outside
    of ``jit`` and ``vmap``.

    Parameters
    ----------
    x : array of at least one dimension
        Ranks may differ in the length of `axis`, and in nothing else.
    axis : int

    Raises
    ------
    ValueError
        A scalar, or `axis` out of range.
    TypeError, UnsupportedDtypeError, CollectiveMismatchError
        As `reduce_tree`.
    """
    return _all_gather(_array(x), axis)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _all_gather(x: jax.Array, axis: int) -> jax.Array:
    leaf = leaf_of(kind_of(x), "x", "mpidist.jax.all_gather")
    if leaf.device is not None:
        cuda.require_cupy()
    with cuda.near(leaf.device):
        array = leaf.taken(x)
        axis = plain.checked_axis(array, axis)
        joined = replicas_in_force().communicator.all_gather(array, axis)
        if leaf.device is not None:
            return cuda.given([joined], [leaf.dtype], [leaf.placement])[0]
    return put([numpy.array(joined)], [leaf.placement])[0]


def _all_gather_forward(x: jax.Array, axis: int) -> tuple[jax.Array, tuple[int, int]]:
    replicas, axis = replicas_in_force(), plain.checked_axis(x, axis)
    own = replicas.own_part(x.shape[axis])
    return _all_gather(x, axis), (own.start, own.stop)


def _all_gather_backward(axis: int, own: tuple[int, int], cotangent: jax.Array) -> tuple[jax.Array]:
    total = _all_reduce(cotangent, "sum")
    return (jax.lax.slice_in_dim(total, *own, axis=axis % total.ndim),)


_all_gather.defvjp(_all_gather_forward, _all_gather_backward)


def _array(x: Any) -> Any:
    """Return an array of JAX; float64 of NumPy stays float64.  TypeError for a masked array, as `arrays.plain`."""
    is_numpy = isinstance(x, (numpy.ndarray, numpy.generic))
    return put([numpy.array(arrays.plain(x))], [None])[0] if is_numpy else jax.numpy.asarray(x)
