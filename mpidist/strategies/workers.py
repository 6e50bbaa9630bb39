"""`Workers`: who of those that train apart saves and restores.  Where nobody trains apart, all ranks are one worker."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


class Workers:
    """The workers of a job, as the ranks of one of them see these; by itself, the only one, which has all ranks."""

    #: Whether each worker trains by itself, on variables that servers hold.
    train_apart = False
    #: Whether the job has other workers, which train now.
    has_other_workers = False
    #: Whether this worker saves checkpoints, and restores what all workers share.
    writes_checkpoints = True

    def by_first_worker(self, fn: Callable[[], str | None], timeout_seconds: float | None = None) -> str | None:
        """Call a function in the first worker, and return its text, or raise its error, in all.  Collective.

        `timeout_seconds`: how long workers wait for each other; 0 is for ever.
        """
        return fn()

    def undivided(self, act: Callable[[], T]) -> T:
        """Return what `act` returns, begun again where a server was lost meanwhile.  Local, as far as `act` is."""
        return act()

    def pull(self) -> None:
        """Have the next reading give the shared values of then.  Local; collective among the ranks of a worker."""

    def note_saved(self, path: Path) -> None:
        """Take note of a new checkpoint.  Local."""


class _OfThread(threading.local):
    workers = Workers()


_of_thread = _OfThread()


def install(workers: Workers) -> None:
    """Make these the workers of this process, and of this thread where ranks are threads.  Local."""
    _of_thread.workers = workers


def of_job() -> Workers:
    """Return the workers of this process, or this thread where ranks are threads.  Local."""
    return _of_thread.workers
