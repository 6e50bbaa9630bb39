"""Methods, and other attributes, that single objects have for a time, in the place of those of their classes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any


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
