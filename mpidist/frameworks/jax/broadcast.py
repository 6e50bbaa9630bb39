"""`broadcast_tree`: one rank's pytree on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.arrays import check_movable
from mpidist.collectives.exchange.plain import checked_rank
from mpidist.collectives.mismatch import fact
from mpidist.frameworks.jax.handover import put
from mpidist.frameworks.jax.memory import ResultMemory
from mpidist.frameworks.jax.trees import TreeKind
from mpidist.frameworks.replicas import Replicas, replicas_in_force

_WHAT = "mpidist.jax.broadcast_tree"


def broadcast_tree(tree: Any, root_rank: int = 0) -> Any:
    """Return the pytree of rank `root_rank` on all ranks: parameters, states of optimizers, random keys.

    Collective: every rank calls it in the same order, with trees of the same paths, shapes and dtypes.  Outside of
    ``jit``.

    Parameters
    ----------
    tree : pytree of arrays of JAX or NumPy, random keys, and numbers
        Unchanged.
    root_rank : int

    Returns
    -------
    pytree
        As `tree`, with the root's values, on the root as well; the same bits on all ranks.  Arrays have the dtype,
        weak type and sharding that they had on this rank.

    Raises
    ------
    ValueError
        There is no such rank; or an array was donated (names the leaf).
    TypeError
        A tracer, or a leaf that is no array and no number; names it.
    UnsupportedDtypeError
        An array on several GPUs or of another process; names the leaf.
    CollectiveMismatchError
        On all ranks: their trees differ; names ranks, leaf, and both shapes.
    """
    replicas = replicas_in_force()
    root_rank = checked_rank(root_rank, replicas.size, "root_rank")
    kind = TreeKind(tree, _WHAT)
    values = kind.structure.flatten_up_to(tree)
    kind.check_dtypes(check_movable)  # other values mean nothing on another rank
    hosts = kind.on_host(values)
    _check_alike(kind, replicas, root_rank)
    results = _broadcast(hosts, replicas, root_rank)
    in_jax = [position for position, leaf in enumerate(kind.leaves) if leaf.in_jax]
    arrays = put([results[each] for each in in_jax], [kind.leaves[each].placement for each in in_jax])
    by_position: dict[int, Any] = dict(zip(in_jax, arrays, strict=True))
    for position, result in enumerate(results):
        if position not in by_position:
            by_position[position] = result.copy()
    return kind.packed([leaf.given(by_position[each], values[each]) for each, leaf in enumerate(kind.leaves)])


def _check_alike(kind: TreeKind, replicas: Replicas, root: int) -> None:
    """Make sure that all ranks have trees of the same leaves, and kinds of keys.  Collective."""
    described = [
        (name, leaf.dtype, leaf.shape) if leaf.has_sum else (name, given.dtype, given.shape)
        for name, leaf, given in zip(kind.names, kind.leaves, kind.kinds, strict=True)
    ]
    replicas.check("broadcast_tree", [*described, fact("root_rank", root)])


def _broadcast(hosts: Sequence[Any], replicas: Replicas, root: int) -> list[Any]:
    """Return the root's arrays, in memory that nobody writes again.  Collective."""
    memory = ResultMemory([(host.dtype, host.shape) for host in hosts])
    whole = memory.whole()
    results = memory.cut(whole)
    if replicas.rank == root:
        for host, result in zip(hosts, results, strict=True):
            result[...] = host
    if replicas.size > 1 and whole.size:
        replicas.communicator.broadcast(whole, root)
    return results
