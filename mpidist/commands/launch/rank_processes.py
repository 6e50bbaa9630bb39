"""The processes of a job on this machine, found by a token in their environment.

Launchers put ranks into process groups or sessions of their own, so that ending the launcher's group is not enough;
what every rank and every child of it keeps is the environment it was started with.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

from mpidist.options import RUN_TOKEN
from mpidist.runtime.board import exists, stat_of

#: So long a killed process may take to end: the system may have to write out its memory.
_KILL_SECONDS = 5.0

#: Variables that only ranks have, not the launcher.
_RANK_VARIABLES = (b"OMPI_COMM_WORLD_RANK=", b"PMIX_RANK=", b"PMI_RANK=")


def processes_of(token: str) -> dict[int, bytes]:
    """Return process id -> environment of every living process that carries `token`; Local."""
    mark = f"{RUN_TOKEN}={token}".encode()
    return {pid: environ for pid, environ in _environments() if mark in environ.split(b"\0")}


def ranks_of(token: str) -> list[int]:
    """Return the process ids of the ranks that carry `token`, without the processes they have started; Local."""
    ranks = {pid for pid, environ in processes_of(token).items() if any(name in environ for name in _RANK_VARIABLES)}
    return sorted(pid for pid in ranks if _parent(pid) not in ranks)


def end_processes(token: str) -> list[int]:
    """Kill every process that carries `token` and return those that are still there after `_KILL_SECONDS`; Local."""
    deadline = time.monotonic() + _KILL_SECONDS
    none_seen = 0
    # look twice: a process that is just being started shows no environment for a moment
    while none_seen < 2 and time.monotonic() < deadline:
        left = processes_of(token)
        for pid in left:
            send(pid, signal.SIGKILL)
        none_seen = 0 if left else none_seen + 1
        time.sleep(0.005)
    return sorted(processes_of(token))


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may have ended already."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


def alive(process: int) -> bool:
    """Return whether a process runs: one whose parent has not asked for its status yet does not; Local."""
    try:
        return stat_of(process)[0] not in (b"Z", b"X")
    except (ProcessLookupError, FileNotFoundError):
        return not os.path.isdir("/proc/self") and exists(process)


def _environments() -> Iterator[tuple[int, bytes]]:
    if not os.path.isdir("/proc"):  # not Linux: there is no way to find them
        return
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                with open(f"/proc/{name}/environ", "rb") as file:
                    yield int(name), file.read()
            except OSError:  # it has ended, or is another user's
                continue


def _parent(pid: int) -> int:
    try:
        return int(stat_of(pid)[1])
    except OSError:
        return 0
