"""Nested structures: tuples, named tuples, lists and dicts of any leaves.

Dicts are walked in the sorted order of their keys, so that ranks which built equal dicts in different orders still
call collectives alike.  Ranks whose dicts have other keys are told apart by the *paths* of their leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy

#: The paths of so many structures are kept.
_KEPT_PATHS = 256


def flatten(structure: Any) -> list[Any]:
    """Return the leaves of `structure` in a fixed order; a bare leaf gives one.  Local."""
    leaves: list[Any] = []
    _collect((structure,), leaves, [])
    return leaves


def with_paths(structure: Any) -> tuple[list[Any], tuple[str, ...] | None]:
    """Return the leaves as `flatten` does, and the path of each, such as ``['a'][0]``.  Local.

    No paths, None, of a bare leaf, and of a list or tuple of leaves: they are told apart by how many there are.
    Structures with the same keys get the same tuple, so that a loop makes no paths after its first step.
    """
    leaves: list[Any] = []
    outline: list[Any] = []
    _collect((structure,), leaves, outline)
    if not outline or (len(outline) == 1 and type(structure) in (list, tuple)):
        return leaves, None
    key = tuple(outline)
    paths = _paths.get(key)
    if paths is None:
        if len(_paths) >= _KEPT_PATHS:
            _paths.clear()
        paths = _paths[key] = tuple(_paths_of(structure))
    return leaves, paths


def pack(structure: Any, leaves: Iterable[Any]) -> Any:
    """Return `structure` with `leaves`, in the order of `flatten`, in place of its own.  Local."""
    remaining = iter(leaves)
    try:
        packed = _filled(structure, remaining.__next__)
    except StopIteration:
        raise ValueError(f"fewer leaves than the {len(flatten(structure))} places of the structure") from None
    if next(remaining, _NOTHING) is not _NOTHING:
        raise ValueError(f"more leaves than the {len(flatten(structure))} places of the structure")
    return packed


def numbered(structure: Any) -> Any:
    """Return `structure` with the number of each leaf in its place: what tells structures apart.  Local."""
    return pack(structure, range(len(flatten(structure))))


_NOTHING = object()

#: The paths of the structures that were walked last, by their outlines.
_paths: dict[tuple[Any, ...], tuple[str, ...]] = {}


def _collect(parts: Iterable[Any], leaves: list[Any], outline: list[Any]) -> None:
    """Add the leaves of all `parts`; a call for every container, none for a leaf.

    The outline gets, for each container, how many leaves lie before it, and its keys, fields or length.
    """
    for part in parts:
        if isinstance(part, dict):
            keys = _keys(part)
            outline.append((len(leaves), dict, *keys))
            _collect([part[key] for key in keys], leaves, outline)
        elif isinstance(part, (list, tuple)):
            outline.append((len(leaves), getattr(part, "_fields", len(part))))
            _collect(part, leaves, outline)
        else:
            leaves.append(part)


def _keys(part: dict[Any, Any]) -> list[Any]:
    """Return the keys of a dict in sorted order."""
    try:
        return sorted(part)
    except TypeError as error:
        shown = ", ".join(map(repr, part))
        raise TypeError(
            f"the keys of a dict are taken in sorted order, and these cannot be sorted: {shown} ({error}); use keys of "
            "one type, such as text"
        ) from None


def _paths_of(part: Any, path: str = "") -> Iterator[str]:
    """Yield the path of each leaf."""
    if isinstance(part, dict):
        for key in _keys(part):
            shown = key.item() if isinstance(key, numpy.generic) else key  # which are equal
            yield from _paths_of(part[key], f"{path}[{shown!r}]")
    elif isinstance(part, (list, tuple)):
        fields = getattr(part, "_fields", None)
        for at, each in enumerate(part):
            yield from _paths_of(each, f"{path}[{at}]" if fields is None else f"{path}.{fields[at]}")
    else:
        yield path


def _filled(structure: Any, take: Callable[[], Any]) -> Any:
    if isinstance(structure, dict):
        filled = {key: _filled(structure[key], take) for key in _keys(structure)}
        return {key: filled[key] for key in structure}
    if isinstance(structure, (list, tuple)):
        parts = [_filled(part, take) if isinstance(part, (dict, list, tuple)) else take() for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    return take()
