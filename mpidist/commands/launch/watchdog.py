"""The watchdog of a job: ends what is left of it when ``mpidist run`` itself is killed.

A process of its own, which waits until its standard input ends, and ends the job unless it has been told that the job
is over.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys

from mpidist.commands.launch.leftovers import Leftovers
from mpidist.commands.launch.mpi_files import remove_segments
from mpidist.commands.launch.rank_processes import TOKEN, end_processes

#: What a job that has ended by itself writes to its watchdog.
OVER = b"over"


def start_watchdog(token: str, folder: str) -> subprocess.Popen[bytes]:
    """Start the watchdog of the job that carries `token`, whose notes are in `folder`; Local."""
    # with this process's search path: by `-m`, modules of the user's folder would come before those of Python
    code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import watch; watch(*sys.argv[1:])"
    return subprocess.Popen(
        [sys.executable, "-c", code, token, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # a job may be started by a rank of another: it is not to end with that one, but to end what that one leaves
        env={name: value for name, value in os.environ.items() if name != TOKEN},
        start_new_session=True,
    )


def watch(token: str, folder: str) -> None:
    """Wait until standard input ends; unless it said `OVER`, end the job and remove what it leaves, and its folder."""
    # such signals are for the job, also where all its processes get them; its watchdog stays until the job has ended
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    if sys.stdin.buffer.read() != OVER:
        leftovers = Leftovers(token)
        leftovers.take_notes(folder)
        leftovers.look()
        end_processes(token)
        leftovers.remove()
        remove_segments(folder)
        shutil.rmtree(folder, ignore_errors=True)
