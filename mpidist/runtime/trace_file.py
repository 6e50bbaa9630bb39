"""The file of a trace: a list of JSON objects, one a line, which Perfetto and chrome://tracing open as it is.

The first line is ``[``.  Lines about the rank (``"ph":"M"``) stand at the beginning, before each block of events
(``"ph":"X"``), and at the end; only the one at the end says that nothing is missing, and ``]`` follows it.  Of a file
that breaks off, the whole lines count: the viewers want no ``]``.  Times are microseconds with three decimals, so no
nanosecond is lost.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy

from mpidist.runtime.trace_kinds import ARRIVE, CALL, FIELDS, KINDS, SEND

#: To be raised when files of earlier versions say something else.
FORMAT = 2

#: Names of the files, and those of format 1, which was binary.
NAME, FILES, OLD_FILES = "rank-{:05d}.trace.json", "rank-*.trace.json", ("rank-*.trace", "rank-*.trace.part")

#: Rows of the timeline for waves between nodes: so many are under way at a time.
WAVE_ROWS = 3

#: Events that are written at a time: their columns stay in cache.
_CHUNK = 2048

#: What stands before the name of a call while a rank waits for all.
_WAIT = "wait for all: "


@dataclass
class About:
    """What a rank says of itself in its file.

    `job` is the same for all ranks of a job, and for no other.  Adding an event costs `event_seconds`.  `offsets` say
    when the clock was compared, and what must be added to it to get that of rank 0, in nanoseconds.
    """

    job: str
    rank: int
    size: int
    host: str
    event_seconds: float = 0.0
    offsets: list[tuple[int, int]] = field(default_factory=list)

    @property
    def process(self) -> int:
        """The number of the rank for viewers, which is another one in another job or world."""
        return (zlib.crc32(self.job.encode()) & 0x7FFF) << 16 | self.rank


@dataclass
class Recording:
    """What was read of a rank's file.

    `names` are those of the kinds of events.  An event is kind, begin and end in nanoseconds, call, part.  `problem`
    says what is missing at the end of the file; empty where nothing is.
    """

    about: About
    names: list[str]
    events: Any
    dropped: int = 0
    problem: str = ""


# -- writing ----------------------------------------------------------------------------------------------------------


def about_line(about: About, process: int, **more: object) -> str:
    """Return the line about a rank, without what ends it."""
    content = {"name": f"rank {about.rank} on {about.host}", "format": FORMAT, **vars(about), **more}
    return _metadata("process_name", process, 0, content)


def order_line(about: About, process: int) -> str:
    """Return the line that says where viewers show a rank, without what ends it."""
    return _metadata("process_sort_index", process, 0, {"sort_index": about.rank})


def _metadata(name: str, process: int, thread: int, content: dict[str, Any]) -> str:
    return json.dumps({"ph": "M", "name": name, "pid": process, "tid": thread, "args": content})


def event_lines(events: Any, names: Sequence[str], process: int) -> Iterator[bytes]:
    """Yield the lines of events, each with a comma, some thousand at a time.

    Events are rows of kind, begin, end, call, part; nothing is less than 0, and no end before its begin.  `names` are
    those of the kinds; `process` is the number of the rank for viewers.
    """
    if ((events[:, 0] == SEND) & (events[:, 4] > 0)).any():
        rows = [_metadata("thread_name", process, 1 + row, {"name": "between nodes"}) for row in range(WAVE_ROWS)]
        yield "".join(f"{row},\n" for row in rows).encode()
    ends = _Ends(names, process)
    for at in range(0, len(events), _CHUNK):
        yield _lines(numpy.ascontiguousarray(events[at : at + _CHUNK].T), ends)


class _Ends(dict[int, bytes]):
    """The end of the line of an event, by its kind and its name or row."""

    def __init__(self, names: Sequence[str], process: int) -> None:
        super().__init__()
        self._names, self._process = names, process

    def __missing__(self, label: int) -> bytes:
        more, kind = divmod(label, 1 << 32)
        cat = name = self._names[kind]
        thread = more if kind == SEND else 0
        if kind in (CALL, ARRIVE) and more:
            name = self._names[more]
        if kind == ARRIVE:
            name = _WAIT + name
        shown = f'"pid":{self._process},"tid":{thread},"name":{json.dumps(name)},"cat":{json.dumps(cat)}}},\n'
        self[label] = found = shown.encode()
        return found


def _lines(columns: Any, ends: _Ends) -> bytes:
    """Return the lines of some events.

    The numbers of all lines are as wide as the longest: so they are made column by column, which takes a quarter of the
    time that one line after the other does.
    """
    kind, begin, end, call, part = columns
    numbers = [b'{"ph":"X","ts":', *_microseconds(begin), b',"dur":', *_microseconds(end - begin)]
    numbers += [b',"args":{"call":', *_whole(call), b',"part":', *_whole(part), b"},"]
    widths = [len(each) if isinstance(each, bytes) else each.itemsize for each in numbers]
    table = numpy.empty(len(kind), [(f"{at}", f"S{width}") for at, width in enumerate(widths)])
    for at, each in enumerate(numbers):
        table[f"{at}"] = each
    wave = numpy.where((kind == SEND) & (part > 0), 1 + part % WAVE_ROWS, 0)
    label = numpy.where((kind == CALL) | (kind == ARRIVE), part, wave) << 32 | kind
    lines = [b""] * (2 * len(kind))
    lines[::2] = table.view(f"S{table.itemsize}").tolist()
    lines[1::2] = map(ends.__getitem__, label.tolist())
    return b"".join(lines)


def _three_digits(first: str) -> Any:
    """Return the text of three digits: of 0 to 999 after others, and of 0 (which is `first`) to 999 as the first."""
    return numpy.array([f"{n:03d}" for n in range(1000)] + [first] + [f"{n:3d}" for n in range(1, 1000)], "S3")


#: The last three digits of a number, and others.
_LAST, _UPPER = _three_digits("  0"), _three_digits("   ")

#: The same as the first digits of the longest number, by how many these are.
_FIRST = [
    {width: numpy.array([text[-width:] for text in digits.astype("U3")[1000:]], f"S{width}") for width in (1, 2, 3)}
    for digits in (_LAST, _UPPER)
]


def _whole(values: Any) -> list[Any]:
    """Return numbers as columns of up to three digits, with spaces in front of all but the longest."""
    columns: list[Any] = []
    digits, left = _LAST, int(values.max())
    while left >= 1000:
        above = values // 1000
        columns.append(digits[values - above * 1000 + 1000 * (above == 0)])
        values, digits, left = above, _UPPER, left // 1000
    columns.append(_FIRST[bool(columns)][len(str(left))][values])
    return columns[::-1]


def _microseconds(values: Any) -> list[Any]:
    """Return nanoseconds as columns of microseconds with three decimals."""
    whole = values // 1000
    return [*_whole(whole), b".", _LAST[values - whole * 1000]]


# -- reading ----------------------------------------------------------------------------------------------------------

#: Numbers with decimals stay text: what is no event has other ones than nanoseconds.
_decode = json.JSONDecoder(parse_float=str).raw_decode

#: What a line that is none of a trace raises.
_UNLIKE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


def read(path: str | os.PathLike[str]) -> Recording:
    """Return what a rank's file has, as far as it goes (Local).

    OSError where it cannot be read; ValueError, with what is wrong, where it is no trace, or of another version.
    """
    with open(path, encoding="ascii", errors="replace") as file:
        recording, second = _begun(path, file.readline(), file.readline())
        reader = _Reader(recording)
        for number, line in enumerate(chain([second], file), 2):
            if not line.endswith("\n") or not recording.problem:
                break
            try:
                reader.take(line)
            except _UNLIKE:
                recording.problem = f"line {number} cannot be read; it and all after it are left out"
                break
    recording.events = numpy.frombuffer(reader.rows, numpy.int64).reshape(-1, FIELDS)
    return recording


def _begun(path: str | os.PathLike[str], first: str, second: str) -> tuple[Recording, str]:
    """Return the recording that a file begins, and its first line about the rank."""
    if first.startswith('{"format": 1,'):
        raise ValueError(
            f"{path} is a trace in the binary format of an earlier version of mpidist: read it with that version, or "
            "trace the job again"
        )
    try:
        told = _decode(second)[0]["args"] if first == "[\n" else {}
        if told.get("format") == FORMAT:
            problem = "its end is missing: the rank was killed, or still runs"
            return Recording(_about(told), list(KINDS), None, problem=problem), second
    except _UNLIKE:
        pass
    raise ValueError(f"{path} is no trace of this version of mpidist (format {FORMAT})")


def _about(told: dict[str, Any]) -> About:
    """Return what a line says about the rank."""
    offsets = [(int(when), int(by)) for when, by in told["offsets"]]
    return About(
        str(told["job"]), int(told["rank"]), int(told["size"]), str(told["host"]), float(told["event_seconds"]), offsets
    )


class _Reader:
    """Takes the lines of a file one after the other."""

    def __init__(self, found: Recording) -> None:
        self._found = found
        self._numbers = {name: kind for kind, name in enumerate(found.names)}
        self.rows = array("q")

    def take(self, line: str) -> None:
        """Take the next line."""
        event, _ = _decode(line)
        told = event["args"]
        if event["ph"] == "X":
            self._take_event(event, told["call"], told["part"])
        elif event["name"] == "process_name":
            self._found.about = _about(told)
            if told.get("end"):
                self._found.dropped, self._found.problem = int(told["dropped"]), ""

    def _take_event(self, each: dict[str, Any], call: int, part: int) -> None:
        name, cat = each["name"], each["cat"]
        kind = self._number(cat)
        if kind == ARRIVE:
            name = name.removeprefix(_WAIT)
        if kind in (CALL, ARRIVE):
            part = self._number(name) if name != cat else 0
        begin = int(each["ts"].replace(".", ""))
        self.rows.extend((kind, begin, begin + int(each["dur"].replace(".", "")), call, part))

    def _number(self, name: str) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._numbers)
            self._found.names.append(name)
        return number


def paths(folder: Path) -> list[Path]:
    """Return the traces of a folder, those of earlier versions too."""
    return [path for pattern in (FILES, *OLD_FILES) for path in folder.glob(pattern)]
