"""The watchdog of a job: ends what is left of it when ``mpidist run`` itself is killed.

A process of its own, which waits until its standard input ends, and ends the job unless it has been told that the job
is over.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import mpidist
from mpidist.commands.launch.leftovers import Leftovers
from mpidist.commands.launch.mpi_files import remove_segments
from mpidist.commands.launch.rank_processes import end_processes
from mpidist.options import RUN_TOKEN

#: What a job that has ended by itself writes to its watchdog.
OVER = b"over"

#: What the process runs.  Signals that go to all processes of the job are for its ranks.  Nearly always that is all,
#: so the package is imported only where there is something to end.
_CODE = """\
import signal, sys
for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(signum, signal.SIG_IGN)
if sys.stdin.buffer.read() != {over!r}:
    sys.path[:] = {path!r}
    from {module} import end_job
    end_job(*sys.argv[1:])
"""


def start_watchdog(token: str, folder: str) -> subprocess.Popen[bytes]:
    """Start the watchdog of the job that carries `token`, whose notes are in `folder`; Local."""
    # this process's search path: by `-m`, modules of the user's folder would come before those of Python; the last is
    # for a package that is found by a hook of the environment, which -S leaves out
    path = [*sys.path, str(Path(mpidist.__file__).parents[1])]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _CODE.format(over=OVER, path=path, module=__name__), token, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # a job may be started by a rank of another: it is not to end with that one, but to end what that one leaves
        env={name: value for name, value in os.environ.items() if name != RUN_TOKEN},
        start_new_session=True,
    )


def end_job(token: str, folder: str) -> None:
    """End the job, and remove what it leaves, and its folder."""
    leftovers = Leftovers(token)
    leftovers.take_notes(folder)
    leftovers.look()
    end_processes(token)
    leftovers.remove()
    remove_segments(folder)
    shutil.rmtree(folder, ignore_errors=True)
