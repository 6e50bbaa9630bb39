"""The step of a model that is under way in this thread, and whether an optimizer in it has the reduced gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


class _CurrentStep(threading.local):
    replica: Any = None
    is_in_optimizer = False


_here = _CurrentStep()


def step_of(replica: Any) -> AbstractContextManager[None]:
    """Let a replica be the one that takes a step, for the time of a ``with`` block."""
    return _with("replica", replica)


def stepping() -> Any:
    """Return the replica that takes a step in this thread, or None.  Local."""
    return _here.replica


def in_optimizer() -> AbstractContextManager[None]:
    """Let all optimizers that are called meanwhile be parts of the one that calls them: it has done what there is."""
    return _with("is_in_optimizer", True)


def is_in_optimizer() -> bool:
    """Return whether an optimizer that is called now is called by another one.  Local."""
    return _here.is_in_optimizer


@contextmanager
def _with(name: str, value: Any) -> Iterator[None]:
    """Let an attribute of this thread's step have a value, and then the one from before."""
    before = getattr(_here, name)
    setattr(_here, name, value)
    try:
        yield
    finally:
        setattr(_here, name, before)
