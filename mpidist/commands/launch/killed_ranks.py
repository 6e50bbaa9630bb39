"""Read from a launcher's own output which rank was killed.

A killed rank says nothing itself.  Open MPI's launcher names the rank; MPICH's names any process, also one that it has
ended because of another, so that only the signal is taken from it.
"""

from __future__ import annotations

import re

from mpidist.commands.launch.rank_deaths import RankDeath

_OPEN_MPI = re.compile(r"noticed that process rank (\d+) with PID (\d+) on node (\S+)")
_OPEN_MPI_SIGNAL = re.compile(r"(?:exited on )?signal (\d+) \(")
_MPICH_SIGNAL = re.compile(r"TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)")

#: What ranks print, or launchers for them, when one of them ends the job: who ends afterwards was ended by it.
_ABORT = re.compile(r"MPI_ABORT was invoked on rank \d+|Abort\(-?\d+\) on node \d+ \(rank \d+ in comm ")

#: What Open MPI prints when a connection breaks, before it ends the job; and its launcher, when a host is gone.
_ENDING = re.compile(r"MPI will try to terminate your MPI job")
_HOST_LOST = re.compile(r"PRTE has lost communication with a remote daemon|A daemon failed to report back after being")


class KilledRanks:
    """Takes the output line by line and keeps the first rank that a signal ended, by the launcher's word."""

    def __init__(self) -> None:
        self.aborted = self.ending = self.host_lost = False
        self._named: re.Match[str] | None = None
        self._first: RankDeath | None = None

    def feed(self, rank: int | None, line: str) -> None:
        """Take the next line of a rank's error output, or of the launcher's own when `rank` is None."""
        self.aborted = self.aborted or _ABORT.search(line) is not None
        self.ending = self.ending or _ENDING.search(line) is not None
        self.host_lost = self.host_lost or _HOST_LOST.search(line) is not None
        if rank is None and self._first is None:
            self._first = self._death(line)

    def _death(self, line: str) -> RankDeath | None:
        """Return what this line completes: Open MPI breaks its sentence before the signal."""
        self._named = self._named or _OPEN_MPI.search(line)
        signum = _OPEN_MPI_SIGNAL.search(line) if self._named else None
        if self._named and signum:
            return RankDeath((int(self._named[1]),), -int(signum[1]), int(self._named[2]), self._named[3])
        signum = _MPICH_SIGNAL.search(line)
        return RankDeath((), -int(signum[1])) if signum else None

    def first(self) -> RankDeath | None:
        """Return the first rank that a signal ended, without its number if the launcher does not know it."""
        return self._first
