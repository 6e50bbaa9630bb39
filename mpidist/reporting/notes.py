"""What each rank notes of a training: a line of JSON at a time, in a file of its own, which a killed rank leaves too.

The first line of a session says what the rank is.  A process that goes on from a checkpoint adds a session.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from mpidist.collectives.communicator import Communicator
from mpidist.errors import listed

#: To be raised when files of earlier versions say something else.
FORMAT = 1

#: A line: what it is, and its contents.
Line = dict[str, Any]


class RunNotes:
    """The notes of one rank.  A line that cannot be written is lost, with a warning once; the training goes on.

    The `folder` is made if it is not there; `about` is what the rank is, see `reporting.facts`.  OSError where the file
    cannot be opened.
    """

    def __init__(self, folder: Path, communicator: Communicator, about: Line) -> None:
        self._control, self._start, self._has_warned = communicator.control, time.perf_counter(), False
        self._session = uuid.uuid4().hex[:8]  # others may write to the file too
        self.path = folder / f"rank-{about['rank']:05d}.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - until close
        if self._file.tell():
            self._file.write(b"\n")  # the line before may be cut off
        self._write({"kind": "about", "format": FORMAT, "time": time.time(), **about})

    @property
    def seconds(self) -> float:
        """Seconds since the notes were begun."""
        return time.perf_counter() - self._start

    def add(self, kind: str, **content: Any) -> None:
        """Add a line.  Local."""
        try:
            self._write({"kind": kind, "seconds": self.seconds, **content})
        except OSError as error:
            if not self._has_warned:
                self._control.warn(f"notes of the report are lost: {self.path} cannot be written: {error}")
            self._has_warned = True

    def close(self) -> None:
        """Close the file.  Local."""
        self._file.close()

    def _write(self, line: Line) -> None:
        self._file.write(json.dumps({**line, "session": self._session}).encode() + b"\n")


#: By the communicator of all ranks: the notes of the training that is under way.
under_way: WeakKeyDictionary[Communicator, RunNotes] = WeakKeyDictionary()


def note_checkpoint(communicator: Communicator, kind: str, path: Path, took: float) -> None:
    """Note that a checkpoint was saved or restored, if notes are under way.  Local."""
    notes = under_way.get(communicator)
    if notes is not None:
        size = None
        with suppress(OSError):  # only the chief need see it
            size = path.stat().st_size
        notes.add(kind, path=str(path), took=took, bytes=size)


def memory_peak() -> int | None:
    """Return the most bytes that this process has had in memory; None where the system does not say.  Local."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


# -- reading ----------------------------------------------------------------------------------------------------------


@dataclass
class RankNotes:
    """What one rank has noted.

    `lines` are those of the last session, `earlier` those of the sessions that it goes on from.  `is_cut`: the last
    line is not whole.
    """

    about: Line
    lines: list[Line] = field(default_factory=list)
    earlier: list[Line] = field(default_factory=list)
    is_cut: bool = False

    def of(self, *kinds: str, earlier: bool = False) -> list[Line]:
        """Return the lines of these kinds."""
        return [line for line in [*(self.earlier if earlier else ()), *self.lines] if line["kind"] in kinds]

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that train."""
        told: int | list[int] = self.about["ranks"]
        return range(told) if isinstance(told, int) else told

    @property
    def last(self) -> Line:
        """What was noted last of how far the training is; empty where nothing was."""
        return next(iter(reversed(self.of("progress"))), {})

    @property
    def rate(self) -> float | None:
        """Rows a second of this rank, validation and checkpoints included; None where nothing was noted."""
        rows = self.last.get("rows")
        return None if rows is None else rows / self.last["seconds"]

    @property
    def has_ended(self) -> bool:
        """Whether the training came to its end."""
        return bool(self.of("end"))


def read(folder: Path) -> tuple[dict[int, RankNotes], list[str]]:
    """Return the notes of the folder's newest training by rank, and what is missing.

    ValueError where there are none.
    """
    problems: list[str] = []
    all_notes = [notes for path in sorted(folder.glob("rank-*.jsonl")) if (notes := _read_file(path, problems))]
    if not all_notes:
        why = "".join(f"; {each}" for each in problems)
        raise ValueError(
            f"{folder} has no notes of a training{why}; "
            f"give fit the callback mpidist.callbacks.Report({str(folder)!r}), and train again"
        )
    newest = max(all_notes, key=lambda notes: notes.about["time"]).about
    run, which = newest["run"], newest["ranks"]
    by_rank = {
        notes.about["rank"]: notes for notes in all_notes if (notes.about["run"], notes.about["ranks"]) == (run, which)
    }
    ranks = by_rank[min(by_rank)].ranks
    if missing := [str(rank) for rank in ranks if rank not in by_rank]:
        problems.append(f"No notes of rank {listed(missing)} of {len(ranks)}: gather all files in this folder.")
    problems += [f"The last line of rank {rank} is cut off." for rank, notes in by_rank.items() if notes.is_cut]
    if ended := [str(rank) for rank, notes in by_rank.items() if not notes.has_ended]:
        problems.append(f"Rank {listed(ended)} did not come to the end: it was killed, failed, or is still training.")
    return by_rank, problems


def _read_file(path: Path, problems: list[str]) -> RankNotes | None:
    """Return the last session of a file and those that it goes on from; None, and a problem, where there is none."""
    sessions: dict[str, RankNotes] = {}
    try:
        raw = path.read_bytes()
    except OSError as error:
        problems.append(f"{path} cannot be read: {error}")
        return None
    for line in _whole_lines(raw):
        if line["kind"] == "about" and line.get("format") == FORMAT:
            sessions[line["session"]] = RankNotes(line)
        elif line["session"] in sessions:
            sessions[line["session"]].lines.append(line)
    before: RankNotes | None = None
    for found in sessions.values():
        if before is not None and (found.about["goes_on"] or found.of("restored")):
            found.earlier = [*before.earlier, *before.lines]
        before = found
    if before is None:
        problems.append(f"{path} has no notes of this version of mpidist (format {FORMAT})")
    else:
        before.is_cut = not raw.endswith(b"\n")
    return before


def _whole_lines(raw: bytes) -> Iterator[Line]:
    for text in raw.split(b"\n"):
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and {"kind", "session"} <= {*line}:
                yield line
