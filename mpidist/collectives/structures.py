"""Collectives of nested values: how the leaves become arrays, and results the leaves of a value like it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from mpidist import arrays, nest

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: The paths of the leaves in their structure, which ranks compare; None where there is nothing but their number.
Paths = tuple[str, ...] | None


def of_leaves(
    value: Any, array_of: Callable[[Any], Any], collective: Callable[[list[Any], Paths], Sequence[Any]]
) -> Any:
    """Return a value like the one given, with what a collective makes of its arrays.

    Collective as `collective` is.

    Parameters
    ----------
    value : array or number, or nested tuples, lists and dicts of them
    array_of : callable
        ``array_of(leaf)``; it raises for what is no array.  All leaves are converted before anything is sent.
    collective : callable
        ``collective(arrays, paths)`` returns as many results.
    """
    leaves, paths = nest.with_paths(value)
    results = collective([array_of(leaf) for leaf in leaves], paths)
    return nest.pack(value, [like_given(*pair) for pair in zip(results, leaves, strict=True)])


def leaf_by_leaf(
    ranks: Communicator, verb: str, timeout_seconds: float | None, fn: Callable[[Any, tuple[str, ...]], Any]
) -> Callable[[list[Any], Paths], list[Any]]:
    """Return the collective that calls ``fn(array, paths)`` for each leaf, for `of_leaves`.  Local."""

    def collective(given: list[Any], paths: Paths) -> list[Any]:
        if not given:
            return ranks.call_without_arrays(without_arrays(verb), timeout_seconds)
        return [fn(*leaf) for leaf in one_by_one(given, paths)]

    return collective


def without_arrays(verb: str) -> str:
    """Return what the call of a structure without arrays is called."""
    return f"{verb} of no array"


def one_by_one(leaves: Sequence[Any], paths: Paths) -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Return the leaves for calls of their own: the first with the paths of all, which it compares, others without."""
    return zip(leaves, chain([_places(len(leaves)) if paths is None else paths], repeat(())), strict=False)


@cache
def _places(count: int) -> tuple[str, ...]:
    """Return the paths of the leaves of a list; none of a single one, which may come by itself."""
    return tuple(f"[{at}]" for at in range(count)) if count > 1 else ()


def like_given(result: Any, given: Any) -> Any:
    """Return a NumPy scalar rather than an array of no dimensions, unless such an array was given.  Local."""
    is_scalar = getattr(result, "ndim", None) == 0 and not arrays.is_known(given)
    return result[()] if is_scalar else result
