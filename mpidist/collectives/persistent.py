"""Persistent collectives: bound once, started every step; here is the only copy of what every call does.

MPI has the same idea (`MPI_Allreduce_init`, `MPI_Start`).  A bound object holds the plan, the memory, the algorithm and
the description of one collective.  A call numbers it, compares it with the calls of the other ranks, and moves the
values.  Binding sends nothing: the description is compared at every call, so one rank may drop a bound object and bind
it anew by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mpidist.collectives.call import Call
from mpidist.collectives.handle import Handle
from mpidist.errors import RemoteReplicaError, listed
from mpidist.options import check_timeout
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


#: What `Bound.attempt` returns for arrays that a collective is not for.
UNLIKE = object()


class UnlikeArraysError(ValueError):
    """Arrays were given to a collective that is bound to others."""


class Bound:
    """A collective that is bound to what it moves.

    Calling it is collective: every rank calls it, or starts it, in the same order.

    `call` is the same on all ranks.  `timeout_seconds` is for calls that name none; `key`, `nbytes` and `last_call` are
    for a table of bindings, see `PlanCache`.
    """

    key: Any = None
    nbytes = last_call = 0

    def __init__(self, caller: Communicator, call: Call) -> None:
        self.call = call
        self.timeout_seconds: float | None = None
        self.caller = caller
        self._started = caller.started
        self._handle: _Start | None = None

    def enter(self, arrays: Any) -> None:
        """Have what this collective does come behind what was begun before on arrays in device memory.  Local."""

    def fill(self, arrays: Any) -> bool:
        """Return whether this collective is for such arrays; short ones are put where all ranks see them.  Local."""
        return True

    def move(self, watch: Watch, arrays: Any) -> Any:
        """Move the values within the begun call of `watch`, and return the results."""
        raise NotImplementedError

    def forget(self) -> None:
        """Keep nothing of what was filled in for a call that has failed.  Local."""

    def free_results(self) -> None:
        """Give back the memory that is kept for results of later calls.  Local."""

    def __call__(self, arrays: Any, timeout_seconds: float | None = None) -> Any:
        """Carry the collective out, after those that were started before.

        Returns
        -------
        The results.

        Raises
        ------
        UnlikeArraysError
            The collective is not for such arrays; before any communication.
        CollectiveMismatchError
            On all ranks: names the ranks that differ, the tensor, and both shapes.
        RemoteReplicaError
            The function given to `run` raised on another rank, which therefore does not make this call.
        TransportTimeoutError, RankFailedError
            A rank did not come, and why as far as it is known.
        """
        results = self.attempt(arrays, timeout_seconds)
        if results is UNLIKE:
            raise self.unlike(arrays)
        return results

    def attempt(self, arrays: Any, timeout_seconds: float | None = None) -> Any:
        """Do what a call does; return `UNLIKE`, with nothing done, where the collective is not for such arrays."""
        if self._started.waiting:
            self._started.finish()
        caller = self.caller
        turnstile = caller.turnstile
        turnstile.enter()
        try:
            if self.fill(arrays):
                seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
                results = self.move(caller.begin(self.call, seconds), arrays)
            else:
                results = UNLIKE
        except BaseException as error:
            self.forget()
            turnstile.leave_by(error)
            raise
        turnstile.leave()
        return results

    def start(self, arrays: Any, timeout_seconds: float | None = None) -> Handle:
        """Take the collective's place in the order of calls; it is carried out when its handle is waited for.

        Collective: every rank starts, or calls, its collectives in the same order.  Several bound objects may be under
        way.  Every later collective of this rank first carries out what was started before it.

        Parameters
        ----------
        arrays
            As for a call.  They must not change before `Handle.wait` returns.
        timeout_seconds : float, optional

        Raises
        ------
        RuntimeError
            This bound object is under way.
        """
        if self._handle is not None:
            raise RuntimeError(
                f"{self.caller.control.own_name}: {self.call.what} is under way; "
                "wait() for its handle before the next start, or bind a second one"
            )
        check_timeout(self.timeout_seconds if timeout_seconds is None else timeout_seconds)  # else a later call fails
        self.enter(arrays)  # `Handle.wait` may be called in another stream of the device
        started = self._handle = _Start(self, arrays, timeout_seconds)
        self._started.waiting.append(started)
        return Handle(started.wait, started.warn, lambda: started.is_over)

    def finish(self) -> None:
        """Take note that what was started is over.  Local."""
        self._handle = None

    def unlike(self, arrays: Any) -> UnlikeArraysError:
        """Return the error for arrays that this collective is not for.  Local."""
        each = arrays if isinstance(arrays, (list, tuple)) else [arrays]
        got = listed(f"{getattr(one, 'dtype', type(one).__name__)}{list(getattr(one, 'shape', ()))}" for one in each)
        return UnlikeArraysError(
            f"{self.caller.control.own_name}: {self.call.what} was bound to other arrays; got {got}; bind "
            "another one for such arrays, on all ranks"
        )


class Once(Bound):
    """A collective that is called once.

    ``move(watch)`` moves the values and returns the results; None compares the calls only.  ``show()`` puts what is
    short where all ranks see it, before the call is begun.
    """

    def __init__(
        self,
        caller: Communicator,
        call: Call,
        move: Callable[[Watch], Any] | None = None,
        show: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(caller, call)
        self._move, self._show = move, show

    def fill(self, arrays: Any) -> bool:
        if self._show is not None:
            self._show()
        return True

    def move(self, watch: Watch, arrays: Any) -> Any:
        """Move the values."""
        return None if self._move is None else self._move(watch)


class _Start:
    """A collective that was started, and what came of it."""

    def __init__(self, bound: Bound, arrays: Any, timeout_seconds: float | None) -> None:
        self.bound = bound
        self.arrays = arrays
        self.timeout_seconds = timeout_seconds
        self.results: Any = None
        self.error: BaseException | None = None
        self.is_over = self.is_given_up = False

    def carry_out(self) -> None:
        """Carry it out; its results, or its error, are kept for `Handle.wait`."""
        self.bound.finish()
        try:
            self.results = self.bound(self.arrays, self.timeout_seconds)
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.arrays, self.is_over = None, True

    def wait(self) -> Any:
        """Carry out what was started, up to this one, and return the results.  Collective.

        Errors as for a call of the bound object; RuntimeError where such an error was raised before, by an earlier call
        of this or by the collective that carried this one out.
        """
        caller, what = self.bound.caller, self.bound.call.what
        if not self.is_over:
            caller.started.finish(self)
        # the other ranks know of it as of an error in its call, not as of one in the present step
        if self.error is not None:
            if self.is_given_up:
                raise self.error
            raise RuntimeError(f"{what} failed before: {self.error}") from self.error
        if not self.is_over:
            raise RuntimeError(
                f"{caller.control.own_name}: {what} is being carried out; a signal handler cannot wait for it"
            )
        return self.results

    def warn(self) -> None:
        """Say that nobody waits for it any more, unless it is over."""
        if not self.is_over:
            what = self.bound.call.what
            self.bound.caller.control.warn(
                f"the handle of {what} was dropped before wait(): the next collective finishes it"
            )

    def give_up(self, why: BaseException) -> None:
        """Never carry it out."""
        self.bound.finish()
        self.arrays, self.is_over, self.is_given_up = None, True, True
        self.error = RuntimeError(
            f"{self.bound.call.what} was given up: {type(why).__name__} ended the step in which it was started; start "
            "it again"
        )


class Started:
    """The collectives of a rank that were started and not carried out yet, in order."""

    def __init__(self) -> None:
        self.waiting: deque[_Start] = deque()
        self._is_finishing = False

    def finish(self, last: _Start | None = None) -> None:
        """Carry out what was started, in order, up to `last` or to the end.  Collective."""
        if self._is_finishing:  # none of these carries out the ones behind it
            return
        try:
            self._is_finishing = True
            while self.waiting and (last is None or not last.is_over):
                self.waiting.popleft().carry_out()
        except RemoteReplicaError as error:  # the rank that raised has given up all that it had started
            self.give_up(error)
            raise
        finally:
            self._is_finishing = False

    def give_up(self, why: BaseException) -> None:
        """Carry nothing out of what was started, since the step was ended by an error.  Local."""
        while self.waiting:
            self.waiting.popleft().give_up(why)
