"""Trees as the collectives see them: the leaves of one structure, by name, kind and order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import jax
import numpy

from mpidist.errors import UnsupportedDtypeError
from mpidist.frameworks.jax import cuda
from mpidist.frameworks.jax.handover import Handover
from mpidist.frameworks.jax.leaf import Leaf, LeafKind, kind_of, leaf_of

_B = TypeVar("_B")

#: How many kinds of trees are remembered, the latest ones.
_KEPT_TREES = 16


class TreeKind:
    """The structure of a tree with the kinds of its leaves.

    No reference to the tree is kept; `what` is the function that was called, for messages.  `names` are the leaves'
    paths, such as ``layers/0/w``.
    """

    def __init__(self, tree: Any, what: str) -> None:
        self._what = what
        pairs, self.structure = jax.tree_util.tree_flatten_with_path(tree)
        self.names = [jax.tree_util.keystr(path, simple=True, separator="/") or "(the tree)" for path, _ in pairs]
        self.kinds: list[LeafKind] = [kind_of(leaf) for _, leaf in pairs]
        self.leaves: list[Leaf] = [leaf_of(kind, name, what) for kind, name in zip(self.kinds, self.names, strict=True)]

    def taken(self, values: Sequence[Any]) -> list[Any]:
        """Return the leaves of a tree as arrays where they are reduced.  Local."""
        return [leaf.taken(value) for leaf, value in zip(self.leaves, values, strict=True)]

    def check_dtypes(self, check: Callable[[Any], None]) -> None:
        """Raise UnsupportedDtypeError for a leaf of a dtype for which ``check(dtype)`` raises it.  Local."""
        for leaf, name in zip(self.leaves, self.names, strict=True):
            try:
                check(leaf.dtype)
            except UnsupportedDtypeError as error:
                raise UnsupportedDtypeError(f"{self._what}: leaf {name!r}: {error}") from None

    def device(self) -> Any:
        """Return where all leaves are reduced together, a sharding of one CUDA device; None for the host.  Local.

        UnsupportedDtypeError names two leaves that lie apart.
        """
        for leaf, name in zip(self.leaves, self.names, strict=True):
            if leaf.device != self.leaves[0].device:
                raise UnsupportedDtypeError(
                    f"{self._what}: leaf {self.names[0]!r} lies {_told(self.leaves[0].device)}, and leaf {name!r} "
                    f"{_told(leaf.device)}: give trees whose leaves lie on one device, as by jax.device_put(tree, "
                    "device), or reduce them one after the other"
                )
        return self.leaves[0].device if self.leaves else None

    def packed(self, values: Sequence[Any]) -> Any:
        """Return a tree with these leaves.  Local."""
        return jax.tree_util.tree_unflatten(self.structure, values)


def _told(device: Any) -> str:
    return "in host memory" if device is None else f"on {', '.join(map(str, device.device_set))}"


class Results:
    """Results of a collective on their way to leaves of a tree; memory that JAX has is never written again.

    The results are computed in `dtypes`.
    """

    def __init__(self, leaves: Sequence[Leaf], dtypes: Sequence[Any]) -> None:
        self._leaves = leaves
        self._dtypes = [leaf.result_dtype(dtype) for leaf, dtype in zip(leaves, dtypes, strict=True)]
        self._in_jax = [position for position, leaf in enumerate(leaves) if leaf.in_jax]
        members = [leaves[each] for each in self._in_jax]
        self._on_device = any(leaf.device is not None for leaf in leaves)  # then all are
        members = [] if self._on_device else members
        self._handover = Handover(members, [] if self._on_device else [self._dtypes[each] for each in self._in_jax])

    def given(self, results: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Return the leaves of the result.  Local.  `results` are copied; `values` are the leaves that were given."""
        if self._on_device:
            made = cuda.given(results, self._dtypes, [leaf.placement for leaf in self._leaves])
            return [leaf.given(each, value) for leaf, each, value in zip(self._leaves, made, values, strict=True)]
        arrays = self._handover.of([results[position] for position in self._in_jax])
        by_position = dict(zip(self._in_jax, arrays, strict=True))
        for position, dtype in enumerate(self._dtypes):
            if position not in by_position:
                by_position[position] = numpy.array(results[position], dtype)
        return [leaf.given(by_position[each], values[each]) for each, leaf in enumerate(self._leaves)]


class KeptTrees(Generic[_B]):
    """What is bound to kinds of trees, the latest ones.

    ``bind(tree)`` returns what is bound to trees like this one.
    """

    def __init__(self, bind: Callable[[Any], _B]) -> None:
        self._bind = bind
        self._found: dict[Any, _B] = {}

    def of(self, tree: Any) -> tuple[list[Any], _B]:
        """Return the leaves of a tree, and what is bound to trees like it.  Local, unless binding is collective."""
        values, structure = jax.tree_util.tree_flatten(tree)
        key = (structure, *map(kind_of, values))
        bound = self._found.get(key)
        if bound is None:
            bound = self._bind(tree)
            if len(self._found) >= _KEPT_TREES:
                del self._found[next(iter(self._found))]
            self._found[key] = bound
        return values, bound

    def __iter__(self) -> Any:
        return iter(self._found.values())
