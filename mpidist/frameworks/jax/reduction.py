"""`TreeReduction` and `reduce_tree`: pytrees reduced over ranks, bound once and started every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy

from mpidist.arrays import check_reducible, namespace, reduction_dtypes
from mpidist.collectives.handle import Handle
from mpidist.collectives.persistent_all_reduce import BoundAllReduce
from mpidist.compression import CompressedAllReduce, Compression
from mpidist.compression.base import require_stage
from mpidist.errors import UnsupportedDtypeError, quoted
from mpidist.frameworks.jax import cuda
from mpidist.frameworks.jax.trees import KeptTrees, Results, TreeKind
from mpidist.frameworks.replicas import Replicas, replicas_in_force
from mpidist.options import ReduceOp

_WHAT = "mpidist.jax.reduce_tree"


class TreeReduction:
    """A reduction of pytrees over all ranks, or over the replicas of the strategy in force.

    `reduce_tree` does the same without an object.  This one may be started and waited for, and it may compress.

    Parameters
    ----------
    op : str or ReduceOp
        ``"mean"`` or ``"sum"``.
    compression : mpidist.compression.Compression, optional
        A stage that codes floats on the wire; the same on all ranks.

    Raises
    ------
    ValueError
        Another operation.
    """

    def __init__(self, op: str | ReduceOp = "mean", compression: Compression | None = None) -> None:
        if compression is not None:
            require_stage(compression)
        self._op, self._compression = ReduceOp.of_gradients(op).verb, compression
        self._kept: WeakKeyDictionary[Replicas, KeptTrees[_BoundTree]] = WeakKeyDictionary()
        self._state: dict[str, Any] | None = None

    def __call__(self, tree: Any, weight: float | None = None) -> Any:
        """Return the tree reduced over all ranks; parameters and errors as for `reduce_tree`.

        Collective: every rank calls it in the same order.
        """
        return self.start(tree, weight).wait()

    def start(self, tree: Any, weight: float | None = None) -> Handle:
        """Start the reduction; its handle's ``wait()`` returns the tree.  Parameters and errors as for `reduce_tree`.

        Collective: every rank starts, or calls, its collectives in the same order.  Arrays of NumPy in the tree must
        not change, and arrays of JAX not be donated, before `wait` returns.
        """
        if weight is not None and self._op != "mean":
            raise ValueError("a weight is for op='mean'; for a weighted sum, multiply the tree by the weight")
        replicas = replicas_in_force()
        values, bound = self._trees_of(replicas).of(tree)
        return bound.start(values, weight)

    def _trees_of(self, replicas: Replicas) -> KeptTrees[_BoundTree]:
        found = self._kept.get(replicas)
        if found is None:
            found = self._kept[replicas] = KeptTrees(lambda tree: self._bound(tree, replicas))
        return found

    def _bound(self, tree: Any, replicas: Replicas) -> _BoundTree:
        bound = _BoundTree(tree, replicas, self._op, self._compression)
        if self._state is not None and bound.compressed is not None:
            bound.compressed.load_state_dict(self._state)
            self._state = None
        return bound

    def state_dict(self) -> dict[str, Any]:
        """Return what error feedback keeps, of all ranks; empty before the first tree, and without error feedback.

        Collective: every rank calls it in the same order, and gets the same; see `CompressedAllReduce.state_dict`.

        Raises
        ------
        RuntimeError
            Trees of several structures have been reduced, so there are several states: use one object for each.
        """
        states = [each.compressed for each in self._trees_of(replicas_in_force()) if each.compressed is not None]
        if len(states) > 1:
            raise RuntimeError(
                f"{len(states)} trees of different structures, shapes or dtypes were reduced by this TreeReduction; "
                "use one TreeReduction for each of them, so that each has its state"
            )
        return states[0].state_dict() if states else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` returned, at any number of ranks, for the next tree.  Local."""
        self._kept = WeakKeyDictionary()
        self._state = dict(state) or None


class _BoundTree:
    """The reduction of trees of one structure."""

    def __init__(self, tree: Any, replicas: Replicas, op: str, compression: Compression | None) -> None:
        self.kind = TreeKind(tree, _WHAT)
        self._replicas, self._op, self._compression = replicas, op, compression
        for leaf, name in zip(self.kind.leaves, self.kind.names, strict=True):
            if not leaf.has_sum:
                raise TypeError(f"{_WHAT}: leaf {name!r} is an array of random keys, which have no sum; broadcast it")
        self.kind.check_dtypes(lambda dtype: check_reducible(dtype, "sum"))
        self._device = self.kind.device()
        if self._device is not None:
            cuda.require_cupy()
            if compression is not None:
                raise UnsupportedDtypeError(
                    f"{_WHAT}: compression={quoted(compression)} codes values in host memory, and leaf "
                    f"{self.kind.names[0]!r} lies on a GPU: reduce jax.device_get(tree), or leave compression out"
                )
        self._plain: tuple[BoundAllReduce, Results] | None = None
        self._weighted: tuple[BoundAllReduce, Results, list[Any]] | None = None
        self.compressed: CompressedAllReduce | None = None
        if compression is not None:
            reducing = self._weighted_all_reduce()[0]
            assert isinstance(reducing, CompressedAllReduce)
            self.compressed = reducing

    def start(self, values: Sequence[Any], weight: float | None) -> Any:
        """Start the reduction of the leaves of a tree.  Collective."""
        shares = None if weight is None else self._replicas.shares_of(weight)
        if self.compressed is not None:
            share = (1.0 if self._op == "sum" else 1.0 / self._replicas.size) if shares is None else shares
            return self._start_scaled(values, share)
        if self._replicas.size == 1:
            return self._alone(values)
        if shares is not None:
            return self._start_scaled(values, shares)
        with cuda.near(self._device):
            taken = self.kind.taken(values)
            if self._plain is None:
                results = Results(self.kind.leaves, [reduction_dtypes(each.dtype, self._op)[1] for each in taken])
                self._plain = self._replicas.bind(taken, self._op, self.kind.names), results
            reducing, results = self._plain
            return self._finished(reducing.start(taken), values, results)

    def _finished(self, started: Handle, values: Sequence[Any], results: Results) -> Handle:
        """Return a handle whose results are the reduced tree."""

        def finish() -> Any:
            with cuda.near(self._device):
                return self.kind.packed(results.given(started.wait(), values))

        return Handle(finish, is_over=started.is_ready)

    def _alone(self, values: Sequence[Any]) -> Handle:
        """Return the leaves as they are, but for means of integers, which are floats at any number of ranks."""
        results, leaves = list(values), self.kind.leaves
        for position, leaf in enumerate(leaves):
            leaf.check(values[position])
            dtype = reduction_dtypes(leaf.dtype, self._op)[1]
            if not leaf.in_jax or dtype != leaf.dtype:
                with cuda.near(self._device):
                    array = leaf.taken(values[position])
                    (results[position],) = Results([leaf], [dtype]).given([array], [values[position]])
        return Handle(lambda: self.kind.packed(results), is_over=lambda: True)

    def _start_scaled(self, values: Sequence[Any], share: float) -> Handle:
        """Start the sum of the leaves times this rank's share; a share of 0 counts as zeros, whatever the values."""
        with cuda.near(self._device):
            taken = self.kind.taken(values)
            reducing, results, scratch = self._weighted_all_reduce(taken)
            # first: where one is under way it raises, and its values are those in scratch
            handle = reducing.start(scratch)
            for array, target in zip(taken, scratch, strict=True):
                if share == 0:
                    target[...] = 0
                elif share == 1:
                    target[...] = array
                elif self._device is not None:
                    target[...] = array
                    namespace(target).multiply(target, share, out=target)
                else:
                    numpy.multiply(array, share, out=target, dtype=target.dtype, casting="unsafe")
            return self._finished(handle, values, results)

    def _weighted_all_reduce(self, given: Sequence[Any] = ()) -> tuple[BoundAllReduce, Results, list[Any]]:
        """Return what reduces leaves times shares; `given` are arrays of their kind, which the host's need not be."""
        if self._weighted is None:
            like = given[0] if self._device is not None else numpy.empty(0)
            leaves, op = self.kind.leaves, self._op
            scratch = [cuda.zeros(each.shape, reduction_dtypes(each.dtype, op)[0], like) for each in leaves]
            results = Results(leaves, [each.dtype for each in scratch])
            reducing = self._replicas.bind(scratch, "sum", self.kind.names, self._compression)
            self._weighted = reducing, results, scratch
        return self._weighted


def reduce_tree(tree: Any, op: str | ReduceOp = "mean", weight: float | None = None) -> Any:
    """Return a pytree reduced over all ranks of the job, or over the replicas of the strategy in force.

    Collective: every rank calls it in the same order, with trees of the same paths, shapes and dtypes.  Outside of
    ``jit``: it communicates.  Trees of one structure are bound once, at the first call.

    Parameters
    ----------
    tree : pytree of arrays of JAX or NumPy, and numbers
        Unchanged.  Arrays of JAX lie in host memory, on any number of local CPU devices, or all leaves are arrays of
        JAX on one GPU, where they are reduced.  None is a tree without leaves.
    op : str or ReduceOp
        ``"mean"`` or ``"sum"``.
    weight : number, optional
        For means: how much this rank's tree counts, such as the rows of its part of the batch; 0 for an empty part,
        whose values then do not count, NaNs included.  All ranks give one, or none.

    Returns
    -------
    pytree
        The same structure; the same bits on all ranks.  Arrays of JAX have the dtype, weak type and sharding that they
        had, float64 without x64 included, and memory that nobody writes again.  Sums in 16 bits are rounded once.
        Means of integers are what JAX means them in (float32 without x64), float64 for NumPy, and float for numbers.
        On one rank arrays of JAX are returned as they are.

    Raises
    ------
    TypeError
        A tracer (the call is inside ``jit`` or ``grad``), random keys, or a leaf that is no number.
    ValueError
        An array that was donated; names the leaf.  Or, on all ranks: a weight that is negative or not finite (names
        the rank), or no weight above 0.
    UnsupportedDtypeError
        An array on several GPUs or of another process, or a dtype without a sum; names the leaf.  Leaves on a GPU and
        others in host memory; names two.
    MissingDependencyError
        Arrays on a GPU without CuPy.
    CollectiveMismatchError
        On all ranks: their trees differ; names ranks, leaf, and both shapes.

    Examples
    --------
    >>> loss, gradients = value_and_grad(parameters, rows)
    >>> gradients = mpidist.jax.reduce_tree(gradients, weight=len(rows))
    """
    replicas = replicas_in_force()
    reductions: dict[str, TreeReduction] = replicas.kept.setdefault("trees", {})
    name = op if type(op) is str else ReduceOp.of_gradients(op).verb
    reduction = reductions.get(name)
    if reduction is None:
        reduction = reductions[name] = TreeReduction(op)
    return reduction(tree, weight)
