"""Nested structures: tuples, named tuples, lists and dicts of any leaves.

Dicts are walked in the sorted order of their keys, so that ranks which built equal dicts in different orders still
call collectives alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def flatten(structure: Any) -> list[Any]:
    """Return the leaves of `structure` in a fixed order; a bare leaf gives one.  Local."""
    leaves: list[Any] = []
    _collect((structure,), leaves)
    return leaves


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


def _collect(parts: Iterable[Any], leaves: list[Any]) -> None:
    """Add the leaves of all `parts`; a call for every container, none for a leaf."""
    for part in parts:
        if isinstance(part, dict):
            _collect([part[key] for key in sorted(part)], leaves)
        elif isinstance(part, (list, tuple)):
            _collect(part, leaves)
        else:
            leaves.append(part)


def _filled(structure: Any, take: Callable[[], Any]) -> Any:
    if isinstance(structure, dict):
        filled = {key: _filled(structure[key], take) for key in sorted(structure)}
        return {key: filled[key] for key in structure}
    if isinstance(structure, (list, tuple)):
        parts = [_filled(part, take) if isinstance(part, (dict, list, tuple)) else take() for part in structure]
        return type(structure)(*parts) if hasattr(structure, "_fields") else type(structure)(parts)
    return take()
