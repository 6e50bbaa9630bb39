"""The step of a model that is under way in this thread, and whether an optimizer in it has the reduced gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _CurrentStep(threading.local):
    replica: Any = None
    is_in_optimizer = False


_here = _CurrentStep()


@contextmanager
def step_of(replica: Any) -> Iterator[None]:
    """Let a replica be the one that takes a step, for the time of a ``with`` block."""
    before, _here.replica = _here.replica, replica
    try:
        yield
    finally:
        _here.replica = before


def stepping() -> Any:
    """Return the replica that takes a step in this thread, or None.  Local."""
    return _here.replica


@contextmanager
def in_optimizer() -> Iterator[None]:
    """Let all optimizers that are called meanwhile be parts of the one that calls them: it has done what there is."""
    before, _here.is_in_optimizer = _here.is_in_optimizer, True
    try:
        yield
    finally:
        _here.is_in_optimizer = before


def is_in_optimizer() -> bool:
    """Return whether an optimizer that is called now is called by another one.  Local."""
    return _here.is_in_optimizer
