"""Find in the ranks' error output which rank failed first, and its traceback.

The runtime frames the traceback of a failing rank::

    mpidist: rank 3 of 8 failed
    Traceback (most recent call last):
    ...
    mpidist: end of rank 3

A rank that fails before the runtime is there (a syntax error, a missing module) prints a plain traceback; of
those, what follows the last one of a rank to the end of its output is taken.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

_FRAME_START = re.compile(r"mpidist: rank (\d+) of \d+ failed")
_FRAME_END = re.compile(r"mpidist: end of rank (\d+)")
# a syntax error in the script itself comes without the "Traceback" line
_TRACEBACK = re.compile(r'(\s*\+ Exception Group )?Traceback \(most recent call last\):|  File "[^"]*", line \d+$')
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")

#: How a rank tells that another has broken off a call; a program may wrap it into an error of its own.
_ABOUT = re.compile(
    r"mpidist\.errors\.(?:RankFailed|PeerLost)Error: rank \d+ of \d+: (?:.*: |ps \d+ \()?"
    r"rank (\d+) (?:\(\S*\)\)? )?(left|died|failed)[ :]"
)

#: Lines kept of one failure: enough for any traceback, little enough for a terminal.
_LIMIT = 400

#: With more lines than this after it, a plain traceback was logged and survived; a message is not so long.
_LAST_WORDS = 60


class Cause(NamedTuple):
    """The other rank that a failure is about, and what it did: ``"left"``, ``"died"`` or ``"failed"``."""

    rank: int
    did: str


@dataclass
class FailedRank:
    """A traceback found in the output."""

    order: int  # failures are numbered as they appear
    rank: int | None  # the rank that printed it; None when that is not known
    framed: bool  # whether the runtime framed it: then it is a failure for sure
    lines: list[str] = field(default_factory=list)
    shown: int = 0  # lines of error output, of all ranks, that had been shown when its last one was
    after: int = 0  # lines since the last indented one: the error's message, or whatever the rank printed later

    def add(self, line: str, shown: int = 0) -> None:
        """Add a line, unless there are too many already."""
        self.shown = shown
        self.after = 0 if line.startswith(" ") else self.after + 1
        if len(self.lines) < _LIMIT:
            self.lines.append(line)

    def cause(self) -> Cause | None:
        """Return the rank that the error names as its cause, None if it is this rank's own."""
        found = [match for match in map(_ABOUT.match, self.lines) if match]
        return Cause(int(found[-1][1]), found[-1][2]) if found else None


@dataclass
class _Stream:
    """What one rank's output is in the middle of."""

    frame: FailedRank | None = None
    block: FailedRank | None = None


class FailureLog:
    """Reads error output line by line and keeps the failures in it."""

    def __init__(self) -> None:
        self._failures: list[FailedRank] = []
        self._streams: dict[int | None, _Stream] = {}

    def feed(self, rank: int | None, line: str, shown: int = 0) -> None:
        """Take the next line of a rank's error output, or of the launcher's when `rank` is None.

        With it, so many lines have been shown.
        """
        stream = self._streams.setdefault(rank, _Stream())
        line = line.rstrip("\r").rpartition("\r")[2]  # what a progress bar has left on this line
        start = _FRAME_START.search(line)
        if start:
            stream.frame, stream.block = self._new(int(start[1]), framed=True), None
            line = line[start.start() :]
        if stream.frame is not None:
            stream.frame.add(line, shown)
            if _FRAME_END.match(line):
                stream.frame = None
            return
        if _TRACEBACK.match(line) and not _goes_on(stream.block):
            stream.block = self._new(rank, framed=False)
        if stream.block is not None:
            stream.block.add(line, shown)

    def _new(self, rank: int | None, framed: bool) -> FailedRank:
        self._failures.append(FailedRank(len(self._failures), rank, framed))
        return self._failures[-1]

    def framed(self) -> bool:
        """Return whether a rank was seen to fail, by the runtime's word."""
        return any(failure.framed for failure in self._failures)

    def first(self, ranks: Collection[int] | None = None) -> FailedRank | None:
        """Return the first failure that the runtime framed, else the first of the ranks' last plain tracebacks."""
        framed = [failure for failure in self._failures if failure.framed]
        last = {failure.rank: failure for failure in self._failures}
        plain = [failure for failure in last.values() if failure.after <= _LAST_WORDS]
        found = framed or sorted(plain, key=lambda failure: failure.order)
        return next((failure for failure in found if ranks is None or failure.rank in ranks), None)


def _goes_on(block: FailedRank | None) -> bool:
    """Return whether a traceback line continues `block`: inside it, or announced by the sentence between two."""
    if block is None:
        return False
    lines = [line for line in block.lines[-3:] if line.strip()]
    return bool(lines) and (lines[-1].startswith(_CHAINED) or block.lines[-1].startswith(("  ", "Traceback (")))
