"""The step of a model that is under way in this thread, and whether an optimizer in it has the reduced gradients."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any

from mpidist.frameworks.keras.own_methods import put_over


class _CurrentStep(threading.local):
    """`replica`: that takes a step.  `is_in_optimizer`: whether an optimizer that is called is called by another."""

    replica: Any = None
    is_in_optimizer = False


current_step = _CurrentStep()


def step_of(replica: Any) -> AbstractContextManager[None]:
    """Let a replica be the one that takes a step in this thread, for the time of a ``with`` block."""
    return put_over([(current_step, "replica", replica)])


def in_optimizer() -> AbstractContextManager[None]:
    """Let all optimizers that are called meanwhile be parts of the one that calls them: it has done what there is."""
    return put_over([(current_step, "is_in_optimizer", True)])
