"""See from the ranks' notes when the start of MPI cannot end: a rank that others wait for has ended, or does not come.

A program that never uses mpidist leaves no notes of its start.  Of its end there is one (`python_start`): MPI's end
waits for all ranks as its start does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpidist.cluster.join_notes import JOINED, JOINING, OVER, PROCESS
from mpidist.commands.launch.rank_processes import alive
from mpidist.diagnosis.case import ranks_text
from mpidist.options import Settings

_LOOK_SECONDS = 0.5

#: How long a launcher may take to end the job by itself, and ranks that have met to say so.
_GRACE_SECONDS = 3.0


@dataclass(frozen=True)
class RankState:
    """What is known of one rank."""

    process: int | None = None  # none where its process is not known: not started yet, or on another machine
    joined: bool = False  # whether it has met all other ranks
    gone_seconds: float | None = None  # how long its process has been gone; None while it lives
    waiting_seconds: float | None = None  # how long it has waited for the others in the start-up; None if it does not
    over_seconds: float | None = None  # how long its program has been over; None if it is not

    @property
    def waits(self) -> bool:
        """Whether it is alive and waits."""
        return self.waiting_seconds is not None and self.gone_seconds is None and not self.joined

    @property
    def ended(self) -> bool:
        """Whether it has ended for good without having met the others."""
        return self.gone_seconds is not None and self.gone_seconds >= _GRACE_SECONDS and not self.joined

    @property
    def late(self) -> bool:
        """Whether it lives and has not come to the start-up."""
        return self.lives_alone and self.waiting_seconds is None

    @property
    def lives_alone(self) -> bool:
        """Whether it lives, and has not met all other ranks."""
        return self.process is not None and self.gone_seconds is None and not self.joined


@dataclass(frozen=True)
class Verdict:
    """A sentence about a start-up that does not end, and whether the job is to be ended."""

    message: str
    fatal: bool = False


def judge(ranks: Sequence[RankState], warn_seconds: float, timeout_seconds: float) -> Verdict | None:
    """Return what is to be said about the start-up of these ranks, None while all may be well."""
    waiting = [rank for rank, state in enumerate(ranks) if state.waits]
    waited = max((ranks[rank].waiting_seconds or 0.0 for rank in waiting), default=0.0)
    ended = [rank for rank, state in enumerate(ranks) if state.ended]
    if ended and waited >= _GRACE_SECONDS:
        return Verdict(
            f"{ranks_text(ended)} ended before all ranks had joined; {ranks_text(waiting)} {_wait(waiting)} for "
            f"{'it' if len(ended) == 1 else 'them'} in MPI's start-up, which has no end. Every rank must come to the "
            f"first strategy. The job was ended",
            fatal=True,
        )
    late = [rank for rank, state in enumerate(ranks) if state.late]
    if waiting and 0 < timeout_seconds <= waited:
        return Verdict(
            f"{_sentence(waiting, late, waited)}. The job was ended (MPIDIST_TIMEOUT_SECONDS is {timeout_seconds:g})",
            fatal=True,
        )
    if waiting and 0 < warn_seconds <= waited:
        where = "; ".join(f"py-spy dump --pid {ranks[rank].process}" for rank in late)
        return Verdict(_sentence(waiting, late, waited) + (f". See where: {where}" if late else ""))
    over = [rank for rank, state in enumerate(ranks) if state.over_seconds is not None and state.lives_alone]
    others = [rank for rank, state in enumerate(ranks) if state.over_seconds is None and state.lives_alone]
    waited = max((ranks[rank].over_seconds or 0.0 for rank in over), default=0.0)
    if others and 0 < warn_seconds <= waited:
        its, early = "its" if len(over) == 1 else "their", ranks_text(over)
        came = f"{early} came to the end of {its} program {waited:.0f} s ago"
        waits = f"{_wait(over)} in MPI_Finalize for {ranks_text(others)}"
        works = "it works" if len(others) == 1 else "they work"
        return Verdict(f"{came}, and {waits}. All is well while {works} alone; a call that needs {early} hangs")
    return None


def _sentence(waiting: Sequence[int], late: Sequence[int], waited: float) -> str:
    """Return who waits for whom."""
    begin = f"{ranks_text(waiting)} {_wait(waiting)} in MPI's start-up, for {waited:.0f} s by now"
    return f"{begin}; {ranks_text(late)} {'has' if len(late) == 1 else 'have'} not come to it" if late else begin


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


class StartUp:
    """Reads the notes of `ranks` ranks in `folder` every half second, until all have met."""

    def __init__(self, folder: str, ranks: int, settings: Settings) -> None:
        self._folder, self._ranks, self._settings = folder, range(ranks), settings
        self._since: dict[tuple[int, str], float] = {}
        self._next, self._warned, self._over = 0.0, False, False

    def look(self, now: float) -> Verdict | None:
        """Return what is to be said at time `now` in seconds, None mostly: a warning once, an end always."""
        if self._over or now < self._next:
            return None
        self._next = now + _LOOK_SECONDS
        states = [self._state(rank, now) for rank in self._ranks]
        self._over = all(state.joined for state in states)
        verdict = judge(states, self._settings.warn_seconds, self._settings.timeout_seconds)
        if verdict is None or (self._warned and not verdict.fatal):
            return None
        self._warned = True
        return verdict

    def _state(self, rank: int, now: float) -> RankState:
        process = _process(Path(self._folder, f"{rank}{PROCESS}"))
        # first whether it lives: the notes of a process that is gone are complete
        gone = process is not None and not alive(process)
        waits = os.path.exists(os.path.join(self._folder, f"{rank}{JOINING}"))
        joined = os.path.exists(os.path.join(self._folder, f"{rank}{JOINED}"))
        over = os.path.exists(os.path.join(self._folder, f"{rank}{OVER}"))
        seen = {"gone": gone, "waiting": waits, "over": over}
        return RankState(process, joined, *(self._seconds(rank, what, holds, now) for what, holds in seen.items()))

    def _seconds(self, rank: int, what: str, holds: bool, now: float) -> float | None:
        """Return how long something has been seen to hold."""
        if not holds:
            self._since.pop((rank, what), None)
            return None
        return now - self._since.setdefault((rank, what), now)


def _process(note: Path) -> int | None:
    try:
        return int(note.read_text())
    except (FileNotFoundError, ValueError):  # not written yet, or only half
        return None
