"""`NodeLock`: one of several processes of a node at a time, without waiting, and not left behind by the dead.

Python has no atomic operation on shared memory, and a flag that a dead process has set stays set.  The system's lock of
an open file has neither fault: it is given back when its holder ends, however that ends.  A word in shared memory
saves the others the question while it is held; it is only a hint.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from mpidist.runtime.board import fence, needs_fence

#: After how many looks at the hint the system is asked all the same: who has set it may be dead.
_ASK_LOOKS = 256


class NodeLock:
    """The lock of a file, as one process or one thread holds it.

    Each holder opens the file for itself.  `words` are 64-bit integers in memory that all of them have mapped.  `hint`
    is the index of the one for the lock, 0 at first; this holder writes its `mark` there, which is not 0.  OSError
    where the file cannot be opened, or the system has no such locks for it.
    """

    def __init__(self, path: str, words: Any, hint: int, mark: int = 1) -> None:
        try:
            import fcntl  # not on every system
        except ImportError as error:
            raise OSError("this system has no locks of open files") from error
        self._ask, self._take, self._free = fcntl.flock, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN
        self._words, self._hint, self._mark = words, hint, mark
        self._looks = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._ask(self._fd, self._take)
            self._ask(self._fd, self._free)
        except BlockingIOError:  # another holds it: it works
            pass
        except OSError:
            self.close()
            raise
        _open.add(self)

    def take(self) -> bool:
        """Take the lock if it is free; return whether it is this process's now.  Local."""
        words, hint = self._words, self._hint
        if words[hint]:
            self._looks += 1
            if self._looks % _ASK_LOOKS:
                return False
        try:
            self._ask(self._fd, self._take)
        except BlockingIOError:
            return False
        words[hint] = self._mark
        if needs_fence:
            fence()
        return True

    def give_back(self) -> None:
        """Let another have the lock.  Local."""
        if needs_fence:
            fence()
        self._words[self._hint] = 0
        self._ask(self._fd, self._free)

    def close(self) -> None:
        """Do without the lock from now on; it is given back if it is held.  Local."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


#: The locks of this process.
_open: weakref.WeakSet[NodeLock] = weakref.WeakSet()


def _close_all() -> None:
    for lock in _open:
        lock.close()


# A lock is held as long as any process has the file open that its holder took it with: a child that outlives its killed
# parent would hold it.
os.register_at_fork(after_in_child=_close_all)
