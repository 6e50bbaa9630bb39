"""The standard input of `mpidist run` for rank 0, as mpirun does it: through a named pipe in the run's folder.

A thread passes it on, which waits for rank 0 to take it.  Rank 0 finds its end where it is at its end here, or where
there is none.  A rank 0 on another machine cannot reach the folder: there the launcher has the pipe, and passes it on.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from contextlib import suppress

#: The descriptor of standard input.
STDIN = 0

_READ_BYTES = 1 << 16

#: How often it is looked whether a terminal's input is for this process.
_LOOK_SECONDS = 0.1


class InputStream:
    """The way of standard input to rank 0.  The pipe is made at `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._is_there = sys.stdin is not None  # else the descriptor is another file's
        os.mkfifo(self._path, 0o600)
        # A daemon: it may be waiting for input, or for rank 0, when the job is over.
        threading.Thread(target=self._pass_on, name="mpidist-input", daemon=True).start()

    def _pass_on(self) -> None:
        with suppress(OSError):  # the folder is gone, rank 0 has ended, or there is no more input
            pipe = os.open(self._path, os.O_WRONLY)
            try:
                while self._is_there and (data := _read()):
                    while data:
                        data = data[os.write(pipe, data) :]
            finally:
                os.close(pipe)


def _read() -> bytes:
    """Return what comes next; nothing at the end."""
    while os.isatty(STDIN) and not (_may_read() and select.select([STDIN], [], [], _LOOK_SECONDS)[0]):
        threading.Event().wait(_LOOK_SECONDS)
    return os.read(STDIN, _READ_BYTES)


def _may_read() -> bool:
    """Return whether the terminal lets this process read: it stops a job in the background that tries to."""
    try:
        return os.tcgetpgrp(STDIN) == os.getpgrp()
    except OSError:  # it is not the terminal of this session, and stops nobody in it
        return True
