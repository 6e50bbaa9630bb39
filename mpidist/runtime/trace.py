"""The trace of one rank: its events, kept in memory of a fixed size and written when this is full.

An event is five 64-bit numbers, see `trace_kinds`.  Adding one stores them and reads the clock; nothing is allocated
but the integers themselves, and no text is made before the memory is full.  Nothing of this module runs unless a trace
was asked for: what is traced is wrapped then, and only then.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy

from mpidist.output import say
from mpidist.runtime import trace_file
from mpidist.runtime.trace_file import About
from mpidist.runtime.trace_kinds import FIELDS, KINDS, TRACE

#: How many events there is room for: 0.7 MB, and a pause of some milliseconds when they are written, as 2 MB.
CAPACITY = 1 << 14

#: How many events are added to find out what one costs.
_COST_EVENTS = 2000

#: Why events are lost where nothing failed.
_BROKEN_OFF = "a signal came while they were written"

_R = TypeVar("_R")


class Trace:
    """Events of one rank.

    The `folder` is made if it is not there; None where `open` will name it.  `capacity` events are kept in memory.
    `warn` gets one line when the file cannot be written.  `dropped` events could not be written; `last_call` is the
    kind of the last call, by its name.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        about: About,
        capacity: int = CAPACITY,
        warn: Callable[[str], object] | None = None,
    ) -> None:
        if capacity < 2:  # one of them says when the memory was written
            raise ValueError(f"a trace needs room for 2 events or more, got {capacity}")
        self.about = about
        self.dropped = self.last_call = 0
        self._events = array("q", bytes(8 * FIELDS * capacity))
        self._at, self._end = 0, FIELDS * capacity
        self._names: dict[str, int] = {name: kind for kind, name in enumerate(KINDS)}
        self._warn = warn or (lambda text: say(f"mpidist: {text}"))
        self._problem = ""
        self._file: Any = None
        about.event_seconds = about.event_seconds or self._cost()
        if folder is not None:
            self.open(folder)

    # -- events -------------------------------------------------------------------------------------------------------

    @staticmethod
    def now() -> int:
        """Return the clock that all ranks of a machine share, in nanoseconds."""
        return time.monotonic_ns()

    def kind(self, name: str) -> int:
        """Return the number of a kind of events, a new one for a new name."""
        number = self._names.get(name)
        if number is None:
            number = self._names[name] = len(self._names)
        return number

    def add(
        self, kind: int, begin: int, call: int = 0, part: int = 0, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        """Add an event that began at `begin` and ends now.

        `kind` is one of `trace_kinds`, or from `kind`; `begin` is from `now`; `call` and `part` are the numbers of the
        collective call, and of the bucket or segment in it.
        """
        events, at = self._events, self._at
        events[at] = kind
        events[at + 1] = begin
        events[at + 2] = clock()
        events[at + 3] = call
        events[at + 4] = part
        self._at = at = at + 5
        if at >= self._end:
            self.flush()

    def clear(self) -> None:
        """Forget the events in memory."""
        self._at = 0

    def wrapped(self, kind: int, fn: Callable[..., _R]) -> Callable[..., _R]:
        """Return `fn` with an event around each of its calls."""
        add, clock = self.add, time.monotonic_ns

        def traced(*args: Any, **kwargs: Any) -> _R:
            begin = clock()
            try:
                return fn(*args, **kwargs)
            finally:
                add(kind, begin)

        return traced

    def _cost(self) -> float:
        """Return the seconds that an event takes, its first clock reading included; adds none."""
        rounds = min(_COST_EVENTS, self._end // FIELDS - 1) or 1
        start = time.monotonic_ns()
        for _ in range(rounds):
            self._at = 0
            self.add(TRACE, time.monotonic_ns())
        self._at = 0
        return (time.monotonic_ns() - start) / rounds * 1e-9

    # -- the file -----------------------------------------------------------------------------------------------------

    def open(self, folder: str | os.PathLike[str]) -> None:
        """Begin the file, in a folder that is made if it is not there."""
        self.path = Path(folder) / trace_file.NAME.format(self.about.rank)
        self._try(self._open)

    def flush(self) -> None:
        """Write the events in memory; those that cannot be written are dropped, and counted."""
        begin, count, self._at = self.now(), self._at // FIELDS, 0
        if count:
            self.dropped += count  # until they are written: a signal handler may end the trace meanwhile
            if self._try(lambda: self._write_block(count)):
                self.dropped -= count
            self.add(TRACE, begin, 0, count)

    def close(self) -> None:
        """Write what is left, and end the file; does nothing the second time."""
        if self._file is None and not self._problem:
            return
        self.flush()
        self._at = 0
        if self._file is not None and self._try(self._finish):
            self._file = None
        if self.dropped:
            self._warn(
                f"{self.dropped} events of the trace of rank {self.about.rank} are lost: {self._problem or _BROKEN_OFF}"
            )
        self._file, self._problem = None, ""

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "wb", buffering=0)
        order = trace_file.order_line(self.about, self.about.process)
        self._all(f"[\n{self._about_line()},\n{order},\n".encode())

    def _write_block(self, count: int) -> None:
        if self._file is None:
            raise OSError(self._problem or "the file is closed")
        before = self._file.tell()
        events = numpy.frombuffer(self._events, numpy.int64)[: count * FIELDS].reshape(count, FIELDS)
        try:
            self._all(f"{self._about_line()},\n".encode())
            for lines in trace_file.event_lines(events, list(self._names), self.about.process):
                self._all(lines)
        except BaseException:
            if self._file is not None:  # a signal handler may have ended the trace
                self._file.truncate(before)  # half a line would hide what follows
                self._file.seek(before)
            raise

    def _finish(self) -> None:
        self._all(f"{self._about_line(end=True, dropped=self.dropped)}\n]\n".encode())
        self._file.close()

    def _about_line(self, **more: object) -> str:
        return trace_file.about_line(self.about, self.about.process, **more)

    def _all(self, raw: Any) -> None:
        view = memoryview(raw)
        while len(view):  # a disk that is nearly full takes a part, and refuses the rest
            view = view[self._file.write(view) :]

    def _try(self, do: Callable[[], object]) -> bool:
        try:
            do()
        except (OSError, MemoryError) as error:
            if not self._problem:
                self._problem = f"{self.path} cannot be written: {error or 'no memory is left'}"
                self._warn(f"rank {self.about.rank} of {self.about.size}: the trace has gaps: {self._problem}")
            return False
        return True
