"""Files that MPI and its launcher leave behind when a job is aborted, and that nobody else would remove.

MPICH leaves megabytes of shared memory for every job that did not reach MPI_Finalize, Open MPI when its launcher is
killed.  A file is removed only if it is certain whose it was: a process of this job was seen to have it mapped or open,
it has the name that MPI gives, it is still the same file, it belongs to this user, and no living process has it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mpidist.cluster.join_notes import JOINED
from mpidist.commands.launch.rank_processes import processes_of

_NAMES = re.compile(r"/dev/shm/(?:mpich_shm_\w+|sm_segment\.[^/\s]+|ucx_shm_posix_\w+)|/[^\s]+/hydra_hwloc_xmlfile_\w+")

#: Looks are this far apart at first; later ones 5 % of the job's time so far.
_LOOK_SECONDS, _LOOK_PART = 0.25, 0.05


class Use(NamedTuple):
    """A file that a process has mapped or open."""

    path: str
    inode: int


class Leftovers:
    """What the job that carries `token` has in use, as seen now and then, to be removed when it is over."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._seen: dict[str, tuple[int, int]] = {}
        self._began: float | None = None
        self._next = 0.0

    def look_at(self, now: float) -> None:
        """Look if it is time to, `now` being seconds of a clock; the longer the job runs, the more seldom."""
        self._began = now if self._began is None else self._began
        if now >= self._next:
            self._next = now + max(_LOOK_SECONDS, _LOOK_PART * (now - self._began))
            self.look()

    def look(self) -> None:
        """Note what the job's processes have in use; Local."""
        for process in processes_of(self._token):
            self._note(_in_use(process))

    def take_notes(self, folder: str) -> None:
        """Note what ranks have written down themselves when they joined."""
        for note in Path(folder).glob(f"*{JOINED}"):
            self._note(_mapped(note.read_text().splitlines()))

    def _note(self, uses: Iterable[Use]) -> None:
        for use in uses:
            identity = _identity(use.path) if _NAMES.fullmatch(use.path) else None
            # a file of another inode has only got the name of the one that was used
            if identity is not None and identity[1] == use.inode:
                self._seen.setdefault(use.path, identity)

    def remove(self) -> list[str]:
        """Remove what is left and in use by nobody, once the job's processes have ended; return the paths."""
        left = {path for path, identity in self._seen.items() if _identity(path) == identity}
        if left:
            left -= {use.path for name in os.listdir("/proc") if name.isdigit() for use in _in_use(int(name))}
        return [path for path in sorted(left) if _removed(path)]


def _identity(path: str) -> tuple[int, int] | None:
    """Return device and inode of this user's file, None if there is none."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_uid == os.geteuid() else None


def _in_use(process: int) -> Iterator[Use]:
    """Yield the files that a process has mapped or open; nothing of another user's process."""
    try:
        with open(f"/proc/{process}/maps", errors="replace") as file:
            yield from _mapped(file)
        descriptors = os.listdir(f"/proc/{process}/fd")
    except OSError:  # it has ended, or may not be looked at
        return
    for descriptor in descriptors:
        try:
            link = f"/proc/{process}/fd/{descriptor}"
            yield Use(os.readlink(link), os.stat(link).st_ino)
        except OSError:  # closed meanwhile
            continue


def _mapped(lines: Iterable[str]) -> Iterator[Use]:
    """Yield the files in lines of a memory map; the paths of deleted ones end so, and fit no name."""
    for line in lines:
        fields = line.rstrip("\n").split(None, 5)
        if len(fields) == 6 and fields[5].startswith("/"):
            yield Use(fields[5], int(fields[4]))


def _removed(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:  # gone meanwhile, or not to be had: it stays, as it would have without us
        return False
    return True
