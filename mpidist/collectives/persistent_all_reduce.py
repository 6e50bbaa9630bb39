"""`PersistentAllReduce`: an all-reduce of nested values that is bound once and called, or started, every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy

from mpidist import nest
from mpidist.collectives.handle import Handle
from mpidist.collectives.persistent import UnlikeArraysError
from mpidist.collectives.structures import Paths


class BoundAllReduce(Protocol):
    """An all-reduce that is bound to lists of arrays."""

    def __call__(self, arrays: Any) -> Any:
        """Return the results; None, or ValueError, for other arrays, where nothing is done.  Collective."""

    def start(self, arrays: Any) -> Any:
        """Return a handle, whose ``wait()`` returns the results.  Collective."""


class PersistentAllReduce:
    """An all-reduce for values of one structure; `mpidist.all_reduce_init` and that of replica and strategy make it.

    Parameters
    ----------
    bind : callable
        ``bind(arrays, paths)`` returns the bound all-reduce of lists like this one.
    like : array, or nested tuples, lists and dicts of arrays
        Its shapes and dtypes count; no reference to it is kept.
    array_of : callable
        ``array_of(leaf)`` returns the array that a leaf is.
    none_as_zeros : bool
        Whether an array may be None in a call.
    """

    def __init__(
        self,
        bind: Callable[[list[Any], Paths], BoundAllReduce],
        like: Any,
        array_of: Callable[[Any], Any],
        none_as_zeros: bool = False,
    ) -> None:
        leaves, paths = nest.with_paths(like)
        self._array_of = array_of
        examples = [array_of(leaf) for leaf in leaves]
        self._signatures = [(each.dtype, each.shape) for each in examples]
        self._structure = nest.numbered(like)
        self._is_list = type(like) is list and self._structure == list(range(len(leaves)))
        self._none_as_zeros = none_as_zeros
        self._bound = bind(examples, paths)

    def __call__(self, value: Any) -> Any:
        """Reduce a value like the one that this was made for.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        value : array or nested structure
            Unchanged.  Where it was bound with `none_as_zeros`, any array may be None.

        Returns
        -------
        array or nested structure
            As `value`, with new arrays that are the caller's; the same on every rank.  None where all have None.

        Raises
        ------
        ValueError
            The structure, a shape or a dtype is another one; before any communication.
        CollectiveMismatchError
            On all ranks: they called something else.
        """
        arrays = self._arrays(value)
        if self._none_as_zeros and not self._are_like(arrays):
            raise self._refused(arrays)
        try:
            return self._packed(self._bound(arrays))
        except UnlikeArraysError:
            raise self._refused(arrays) from None

    def start(self, value: Any) -> Handle:
        """Start the reduction; parameters and errors as for a call.

        Collective: every rank starts, or calls, its collectives in the same order.  The arrays must not change
        before the handle's ``wait()`` has returned the results.  Values move when a rank waits, or makes a later
        call.

        Raises
        ------
        RuntimeError
            This all-reduce is under way already.
        """
        arrays = self._arrays(value)
        if not self._are_like(arrays):
            raise self._refused(arrays)
        return self._bound.start([*arrays]).then(self._packed)  # the caller may put others into its list

    def _arrays(self, value: Any) -> list[Any]:
        """Return the arrays of a value; ValueError unless its structure is as it was when this was bound."""
        if self._is_list and type(value) is list and len(value) == len(self._signatures):
            leaves = value
        else:
            leaves = nest.flatten(value)
            numbered = nest.numbered(value)
            if numbered != self._structure:
                raise ValueError(
                    f"this all-reduce was bound to {len(self._signatures)} arrays as {self._structure}, got {numbered} "
                    "(numbers stand for arrays); bind another one with all_reduce_init"
                )
        if {*map(type, leaves)} <= {numpy.ndarray}:
            return leaves
        may_lack = self._none_as_zeros
        return [None if leaf is None and may_lack else self._array_of(leaf) for leaf in leaves]

    def _are_like(self, arrays: Sequence[Any]) -> bool:
        pairs = zip(arrays, self._signatures, strict=True)
        return all(each is None or (each.dtype, each.shape) == signature for each, signature in pairs)

    def _refused(self, arrays: Sequence[Any]) -> ValueError:
        """Return the error for arrays of other shapes, dtypes or kinds."""
        for number, (array, (dtype, shape)) in enumerate(zip(arrays, self._signatures, strict=True)):
            if array is not None and (array.dtype != dtype or array.shape != shape):
                return ValueError(
                    f"this all-reduce was bound to {dtype}{list(shape)} as array {number}, "
                    f"got {array.dtype}{list(array.shape)}; bind another one with all_reduce_init"
                )
        kinds = ", ".join(sorted({type(array).__name__ for array in arrays}))
        return ValueError(f"this all-reduce was bound to arrays of another kind, got {kinds}")

    def _packed(self, results: Sequence[Any]) -> Any:
        return results if self._is_list else nest.pack(self._structure, list(results))


class OwnWay:
    """Reduces where nothing is bound, as a strategy does that has a way of its own: at the start already."""

    def __init__(self, reduce: Callable[[list[Any]], list[Any]]) -> None:
        self._reduce = reduce

    def __call__(self, arrays: list[Any]) -> list[Any]:
        return self._reduce(arrays)

    def start(self, arrays: list[Any]) -> Handle:
        """Reduce, and return a handle that has the results."""
        results = self._reduce(arrays)
        return Handle.done(results)
