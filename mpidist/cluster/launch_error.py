"""An error of the launch: all tasks raise it, and one of them prints it, without the frames that led to it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from mpidist import own_process
from mpidist.cluster.launchers import detect_launcher
from mpidist.errors import LaunchError
from mpidist.output import say

#: So long the other tasks leave it to the first one, whose launcher may end them when it has spoken.
_PATIENCE_SECONDS = 2.0

#: The hook of exceptions before `_tell`, where that has been put in place.
_before: list[Any] = []


@contextmanager
def told_once() -> Iterator[None]:
    """Have a LaunchError of the body, unless the program catches it, printed by one task, in few lines.  Local."""
    try:
        yield
    except LaunchError as error:
        error.on_all_ranks = True
        if not _before:
            _before.append(own_process.on_exception(_tell))
        raise


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an error that all tasks raise, or leave it to another task; print other errors as usual.

    Where the first task's launcher does not end the others, the first task of each other node speaks too: it may be
    that the launch went wrong on that node alone.
    """
    launcher = detect_launcher() if isinstance(error, LaunchError) and error.on_all_ranks else None
    if launcher is None:
        _before[0](kind, error, trace)
        return
    if launcher.rank != 0:
        time.sleep(_PATIENCE_SECONDS)
    if launcher.rank == 0 or not launcher.local_rank:
        say(f"mpidist: {kind.__name__}: {error}")
