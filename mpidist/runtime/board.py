"""The status board: a row of words for each rank, in memory that all its ranks see.

A row holds the numbers of the rank's last two collective calls with their digests, its state, and who it is.
Two calls are kept, by parity: a rank in call k + 1 still shows its digest of call k to a slower rank.  It does not
reach call k + 2 before that rank has posted call k + 1.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

#: States of a rank: not there yet, at work, failed on its own account, past a deadline, gone.
UNKNOWN, RUNNING, FAILED, EXPIRED, LEFT = range(5)

_ROW_WORDS = 16
_TEXT_BYTES = 8192
_NOTE_BYTES = 1024
_ALARM = 0
_STATE, _PID, _START = 4, 5, 6
#: What /proc says of a process that is ending, from its first moment on: on busy cores it may be long until it is gone.
ENDING = 0x4
_WAITING, _QUIET, _REQUEST, _LOOKED, _LABEL = 7, 8, 9, 10, 11


def _no_fence() -> None:
    """x86-64 shows stores of one processor to all others in program order: nothing to do."""


def _locked_instruction(lock: threading.Lock = threading.Lock()) -> None:  # noqa: B008 - one lock for all, on purpose
    """x86-64 completes all stores before a locked instruction, and to take a lock is one."""
    with lock:
        pass


def _release_and_acquire(lock: threading.Lock = threading.Lock()) -> None:  # noqa: B008 - one lock for all, on purpose
    """Elsewhere a release of a lock, and then an acquire of the same, let nothing pass."""
    with lock:
        pass
    with lock:
        pass


_IS_X86_64 = platform.machine() in ("x86_64", "AMD64")

#: Whether `fence` does anything here: the path of a call is quicker without a look.
needs_fence = not _IS_X86_64

#: Shows what was stored before to others no later than what is stored afterwards; and the same for loads.
fence: Callable[[], None] = _no_fence if _IS_X86_64 else _release_and_acquire

#: Makes this process's stores visible before its next load.  Who stores a mark and then looks at another's needs this
#: on every processor: x86-64, too, lets a load pass a store.
full_fence: Callable[[], None] = _locked_instruction if _IS_X86_64 else _release_and_acquire


class StatusBoard:
    """The rows of some ranks, in shared or private memory.  Methods know each of the `size` ranks by its `index`."""

    def __init__(self, memory: Any, size: int) -> None:
        self._bytes = memoryview(memory)
        self.size = size
        text_start = (1 + size) * _ROW_WORDS * 8
        self.words = self._bytes[:text_start].cast("Q")
        notes_start = text_start + size * _TEXT_BYTES
        self._text = self._bytes[text_start:notes_start]
        self._notes = self._bytes[notes_start : notes_start + 2 * size * _NOTE_BYTES]

        def by_rank(word: int) -> Any:
            return self.words[_ROW_WORDS + word :: _ROW_WORDS]

        #: By rank, its process number, 0 if nobody has signed on; and the label of its process, see `Standoffs`.
        self.pids, self.labels = by_rank(_PID), by_rank(_LABEL)
        #: By rank, the call in which it has waited last, or 0; and 1 where it prints nothing more.
        self.waiting, self.quiet = by_rank(_WAITING), by_rank(_QUIET)
        #: By rank, the step of its program at which it asks all ranks to stop, or 0.
        self.requests = by_rank(_REQUEST)

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the size in bytes of a board of so many ranks."""
        return (1 + size) * _ROW_WORDS * 8 + size * (_TEXT_BYTES + 2 * _NOTE_BYTES)

    @staticmethod
    def call_words(index: int) -> tuple[int, int]:
        """Return the indices in `words` of the call numbers of even and odd calls; the digest follows each."""
        base = (1 + index) * _ROW_WORDS
        return base, base + 2

    def sign_on(self, index: int) -> None:
        """Say that this process is the rank."""
        base = (1 + index) * _ROW_WORDS
        self.pids[index] = os.getpid()
        self.words[base + _START] = start_time(os.getpid()) or 0
        fence()
        self.words[base + _STATE] = RUNNING

    def post(self, index: int, call: int, digest: int) -> None:
        """Write that the rank has come to `call` with `digest` (both below 2**64)."""
        slot = (1 + index) * _ROW_WORDS + 2 * (call & 1)
        self.words[slot + 1] = digest
        fence()
        self.words[slot] = call

    def write_note(self, index: int, call: int, text: str) -> None:
        """Write what the rank has to say of `call`, before it is posted; as many as there are digests are kept.

        The beginning of a long text is kept.
        """
        start = (2 * index + (call & 1)) * _NOTE_BYTES
        self._notes[start : start + _NOTE_BYTES] = text.encode(errors="replace")[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")

    def note(self, index: int, call: int) -> str:
        """Return what the rank wrote of `call`, one of its last two calls."""
        fence()  # behind the look at the call or digest that says that there is a note
        start = (2 * index + (call & 1)) * _NOTE_BYTES
        raw = bytes(self._notes[start : start + _NOTE_BYTES])
        return raw.rstrip(b"\0").decode(errors="ignore")

    def call(self, index: int) -> int:
        """Return the number of the last call the rank has come to, 0 before the first."""
        even, odd = self.call_words(index)
        return max(self.words[even], self.words[odd])

    def digest(self, index: int, call: int) -> int:
        """Return the digest that a rank posted with `call`, which is one of its last two calls."""
        fence()
        return self.words[(1 + index) * _ROW_WORDS + 2 * (call & 1) + 1]

    def state(self, index: int) -> int:
        """Return the state of the rank."""
        return self.words[(1 + index) * _ROW_WORDS + _STATE]

    def set_state(self, index: int, state: int, text: str = "") -> None:
        """Set the rank's state and text, and raise the alarm that every waiting rank of the board sees."""
        # the end of a long traceback is kept: its last line is the error
        raw = text.encode(errors="replace")[-_TEXT_BYTES:].ljust(_TEXT_BYTES, b"\0")
        self._text[index * _TEXT_BYTES : (index + 1) * _TEXT_BYTES] = raw
        fence()
        self.words[(1 + index) * _ROW_WORDS + _STATE] = state
        fence()
        self.words[_ALARM] = 1

    def text(self, index: int) -> str:
        """Return the text that came with the rank's state, which the caller has seen."""
        fence()
        raw = bytes(self._text[index * _TEXT_BYTES : (index + 1) * _TEXT_BYTES])
        return raw.rstrip(b"\0").decode(errors="replace")

    def set_waiting(self, index: int, call: int) -> None:
        """Say that the rank waits in `call` at this moment, and has done so for a while."""
        self.waiting[index] = call
        self.words[(1 + index) * _ROW_WORDS + _LOOKED] = time.monotonic_ns()  # one clock for all processes of a machine

    def silent_seconds(self, index: int) -> float:
        """Return for how long the rank has not said that it waits."""
        return (time.monotonic_ns() - self.words[(1 + index) * _ROW_WORDS + _LOOKED]) / 1e9

    @property
    def alarm(self) -> bool:
        """Whether some rank's state has changed since the start."""
        return self.words[_ALARM] != 0

    def alive(self, index: int) -> bool:
        """Return whether the process of the rank still runs (one that has not signed on counts as alive)."""
        pid = self.pids[index]
        if pid in (0, os.getpid()):
            return True
        return lives(pid, self.words[(1 + index) * _ROW_WORDS + _START])


def start_time(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot; None when it is gone, or on its way.

    0 where the system has no /proc, so that callers fall back to asking whether the process exists.
    """
    try:
        fields = stat_of(pid)
    except FileNotFoundError:
        return None if os.path.isdir("/proc/self") else 0
    except ProcessLookupError:
        return None
    is_over = fields[0] in (b"Z", b"X") or int(fields[6]) & ENDING
    return None if is_over else int(fields[19])


def stat_of(pid: int) -> list[bytes]:
    """Return what Linux says of a process, from its state on; OSError where it is gone, or there is no /proc."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # the name in parentheses may hold blanks and parentheses itself
        return file.read().rpartition(b")")[2].split()


def lives(pid: int, start: int) -> bool:
    """Return whether the process `pid` that began at `start` still runs; a start of 0 is not known."""
    return start_time(pid) == start if start else exists(pid)


def exists(pid: int) -> bool:
    """Return whether a signal could be sent to the process `pid`: for systems without /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
