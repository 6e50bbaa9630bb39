"""`broadcast_tree`: one rank's pytree on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.arrays import check_movable
from mpidist.collectives.exchange.plain import checked_rank
from mpidist.collectives.mismatch import fact
from mpidist.frameworks.jax import cuda
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
        Unchanged.  Arrays of JAX on one GPU, the first one in the tree, are broadcast there.
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
    MissingDependencyError
        Arrays on a GPU without CuPy.
    CollectiveMismatchError
        On all ranks: their trees differ, or lie on the GPU on some ranks only; names ranks, leaf, and both shapes.
    """
    replicas = replicas_in_force()
    root_rank = checked_rank(root_rank, replicas.size, "root_rank")
    kind = TreeKind(tree, _WHAT)
    values = kind.structure.flatten_up_to(tree)
    kind.check_dtypes(check_movable)  # other values mean nothing on another rank
    gpu = next((leaf.device for leaf in kind.leaves if leaf.device is not None), None)
    on_gpu = [position for position, leaf in enumerate(kind.leaves) if gpu is not None and leaf.device == gpu]
    others = [position for position in range(len(values)) if position not in set(on_gpu)]
    if on_gpu:
        cuda.require_cupy()
    with cuda.near(gpu):
        near = [kind.leaves[each].taken(values[each]) for each in on_gpu]
        hosts = [kind.leaves[each].on_host(values[each]) for each in others]
        _check_alike(kind, replicas, root_rank, on_gpu)
        by_position: dict[int, Any] = {}
        for position, array in zip(on_gpu, near, strict=True):  # one by one: CuPy's part of the memory may be small
            result = array if replicas.size == 1 else replicas.communicator.broadcast_copy(array, root_rank)
            leaf = kind.leaves[position]
            (by_position[position],) = cuda.given([result], [leaf.dtype], [leaf.placement])
    results = dict(zip(others, _broadcast(hosts, replicas, root_rank), strict=True))
    in_jax = [position for position in others if kind.leaves[position].in_jax]
    arrays = put([results[each] for each in in_jax], [kind.leaves[each].placement for each in in_jax])
    by_position.update(zip(in_jax, arrays, strict=True))
    for position, result in results.items():
        if position not in by_position:
            by_position[position] = result.copy()
    return kind.packed([leaf.given(by_position[each], values[each]) for each, leaf in enumerate(kind.leaves)])


def _check_alike(kind: TreeKind, replicas: Replicas, root: int, on_gpu: Sequence[int]) -> None:
    """Make sure that all ranks have trees of the same leaves, in the same places, and kinds of keys.  Collective."""
    described = [
        (name, leaf.dtype, leaf.shape) if leaf.has_sum else (name, given.dtype, given.shape)
        for name, leaf, given in zip(kind.names, kind.leaves, kind.kinds, strict=True)
    ]
    places = [fact(f"leaf {kind.names[each]}", "broadcast on its GPU") for each in on_gpu]
    replicas.check("broadcast_tree", [*described, *places, fact("root_rank", root)])


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
