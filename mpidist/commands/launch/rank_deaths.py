"""Watch the ranks' processes end: which was the first, and how.

A launcher ends all ranks once one of them is gone, and MPICH's names any of those, also one that it has ended itself.
So the end of every process is watched from here, as an event among those that the output of the ranks makes.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import signal
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mpidist.commands.launch.rank_processes import alive
from mpidist.runtime.board import ENDING, stat_of

if TYPE_CHECKING:
    from mpidist.commands.launch.output_streams import OutputStreams

#: What launchers end ranks with: who ended otherwise did so by itself.
_OF_LAUNCHERS = (-signal.SIGKILL, -signal.SIGTERM)

#: Of ranks that end within so many seconds any may have been the first: the launcher notices when files are closed,
#: and on busy cores whom it then ends can be gone before the rank that it noticed.
_TOGETHER_SECONDS = 0.002
#: Who ends by itself within so many seconds of one that was ended was the first, late as its end was seen.
_LATE_SECONDS = 0.02

#: Linux 6.15 tells how a process ended after it is gone, too: the call, its flag, the size of the answer, the place.
_GET_INFO, _EXIT_FLAG, _INFO_BYTES, _EXIT_OFFSET = 0xC040FF0B, 8, 64, 60


@dataclass(frozen=True)
class RankDeath:
    """A rank that ended before the job was over, or a group of ranks one of which it was."""

    # one rank; several when any of them may have been the first; none when it is not known at all
    ranks: tuple[int, ...]
    status: int | None = None  # as in ``subprocess``: the exit status, or -n for signal n; None when it is not known
    process: int | None = None
    host: str = ""

    @property
    def by_signal(self) -> bool:
        """Whether a signal ended it."""
        return self.status is not None and self.status < 0

    @property
    def shell_status(self) -> int | None:
        """What a shell would say: 128 + n for signal n; None when it is not known."""
        return 128 - self.status if self.status is not None and self.status < 0 else self.status

    def describe(self) -> str:
        """Return a sentence about it."""
        place = ("process", str(self.process), "on" if self.host else "") if self.process else ()
        where = " ".join(filter(None, [*place, self.host]))
        return f"{self._who()}{f' ({where})' if where else ''} {self._how()}"

    def _who(self) -> str:
        if len(self.ranks) == 1:
            return f"rank {self.ranks[0]}"
        if not self.ranks:
            return "a rank (the launcher does not say which)"
        return f"one of ranks {', '.join(map(str, self.ranks))} (the launcher does not say which)"

    def _how(self) -> str:
        if self.status is None:
            return "ended first; how is not known"
        if self.status >= 0:
            return f"ended first, with status {self.status}"
        name = signal.strsignal(-self.status)
        what = f"signal {-self.status}" + (f" ({name})" if name else "")
        hint = "; by hand, by the system for want of memory, or by a limit of the job"
        return f"was ended by {what}{hint if self.status == -signal.SIGKILL else ''}"


class Seen(NamedTuple):
    """The end of one rank's process, and when it was seen, in seconds of a clock."""

    rank: int
    process: int
    status: int | None
    at: float
    #: Ranks that were about to end then: their files were closed by the system, and the launcher may have noticed that.
    ending: frozenset[int] = frozenset()


def first_death(seen: Sequence[Seen], host: str = "") -> RankDeath | None:
    """Return the first of these that did not end well, None if all did; in the order of time (Local, pure)."""
    bad = [death for death in seen if death.status != 0]
    if not bad:
        return None
    together = _candidates(bad)
    statuses = {death.status for death in together} - {None}
    status = statuses.pop() if len(statuses) == 1 else None
    ranks = tuple(sorted(death.rank for death in together))
    process = together[0].process if len(together) == 1 else None
    return RankDeath(ranks, status, process, host if process else "")


def _candidates(bad: Sequence[Seen]) -> Sequence[Seen]:
    """Return those of which one was the first."""
    near = [death for death in bad if death.at - bad[0].at <= _LATE_SECONDS]
    own = [death for death in near if death.status is not None and death.status not in _OF_LAUNCHERS]
    together = {death.rank for death in near if death.at - bad[0].at <= _TOGETHER_SECONDS} | bad[0].ending
    return own[:1] or [death for death in bad if death.rank in together]


class RankDeaths:
    """The ends of the processes of `ranks` ranks, as far as they are on this machine."""

    def __init__(
        self,
        ranks: int,
        rank_of_process_fn: Callable[[], Mapping[int, int]],
        events: OutputStreams,
        clock_fn: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks, self._rank_of_process_fn, self._events = ranks, rank_of_process_fn, events
        self._rank_of: dict[int, int] = {}
        self._descriptors: dict[int, int] = {}
        self._polled: set[int] = set()
        self._seen: list[Seen] = []
        self._told, self._count = 0, ranks
        self._all_are_here = True
        self._clock_fn = clock_fn

    def look(self) -> None:
        """Watch the processes that have been started since the last look; ask for those that cannot be watched."""
        if len(self._rank_of) < self._ranks:
            for process, rank in self._rank_of_process_fn().items():
                if process not in self._rank_of:
                    self._rank_of[process] = rank
                    self._add(process)
        for process in [process for process in self._polled if not alive(process)]:
            self._polled.remove(process)
            self._note(process)

    def _add(self, process: int) -> None:
        """Watch a process; one that has ended by now did so nobody knows when."""
        descriptor = _open(process)
        if descriptor is None or not alive(process):
            self._polled.add(process)
            if descriptor is not None:
                os.close(descriptor)
            return
        self._descriptors[process] = descriptor
        self._events.watch(descriptor, lambda: self._note(process))

    def _note(self, process: int) -> None:
        descriptor = self._descriptors.pop(process, None)
        at, ending = self._clock_fn(), self._ending()
        self._seen.append(Seen(self._rank_of[process], process, _status(process, descriptor), at, ending))
        self._forget([descriptor] if descriptor is not None else [])

    def _ending(self) -> frozenset[int]:
        """Return the ranks that are about to end: where cores are few, one can be stopped there, and seen too late."""
        if any(death.status != 0 for death in self._seen):
            return frozenset()  # only what was so at the first end matters
        return frozenset(self._rank_of[process] for process in self._descriptors if _has_closed_files(process))

    def news(self) -> list[RankDeath]:
        """Return the ranks that have ended since the last call, by a signal or with a status that tells of an error."""
        since, self._told = self._seen[self._told :], len(self._seen)
        own = [each for each in since if each.status not in (None, 0, -signal.SIGTERM)]
        return [death for each in own if (death := first_death([each], platform.node())) is not None]

    def all_ended(self) -> bool:
        """Whether every rank was seen to end."""
        return len({death.rank for death in self._seen}) == self._count

    def all_ended_badly(self) -> bool:
        """Whether every rank was seen to end, and none of them well."""
        return self.all_ended() and all(death.status for death in self._seen)

    def first(self) -> RankDeath | None:
        """Return the first rank that did not end well; None where a rank on another machine may have been before it."""
        own = [death for death in self._seen if self._all_are_here or death.status not in _OF_LAUNCHERS]
        return first_death(own, platform.node())

    def of(self, rank: int) -> RankDeath | None:
        """Return how this rank ended, None if it was not seen to end."""
        return first_death([death for death in self._seen if death.rank == rank], platform.node())

    def close(self) -> None:
        """Watch no more: who ends from now on is ended from here."""
        self._all_are_here = len(self._rank_of_process_fn()) >= self._count
        self._forget(self._descriptors.values())
        self._descriptors.clear()
        self._polled.clear()
        self._ranks = 0

    def _forget(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            self._events.unwatch(descriptor)
            os.close(descriptor)


def _open(process: int) -> int | None:
    """Return a descriptor that can be read when the process has ended, None where there is no such thing."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        return None
    try:
        return os.pidfd_open(process)
    except OSError:  # it is gone, or the system is too old, or forbids it
        return None


def _has_closed_files(process: int) -> bool:
    """Return whether a process is ending, and not yet over, and has no files any more."""
    try:
        fields = stat_of(process)
        return fields[0] != b"Z" and bool(int(fields[6]) & ENDING) and not os.listdir(f"/proc/{process}/fd")
    except OSError:  # it is over, or another user's
        return False


def _status(process: int, descriptor: int | None) -> int | None:
    """Return how a process has ended, None if that cannot be found out any more."""
    try:
        fields = stat_of(process)
        if fields[0] == b"Z":
            return os.waitstatus_to_exitcode(int(fields[-1]))
    except OSError:  # its parent has asked for its status, and it is gone
        pass
    return _status_of_gone(descriptor) if descriptor is not None else None


def _status_of_gone(descriptor: int) -> int | None:
    import fcntl  # not everywhere; where there are such descriptors

    answer = bytearray(_INFO_BYTES)
    struct.pack_into("=Q", answer, 0, _EXIT_FLAG)
    try:
        fcntl.ioctl(descriptor, _GET_INFO, answer)
    except OSError as error:
        if error.errno in (errno.ENOTTY, errno.EINVAL, errno.ESRCH):  # a system that cannot tell
            return None
        raise
    (flags,) = struct.unpack_from("=Q", answer)
    (status,) = struct.unpack_from("=i", answer, _EXIT_OFFSET)
    return os.waitstatus_to_exitcode(status) if flags & _EXIT_FLAG else None


_OPEN_MPI = re.compile(r"noticed that process rank (\d+) with PID (\d+) on node (\S+)")
_OPEN_MPI_SIGNAL = re.compile(r"(?:exited on )?signal (\d+) \(")
_MPICH_SIGNAL = re.compile(r"TERMINATED WITH THE EXIT STRING: .*\(signal (\d+)\)")

#: What ranks print, or launchers for them, when one of them ends the job: who ends afterwards was ended by it.
_ABORT = re.compile(r"MPI_ABORT was invoked on rank \d+|Abort\(-?\d+\) on node \d+ \(rank \d+ in comm ")

#: What Open MPI prints when a connection breaks, before it ends the job; and its launcher, when a host is gone.
_ENDS_JOB = re.compile(r"MPI will try to terminate your MPI job")
_HOST_LOST = re.compile(r"PRTE has lost communication with a remote daemon|A daemon failed to report back after being")


class KilledRanks:
    """Takes a launcher's output line by line; `first` is the first rank that a signal ended, by the launcher's word.

    A killed rank says nothing itself.  Open MPI's launcher names the rank; MPICH's names any process, also one that it
    has ended because of another, so that only the signal is taken from it.
    """

    def __init__(self) -> None:
        self.aborted = self.ending = self.host_lost = False
        self._named: re.Match[str] | None = None
        self.first: RankDeath | None = None

    def feed(self, rank: int | None, line: str) -> None:
        """Take the next line of a rank's error output, or of the launcher's own when `rank` is None."""
        self.aborted = self.aborted or _ABORT.search(line) is not None
        self.ending = self.ending or _ENDS_JOB.search(line) is not None
        self.host_lost = self.host_lost or _HOST_LOST.search(line) is not None
        if rank is None and self.first is None:
            self.first = self._death(line)

    def _death(self, line: str) -> RankDeath | None:
        """Return what this line completes: Open MPI breaks its sentence before the signal."""
        self._named = self._named or _OPEN_MPI.search(line)
        signum = _OPEN_MPI_SIGNAL.search(line) if self._named else None
        if self._named and signum:
            return RankDeath((int(self._named[1]),), -int(signum[1]), int(self._named[2]), self._named[3])
        signum = _MPICH_SIGNAL.search(line)
        return RankDeath((), -int(signum[1])) if signum else None
