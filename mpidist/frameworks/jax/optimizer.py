"""`distributed`: an optax transformation whose update reduces."""

from __future__ import annotations

from typing import Any

import jax

from mpidist.compression import Compression
from mpidist.errors import MissingDependencyError
from mpidist.frameworks.jax.reduction import TreeReduction
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
        ``update(gradients, state, params=None, *, weight=None, **extra)``; weight as for `reduce_tree`.

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
        return inner.update(reduced, state, params, **extra) if extra else compiled(reduced, state, params)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _optax() -> Any:
    try:
        import optax
    except ImportError as error:
        raise MissingDependencyError(f"mpidist.jax.distributed needs optax: pip install optax ({error})") from error
    return optax
