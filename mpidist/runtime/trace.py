"""The trace of one rank: its events, kept in memory of a fixed size and written when this is full.

An event is five 64-bit numbers: kind, begin, end, number of the collective call, part of the call.  Adding
one stores them and reads the clock; nothing is allocated but the integers themselves.  Nothing of this module runs
unless a trace was asked for: what is traced is wrapped then, and only then.

A file is a line of JSON about the rank, then blocks, each a line of JSON followed by the events as they are in memory,
and a last line that says how it ended.  While it grows its name ends in ``.part``.  So of a rank that was killed, what
had been written can be read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mpidist.output import say

#: Kinds of events that every trace has, by number; names of calls follow.
KINDS = ("step", "call", "arrive", "pack", "reduce", "send", "unpack", "apply", "trace")
STEP, CALL, ARRIVE, PACK, REDUCE, SEND, UNPACK, APPLY, TRACE = range(len(KINDS))

#: Numbers of an event, and how many events there is room for: 2.6 MB.
FIELDS, CAPACITY = 5, 1 << 16

#: To be raised when files of earlier versions say something else.
FORMAT = 1

#: How many events are added to find out what one costs.
_COST_EVENTS = 2000

_R = TypeVar("_R")


@dataclass
class About:
    """What a rank says of itself in the first line of its file.

    Attributes
    ----------
    job : str
        The same for all ranks of a job, and for no other.
    event_seconds : float
        What adding an event costs.
    offsets : list of (nanoseconds, nanoseconds)
        When the clock was compared, and what must be added to it to get that of rank 0.
    """

    job: str
    rank: int
    size: int
    host: str
    event_seconds: float = 0.0
    offsets: list[tuple[int, int]] = field(default_factory=list)


class Trace:
    """Events of one rank.

    Parameters
    ----------
    folder : path or None
        Made if it is not there; None where `open` will name it.
    capacity : int
        How many events are kept in memory.
    warn : callable, optional
        Gets one line when the file cannot be written.

    Attributes
    ----------
    dropped : int
        How many events could not be written.
    last_call : int
        The kind of the last call, by its name.
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
        self._warn = warn or _say
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

        Parameters
        ----------
        kind : int
            One of the constants of this module, or from `kind`.
        begin : int
            From `now`.
        call, part : int
            Number of the collective call, and of the bucket or segment in it.
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
        self.path = Path(folder) / f"rank-{self.about.rank:05d}.trace"
        self._part = self.path.with_suffix(".trace.part")
        self._try(self._open)

    def flush(self) -> None:
        """Write the events in memory; those that cannot be written are dropped, and counted."""
        begin, count, self._at = self.now(), self._at // FIELDS, 0
        if count:
            if not self._try(lambda: self._write_block(count)):
                self.dropped += count
            self.add(TRACE, begin, 0, count)

    def close(self) -> None:
        """Write what is left, and give the file its name; does nothing the second time."""
        if self._file is None and not self._problem:
            return
        self.flush()
        self._at = 0
        if self._file is not None and self._try(self._finish):
            self._file = None
        if self.dropped:
            self._warn(f"{self.dropped} events of the trace of rank {self.about.rank} are lost: {self._problem}")
        self._file, self._problem = None, ""

    def _open(self) -> None:
        self._part.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._part, "wb", buffering=0)
        self._line({"format": FORMAT, "fields": FIELDS, **vars(self.about), "byteorder": sys.byteorder})

    def _write_block(self, count: int) -> None:
        if self._file is None:
            raise OSError(self._problem or "the file is closed")
        before = self._file.tell()
        try:
            self._line({"events": count, "names": list(self._names), "offsets": self.about.offsets})
            self._all(memoryview(self._events)[: count * FIELDS].cast("B"))
        except OSError:
            self._file.truncate(before)  # half a block would hide what follows
            self._file.seek(before)
            raise

    def _finish(self) -> None:
        self._line({"end": True, "dropped": self.dropped, "names": list(self._names), "offsets": self.about.offsets})
        self._file.close()
        os.replace(self._part, self.path)

    def _line(self, content: dict[str, Any]) -> None:
        self._all(json.dumps(content).encode() + b"\n")

    def _all(self, raw: Any) -> None:
        view = memoryview(raw)
        while len(view):  # a disk that is nearly full takes a part, and refuses the rest
            view = view[self._file.write(view) :]

    def _try(self, do: Callable[[], object]) -> bool:
        try:
            do()
        except OSError as error:
            if not self._problem:
                self._problem = f"{self._part} cannot be written: {error}"
                self._warn(f"rank {self.about.rank} of {self.about.size}: the trace has gaps: {self._problem}")
            return False
        return True


def _say(text: str) -> None:
    say(f"mpidist: {text}")


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class Recording:
    """What was read of a rank's file.

    Attributes
    ----------
    names : list of str
        Of the kinds of events.
    events : array, shape (n, 5), int64
        Kind, begin and end in nanoseconds, call, part.
    problem : str
        What is missing at the end of the file; empty where nothing is.
    """

    about: About
    names: list[str]
    events: Any
    dropped: int = 0
    problem: str = ""


def read(path: str | os.PathLike[str]) -> Recording:
    """Return what a rank's file has, as far as it goes (Local).

    Raises
    ------
    OSError
        It cannot be read.
    ValueError
        It is no trace, or of another version; says what is wrong.
    """
    import numpy

    raw = Path(path).read_bytes()
    first, at = _json_line(raw, 0)
    if first is None or first.get("format") != FORMAT or first.get("fields") != FIELDS:
        raise ValueError(f"{path} is no trace of this version of mpidist (format {FORMAT})")
    about = About(**{name: first[name] for name in About.__dataclass_fields__})
    found = Recording(about, list(KINDS), None, problem="its end is missing: the rank was killed, or still runs")
    blocks, dtype = [], numpy.dtype("<i8" if first["byteorder"] == "little" else ">i8")
    while at < len(raw):
        line, at = _json_line(raw, at)
        if line is None:
            break
        found.names, about.offsets = line["names"], [(int(when), int(by)) for when, by in line["offsets"]]
        if line.get("end"):
            found.dropped, found.problem = line["dropped"], ""
            break
        length = line["events"] * FIELDS * dtype.itemsize
        whole = raw[at : at + length]
        whole = whole[: len(whole) // (FIELDS * dtype.itemsize) * FIELDS * dtype.itemsize]
        blocks.append(numpy.frombuffer(whole, dtype).reshape(-1, FIELDS))
        at += length
    found.events = numpy.concatenate([numpy.empty((0, FIELDS), numpy.int64), *blocks])
    return found


def _json_line(raw: bytes, at: int) -> tuple[dict[str, Any] | None, int]:
    """Return the line of JSON at a place, None if it is not whole, and where it ends."""
    end = raw.find(b"\n", at)
    if end < 0:
        return None, len(raw)
    try:
        found = json.loads(raw[at:end])
    except ValueError:
        return None, len(raw)
    return (found, end + 1) if isinstance(found, dict) else (None, len(raw))
