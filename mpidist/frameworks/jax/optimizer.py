"""`distributed`: an optax transformation whose update reduces."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import numpy

from mpidist.collectives.mismatch import fact
from mpidist.compression import Compression
from mpidist.errors import CollectiveMismatchError, MissingDependencyError
from mpidist.frameworks.jax.reduction import TreeReduction
from mpidist.frameworks.replicas import replicas_in_force
from mpidist.options import ReduceOp


def distributed(
    optimizer: Any,
    op: str | ReduceOp = "mean",
    compression: Compression | None = None,
    reduction: TreeReduction | None = None,
    jit: bool = True,
) -> Any:
    """Return an optax transformation that reduces gradients over all ranks, and then does what `optimizer` does.

    Local; its ``update`` is collective: every rank calls it in the same order, outside of ``jit``.  ``init`` is that of
    `optimizer`, so states and checkpoints are those of `optimizer`.

    Parameters
    ----------
    optimizer : optax.GradientTransformation
        What it does with norms (clipping) or with steps that are not finite, it does to the reduced gradients.
    op : str or ReduceOp
        As for `reduce_tree`.
    compression : mpidist.compression.Compression, optional
    reduction : TreeReduction, optional
        In place of `op` and `compression`: your own, whose ``state_dict()`` a checkpoint has with error feedback.
    jit : bool
        Whether ``optimizer.update`` is compiled; False where it cannot be.  Extra arguments of the user's are passed to
        it uncompiled.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        ``update(gradients, state, params=None, *, weight=None, **extra)``; weight as for `reduce_tree`.  Numbers and
        arrays in `extra`, such as the ``value`` of ``optax.polyak_sgd``, must be the same on all ranks: reduce them,
        too.  Else ``update`` raises CollectiveMismatchError on all ranks.

    Raises
    ------
    TypeError
        `optimizer` is no optax transformation.

    Examples
    --------
    >>> optimizer = mpidist.jax.distributed(optax.adam(1e-3))
    >>> updates, state = optimizer.update(gradients, state, parameters, weight=len(rows))
    """
    optax = _optax()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"distributed() takes an optax transformation such as optax.adam(1e-3), got {optimizer!r}")
    reduce = TreeReduction(op, compression) if reduction is None else reduction
    inner = optax.with_extra_args_support(optimizer)
    compiled = jax.jit(inner.update) if jit else inner.update

    def update(
        updates: Any, state: Any, params: Any = None, *, weight: float | None = None, **extra: Any
    ) -> tuple[Any, Any]:
        reduced = reduce(updates, weight)
        if not extra:
            return compiled(reduced, state, params)
        _require_same(extra)
        return inner.update(reduced, state, params, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)


#: What has values to compare, of all that may be an extra argument.
_VALUES = (jax.Array, numpy.ndarray, numpy.generic, bool, int, float, complex)


def _require_same(extra: dict[str, Any]) -> None:
    """Raise CollectiveMismatchError, on all ranks, if numbers or arrays among arguments differ.  Collective."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(extra)
    facts = [
        fact(jax.tree_util.keystr(path, simple=True, separator="/"), _told(leaf))
        for path, leaf in leaves
        if isinstance(leaf, _VALUES)
    ]
    try:
        replicas_in_force().check("update of mpidist.jax.distributed", facts)
    except CollectiveMismatchError as error:
        raise CollectiveMismatchError(
            f"{error}. An extra argument of one rank's rows alone would make the ranks' parameters drift apart: give "
            "that of all ranks, as by value=mpidist.jax.reduce_tree(value, weight=rows)"
        ) from None


def _told(leaf: Any) -> str:
    """Return a number, or the checksum of an array."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = numpy.asarray(leaf)
    return repr(array.item()) if array.size == 1 else f"{zlib.crc32(array.tobytes()):#010x}"


def _optax() -> Any:
    try:
        import optax
    except ImportError as error:
        raise MissingDependencyError(f"mpidist.jax.distributed needs optax: pip install optax ({error})") from error
    return optax
