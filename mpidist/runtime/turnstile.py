"""One collective call at a time, and each one whole: what else may happen to a rank must not put it out of step.

Ranks know where they are by counting calls.  A second thread in the middle of a call, or an exception that breaks one
off (Ctrl-C in a notebook, an alarm, no memory left), would leave this rank in another place than the others, and the
next call would mix values of two.  So threads are turned away, and a call that was broken off ends the channel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from mpidist.errors import CollectiveMismatchError, RemoteReplicaError

if TYPE_CHECKING:
    from mpidist.runtime.control import ControlChannel


class BaseTurnstile:
    """A context manager that enters before a call and leaves after it; the three steps do the same in less time."""

    __slots__ = ()

    #: Leave after a call that raised nothing.
    leave: Callable[[], None]

    def enter(self) -> None:
        """Pass before a call."""
        raise NotImplementedError

    def leave_by(self, error: BaseException) -> None:
        """Leave after a call that raised `error`."""
        raise NotImplementedError

    def __enter__(self) -> None:
        self.enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.leave()
        else:
            self.leave_by(error)


class Turnstile(BaseTurnstile):
    """What every collective call of one rank goes through.

    RuntimeError on entering, when another thread of this rank, or a signal handler, is in the middle of a call.
    TransportTimeoutError, RankFailedError or TransportError on entering, when an earlier call has failed so that the
    ranks no longer agree on where they are.
    """

    __slots__ = ("_control", "_lock", "_acquire", "_call", "leave")

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._lock = threading.Lock()
        self._acquire = self._lock.acquire
        self._call = 0
        #: Leave after a call that raised nothing; one step of the interpreter, so that no signal comes in between.
        self.leave = self._lock.release

    def try_acquire(self) -> bool:
        """Pass without making a call, if nobody is inside; `release` leaves again."""
        return self._lock.acquire(blocking=False)

    def release(self) -> None:
        """Leave after `try_acquire`."""
        self._lock.release()

    def enter(self) -> None:
        """Pass before a call; errors as on entering."""
        control = self._control
        if not self._acquire(False):
            raise RuntimeError(
                f"{control.own_name}: a collective was called while another one is under way, from "
                "another thread or a signal handler. Ranks count their calls: make all of them from one thread"
            )
        if control.broken is not None:
            self._lock.release()
            raise control.again()
        if control.missed.pending:
            self._settle()
        self._call = control.call

    def _settle(self) -> None:
        """Wait until all ranks have come to the calls that this one misses."""
        try:
            self._control.missed.settle()
        except BaseException as error:
            self._lock.release()
            self._control.break_off(error)
            raise

    def leave_by(self, error: BaseException) -> None:
        """Leave after a call that raised `error`."""
        begun = self._control.call != self._call
        self._lock.release()
        self._control.raised = (type(error), str(error))
        # These are raised on all ranks together, with nothing under way: they go on in step.
        in_step = isinstance(error, (CollectiveMismatchError, RemoteReplicaError))
        if begun and not in_step:
            self._control.break_off(error)
