"""`Watch`: what a rank looks at in every wait, so that no rank waits forever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpidist.errors import MpidistError

if TYPE_CHECKING:
    from mpidist.runtime.control import ControlChannel

#: Turns of a waiting loop between two looks at the alarm word, and seconds between two looks at clock and processes.
_LOOK_TURNS = 64
_LOOK_SECONDS = 0.05
#: Seconds of waiting after which a rank sleeps between looks instead of spinning, and for how long.
_PATIENCE_SECONDS = 0.1
_NAP_SECONDS = 0.0002


class Watch:
    """One eye on the control channel during the waits of one call.

    `what` is waited for, for messages.  A deadline of None is the default of the settings, 0 never.  `call` is 0 when
    the waits belong to none.
    """

    __slots__ = ("control", "what", "call", "_timeout", "_turns", "_start", "_looked", "_warned")

    def __init__(self, control: ControlChannel, what: str, timeout_seconds: float | None, call: int) -> None:
        self.control = control
        self.what = what
        self.call = call
        self._timeout = timeout_seconds
        self._turns = 0
        self._start = self._looked = 0.0
        self._warned = False

    def tick(self) -> None:
        """Be called in every turn of a waiting loop: look around, let others run, or raise.

        TransportTimeoutError where the deadline has passed, with the ranks that did not come; RankFailedError where a
        rank failed, was killed, or left before it came to this call.
        """
        self._turns += 1
        control = self.control
        if control.pause is not None:
            control.pause()
        if self._turns % _LOOK_TURNS and self._turns != 1:
            return
        if control.board.alarm:
            self._raise(control.failures.first(self))
        now = time.monotonic()
        if self._start == 0.0:
            self._start = self._looked = now
        waited = now - self._start
        if waited > _PATIENCE_SECONDS:
            time.sleep(_NAP_SECONDS)
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look(waited)

    @property
    def timeout_seconds(self) -> float:
        """Seconds until the deadline, counted from the first wait; 0 for never."""
        return self.control.settings.timeout_seconds if self._timeout is None else self._timeout

    def look(self) -> None:
        """Raise, as `tick`, if something is known to be wrong; without waiting.  Local."""
        self._raise(self.control.failures.first(self))

    def _look(self, waited: float) -> None:
        """The slow look: processes, other nodes, warning, deadline."""
        control = self.control
        control.board.set_waiting(control.board_index, self.call)  # before anybody warns: the lowest that waits does
        self._raise(control.failures.killed(self))
        if control.arbiter is not None:
            control.arbiter.poll()
            self._raise(control.arbiter.failure(self))
        self._raise(control.failure_outside(self))
        self._raise(control.standoff(self))
        if 0 < control.settings.warn_seconds < waited and not self._warned:
            self._warned = True
            self._warn(waited)
        if 0 < self.timeout_seconds < waited:
            self._expire(waited)

    def _warn(self, waited: float) -> None:
        """Warn about a long wait: the lowest rank of the board that waits in this call speaks."""
        control, attendance = self.control, self.control.attendance
        stopped = attendance.silent(self.call, waited)  # who has waited before it stopped cannot speak
        lower = [index for index in range(control.board_index) if control.board_ranks[index] not in stopped]
        if self.call and any(control.board.waiting[index] == self.call for index in lower):
            return
        if control.arbiter is not None and control.rank == 0:
            control.arbiter.ask()
        known = attendance.missing(self.call) or attendance.silent(self.call, waited)
        if not known and control.rank != 0:
            return  # whoever is missing is on another node: rank 0, or that node, knows
        names = attendance.awaited(self.call, waited)
        limit = limit_text(self.timeout_seconds)
        control.warn(f"{self.what} (call {self.call}) has waited {waited:.0f} s for {names}; {limit}")

    def _expire(self, waited: float) -> None:
        control = self.control
        if control.arbiter is not None and self.call:
            control.arbiter.decide(self)
            self._raise(control.failures.first(self))
        raise control.expire(control.attendance.deadline_text(self.what, self.call, waited))

    def _raise(self, error: MpidistError | None) -> None:
        if error is not None:
            raise self.control.breaks(error)


def limit_text(timeout_seconds: float | None) -> str:
    """Return how long a wait may last, for a warning."""
    return f"it fails after {timeout_seconds:g} s" if timeout_seconds else "it waits without a limit"


def yield_processor() -> Callable[[], object]:
    """Return the cheapest call that lets other processes run on this core."""
    return getattr(os, "sched_yield", let_threads_run)


def let_threads_run() -> None:
    """Let other threads of this process run."""
    time.sleep(0)
