"""Memory shared by the ranks of one node, without a name that could be left behind.

The owner makes an anonymous file in memory (or, where the system has none, a file in /dev/shm that is unlinked at once
when all have opened it) and the others open it through the owner's process.  The pages are reserved when the file is
made, so that a node that is short of memory says so here, not by a bus error in the middle of a step.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from mpidist.runtime.memory_room import room_bytes

#: A cache line, in words and bytes: words of different writers never share one.
LINE_WORDS, LINE_BYTES, WORD_BYTES = 8, 64, 8

_SHM = Path("/dev/shm")


class SharedFile:
    """A file in memory, made by one process and mapped by several.

    `reserved` bytes, by default all, are reserved from the beginning; the rest costs nothing until it is reserved,
    which must be before it is written.  Other processes of this node open `path` while the owner lives and has not
    called `unlink`.  OSError when the memory cannot be had.
    """

    def __init__(self, nbytes: int, reserved: int | None = None) -> None:
        self._name: str | None = None
        self._reserved = 0
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("mpidist", os.MFD_CLOEXEC)
            self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        else:
            self._fd, self.path = tempfile.mkstemp(prefix="mpidist-", dir=_SHM if _SHM.is_dir() else None)
            self._name = self.path
        try:
            self.reserve(0, nbytes if reserved is None else reserved)
            os.ftruncate(self._fd, nbytes)
        except OSError:
            self.unlink()
            raise

    def reserve(self, start: int, nbytes: int) -> None:
        """Have the memory of some of the file's bytes from now on.  OSError when the memory cannot be had."""
        check_room(nbytes, self._reserved)
        _reserve(self._fd, start, nbytes)
        self._reserved += nbytes

    def map(self) -> mmap.mmap:
        """Return the owner's own mapping of the file."""
        return mmap.mmap(self._fd, 0)

    def unlink(self) -> None:
        """Take the file's way in away: mappings live on, nobody can open it any more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._name is not None:
            with suppress(FileNotFoundError):  # somebody cleaned /dev/shm: what we want is done
                os.unlink(self._name)
            self._name = None


def map_file(path: str, start: int = 0, reserved: int = 0) -> mmap.mmap:
    """Map the file another process of this node has made; reserve so many bytes of it from `start` on.

    OSError when it cannot be opened: the owner is in another container, or belongs to another user.  FileNotFoundError
    also for an empty file: its owner has closed it, and makes another file with the same number.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if not os.fstat(fd).st_size:
            raise FileNotFoundError(f"{path} is empty: the memory that was there is gone")
        _reserve(fd, start, reserved)
        return mmap.mmap(fd, 0)
    finally:
        os.close(fd)


def check_room(nbytes: int, held_bytes: int = 0) -> None:
    """Raise OSError unless this machine has room for `nbytes` more, where this file holds some already."""
    memory, total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), held_bytes + nbytes
    if total > memory // 2:
        # An anonymous file has no limit of its own: the kernel would end processes before it said no.
        raise OSError(errno.ENOMEM, f"{total} bytes asked for, more than half of this machine's {memory}")
    room = room_bytes()
    if room is not None and nbytes > room:
        raise OSError(errno.ENOMEM, f"{nbytes} bytes asked for, and {room} are left")


def _reserve(fd: int, start: int, nbytes: int) -> None:
    """Have the pages of some bytes now; they lie on the NUMA node of the process that asks."""
    if nbytes and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, nbytes)
