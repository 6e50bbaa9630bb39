"""Find out which rank was killed from what launchers print about it.

A killed rank says nothing itself.  Open MPI's launcher names its rank; MPICH's ends the survivors at once and names the
process only, so that its rank must be known from the process numbers that the ranks left behind when they were started.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

_OPEN_MPI = re.compile(r"noticed that process rank (\d+) with PID (\d+) on node (\S+)")
_OPEN_MPI_SIGNAL = re.compile(r"(?:exited on )?signal (\d+) \(")
_MPICH = re.compile(r"=\s+PID (\d+) RUNNING AT (\S+)")
_MPICH_SIGNAL = re.compile(r"TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)")


@dataclass
class KilledRank:
    """A rank that a signal ended, as far as the launcher has said.

    Attributes
    ----------
    process : int
    host : str
    rank : int or None
        None until it is known.
    signum : int or None
    """

    process: int
    host: str
    rank: int | None = None
    signum: int | None = None

    def describe(self) -> str:
        """Return a sentence about it."""
        who = "a rank" if self.rank is None else f"rank {self.rank}"
        name = signal.strsignal(self.signum) if self.signum else None
        what = f"signal {self.signum} ({name})" if name else "a signal"
        hint = "; by hand, by the system for want of memory, or by a limit of the job" if self.signum == 9 else ""
        return f"{who} (process {self.process} on {self.host}) was ended by {what}{hint}"


class KilledRanks:
    """Reads what the launcher prints, line by line, and keeps the first rank that it says was ended by a signal."""

    def __init__(self) -> None:
        self._first: KilledRank | None = None

    def feed(self, line: str) -> None:
        """Take the next line of the launcher's own output."""
        if self._first is None:
            self._first = _named(line)
        elif self._first.signum is None:
            self._first.signum = _signal_in(line)

    def first(self, rank_of: Mapping[int, int]) -> KilledRank | None:
        """Return the first rank ended by a signal, None if there is none; `rank_of` maps process numbers to ranks."""
        found = self._first
        if found is None or found.signum is None:
            return None
        if found.rank is None:
            found.rank = rank_of.get(found.process)
        return found


def _named(line: str) -> KilledRank | None:
    match = _OPEN_MPI.search(line)
    if match:
        return KilledRank(int(match[2]), match[3], int(match[1]), _signal_in(line))
    match = _MPICH.search(line)
    return KilledRank(int(match[1]), match[2]) if match else None


def _signal_in(line: str) -> int | None:
    """Return the number of the signal that a line names."""
    match = _OPEN_MPI_SIGNAL.search(line) or _MPICH_SIGNAL.search(line)
    return int(match[1]) if match else None
