"""The watchdog of a job: ends what is left of it when ``mpidist run`` itself is killed.

``python -m mpidist.commands.watchdog TOKEN FOLDER`` waits until its standard input ends, and ends the job unless it has
been told that the job is over.
"""

from __future__ import annotations

import shutil
import signal
import sys

from mpidist.commands.leftovers import Leftovers
from mpidist.commands.rank_processes import end_processes

#: What a job that has ended by itself writes to its watchdog.
OVER = b"over"


def watch(token: str, folder: str) -> None:
    """Wait until standard input ends; unless it said `OVER`, end the job and remove what it leaves, and its folder."""
    # a Ctrl-C at the terminal is for the job; its watchdog stays until the job has ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stdin.buffer.read() != OVER:
        leftovers = Leftovers(token)
        leftovers.take_notes(folder)
        leftovers.look()
        end_processes(token)
        leftovers.remove()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(*sys.argv[1:])
