"""Nested structures of arrays: tuples and dicts, as elements of a data set are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def leaves(structure: Any) -> Iterator[Any]:
    """Yield what the tuples and dicts of `structure` hold, in order.  Local."""
    if isinstance(structure, dict):
        for value in structure.values():
            yield from leaves(value)
    elif isinstance(structure, tuple):
        for value in structure:
            yield from leaves(value)
    else:
        yield structure


def map_leaves(function: Callable[[Any], Any], structure: Any) -> Any:
    """Return `structure` with ``function(leaf)`` in place of every leaf; named tuples keep their type.  Local."""
    if isinstance(structure, dict):
        return {key: map_leaves(function, value) for key, value in structure.items()}
    if isinstance(structure, tuple):
        mapped = [map_leaves(function, value) for value in structure]
        return type(structure)(*mapped) if hasattr(structure, "_fields") else tuple(mapped)
    return function(structure)
