"""What single objects have for a time in the place of their classes, and what is kept of them as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

_T = TypeVar("_T")


@contextmanager
def put_over(methods: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Let objects have other methods for the time of a ``with`` block.  Local.

    `methods`: the object, the name, and what it has there; of the object itself, since Keras tracks what is set.
    """
    methods = list(methods)
    before = [(vars(obj), name, name in vars(obj), vars(obj).get(name)) for obj, name, _ in methods]
    for obj, name, method in methods:
        vars(obj)[name] = method
    try:
        yield
    finally:
        for attributes, name, was_there, value in before:
            if was_there:
                attributes[name] = value
            else:
                attributes.pop(name, None)


def kept(table: dict[int, _T], owner: Any, make: Callable[[], _T]) -> _T:
    """Return what a table has of an object as long as it lives, made at first; by ids, as some have no hash.  Local."""
    if id(owner) not in table:
        weakref.finalize(owner, table.pop, id(owner))  # first: nothing stays of what takes no reference
        table[id(owner)] = make()
    return table[id(owner)]
