"""How a rank ends: no rank dies alone, and the traceback of the rank that failed is the last thing printed.

A rank whose program raises posts its traceback on the control channel.  The others, who see it in their next wait, end
quietly; then the failing rank prints, and aborts the job.  Where a failure has no rank that could print it (a killed
rank, a deadline, a mismatch that all ranks raise), the lowest rank that raises prints for all.

Ranks that fail each by an error of its own print one after the other.  What two print at a time, launchers pass on in
pieces, mixed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Collection

from mpidist.errors import MpidistError, RankFailedError, RemoteReplicaError, TransportTimeoutError
from mpidist.output import say
from mpidist.runtime import board as states
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.failures import ENDED, is_consequence, last_line

#: How long a failing rank waits for the others to have printed their last, before it prints and aborts.
_GRACE_SECONDS = 1.0
#: How long a rank that leaves the printing to another waits to be ended, before it speaks and aborts itself.
_PATIENCE_SECONDS = 3.0
#: How long a rank waits between printing and aborting: launchers drop output that they have not passed on.
_PASS_ON_SECONDS = 0.1
#: How often a rank that waits for the end of the job looks whether the processes of the others are alive.
_LOOK_SECONDS = 0.05


class ExitHooks:
    """What a rank does for one world when its process ends; `ProcessHooks` calls it.

    ``abort(exit_code)`` ends all ranks of the job and does not return.  `all_left` begins a farewell and returns a
    callable that tells whether all ranks have begun it; it is needed where ranks of several nodes must go on answering
    questions until nobody can ask any more.  ``skip_finalize()`` lets this process end without finalizing MPI.
    """

    def __init__(
        self,
        control: ControlChannel,
        abort: Callable[[int], object],
        all_left: Callable[[], Callable[[], bool]] | None = None,
        skip_finalize: Callable[[], object] | None = None,
    ) -> None:
        self.control = control
        self._abort = abort
        self._all_left = all_left
        self._skip_finalize = skip_finalize

    # -- an exception that nobody caught ------------------------------------------------------------------------------

    def end_by(self, error: BaseException, text: str) -> None:
        """End the job by an exception of this world, or of this rank's program, with the traceback `text`."""
        if isinstance(error, RankFailedError) and self.control.goes_on:
            self._leave_the_others(text)
        told_elsewhere = self._told_elsewhere(error)
        told = told_elsewhere or getattr(error, "on_all_ranks", False)
        # After a death this rank keeps out of MPI until it has printed: MPICH may crash in it, and take the name along.
        self.control.fail(text, tell=not told and not self.control.failures.dead())
        if not told_elsewhere and self._speaks_for_all(error):
            # All others have printed all they will, but for those that print an error of their own.
            self._wait_until(lambda: self._others_quiet(self._that_speak()), _GRACE_SECONDS)
            self._wait_until(lambda: all(rank >= self.control.rank for rank in self._that_speak()), _GRACE_SECONDS)
        else:
            self.control.end()
            self._wait_until(lambda: False, _PATIENCE_SECONDS)
        self._print_and_abort(text, 130 if isinstance(error, KeyboardInterrupt) else 1)

    def _leave_the_others(self, text: str) -> None:
        """End this process alone: it cannot go on without a rank that was lost, while others can."""
        self.control.fail(text)
        self.control.warn(f"leaves the job, which goes on without it: {last_line(text)}")
        sys.stderr.flush()
        # SIGKILL: after any other exit the launcher, or MPI_Finalize of the others, waits for this process
        os.kill(os.getpid(), signal.SIGKILL)

    def _told_elsewhere(self, error: BaseException) -> bool:
        """Whether this is the consequence of a failure that its own rank prints."""
        control = self.control
        if not isinstance(error, (RankFailedError, RemoteReplicaError)) or error.rank is None:
            return False
        if isinstance(error, RemoteReplicaError):  # which comes before that rank has failed, if its program lets it
            self._wait_until(lambda: self._has_failed(error.rank), _GRACE_SECONDS)
            return self._has_failed(error.rank)
        is_here = error.rank in control.board_ranks
        is_alive = not is_here or control.board.alive(control.board_ranks.index(error.rank))
        return is_alive and self._has_failed(error.rank)

    def _has_failed(self, rank: int) -> bool:
        """Whether the program of `rank` ended by an error, as far as this rank knows."""
        return self.control.failures.state_of(rank)[0] in ENDED

    def _speaks_for_all(self, error: BaseException) -> bool:
        """Whether this rank prints: it alone failed, or it is the lowest rank that raises this error."""
        control = self.control
        on_all_ranks = getattr(error, "on_all_ranks", False)
        common = on_all_ranks or isinstance(error, (RankFailedError, RemoteReplicaError, KeyboardInterrupt))
        self._wait_until(self._others_failed, _GRACE_SECONDS / (4 if common else 10))
        if min(self._raising_the_same(common)) != control.rank:
            return False
        if control.arbiter is None or 0 in control.board_ranks or not on_all_ranks:
            return True
        # Rank 0 raises this too and speaks, unless it is the one that is missing.
        return isinstance(error, TransportTimeoutError) and control.arbiter.verdict is None

    def _raising_the_same(self, common: bool) -> list[int]:
        """Return the ranks, this one among them, known to end by the same error."""
        control = self.control
        texts = {} if common or control.arbiter is None else dict(control.arbiter.failed_texts)
        for index, rank in enumerate(control.board_ranks):
            if control.board.state(index) in ENDED:
                texts[rank] = control.board.text(index)
        mine = last_line(control.board.text(control.board_index))
        return [control.rank] + [rank for rank, text in texts.items() if common or last_line(text) == mine]

    def _others_failed(self) -> bool:
        board = self.control.board
        return all(board.state(index) in ENDED or not board.alive(index) for index in self._others())

    def _others_quiet(self, but_for: Collection[int] = ()) -> bool:
        """Whether the other ranks of the board, but for some, print nothing more."""
        board, ranks = self.control.board, self.control.board_ranks
        return all(
            board.quiet[index] or board.state(index) == states.LEFT or not board.alive(index)
            for index in self._others()
            if ranks[index] not in but_for
        )

    def _that_speak(self) -> set[int]:
        """Return the other ranks that have failed and are not done with printing, as far as this one knows."""
        control, board = self.control, self.control.board
        failed = [index for index in self._others() if board.state(index) in ENDED]
        speaking = {control.board_ranks[index] for index in failed if not board.quiet[index] and board.alive(index)}
        if control.arbiter is not None:  # of the ranks of other nodes that fail by one error, the first one speaks
            known = {last_line(board.text(index)) for index in (control.board_index, *failed)}
            first: dict[str, int] = {}
            for rank, text in sorted(control.arbiter.failed_texts.items()):
                if last_line(text) not in known and not is_consequence(text):
                    first.setdefault(last_line(text), rank)
            speaking.update(set(first.values()) - control.arbiter.have_spoken)
        return speaking

    def _others(self) -> list[int]:
        return [index for index in range(self.control.board.size) if index != self.control.board_index]

    def _wait_until(self, done: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not done() and time.monotonic() < end:
            if self.control.arbiter is not None and not self.control.failures.dead():
                self.control.arbiter.poll()
            time.sleep(0.005)

    def _print_and_abort(self, text: str, code: int) -> None:
        control = self.control
        host = f" on {control.hosts[control.rank]}" if control.hosts else ""
        try:
            say(f"mpidist: {control.own_name} failed{host}\n{text}mpidist: end of rank {control.rank}")
            time.sleep(_PASS_ON_SECONDS)
            control.end()  # whose turn is next prints now
            if control.arbiter is not None and not control.failures.dead():
                control.arbiter.tell("spoken")
            self._wait_until(lambda: not self._that_speak(), _GRACE_SECONDS)
        finally:  # also where nothing can be printed
            self._abort(code)

    # -- the end of the program ---------------------------------------------------------------------------------------

    def end_if_broken(self) -> None:
        """End the job if this world's ranks cannot part in peace.

        After a broken call MPI cannot be finalized: then the way out is abort.
        """
        control = self.control
        if control.broken is not None:
            if control.goes_on:
                self._leave_the_others(str(control.broken))
            control.fail(str(control.broken))
            control.end()
            self._wait_until(self._others_quiet, _GRACE_SECONDS)
            self._abort(1)
        lost = control.failures.vital(control.watch("the end of the program"))
        if lost is not None and control.settings.fault_tolerant:
            self._end_with(lost)

    def leave(self) -> Callable[[], bool]:
        """Say that this rank leaves; return what tells whether its process may end, to be asked until it may."""
        control = self.control
        control.leave()
        if control.settings.fault_tolerant:
            if self._skip_finalize is not None:
                self._skip_finalize()  # it would wait, for ever perhaps, for a rank that dies, or has died
            return lambda: True
        return _Farewell(control, self._all_left(), self._abort) if self._all_left is not None else lambda: True

    def _end_with(self, lost: MpidistError) -> None:
        """End the job, which cannot go on, unless the rank that failed does: it has more to say."""
        control = self.control
        told_elsewhere = self._told_elsewhere(lost)
        control.fail(str(lost))
        control.end()
        if told_elsewhere:
            self._wait_until(lambda: False, _PATIENCE_SECONDS)
        control.warn(f"the job ends, which cannot go on: {lost}")
        self._abort(1)

    def failure_is_known(self) -> bool:
        """Whether some rank has said that it failed: then the launcher ends the others, and further deaths are no news.

        A rank that is about to say that another has died may be ended before it does.
        """
        control = self.control
        if control.arbiter is not None:
            control.arbiter.poll()
            if control.arbiter.failed_texts or control.arbiter.verdict is not None:
                return True
        board = control.board
        ended = [index for index in range(board.size) if board.state(index) in ENDED]
        return any(board.quiet[index] or not is_consequence(board.text(index)) for index in ended)

    def name_dead(self) -> None:
        """Name a killed rank, where this is the lowest rank of its board that can."""
        control = self.control
        dead = control.failures.dead()
        alive = [rank for rank in control.board_ranks if rank not in dead]
        if dead and alive[0] == control.rank:
            control.warn(f"{control.name(dead[0])} died: its process is gone; the job is being ended")


class _Farewell:
    """Answers the questions of other nodes until every rank has left, and has been heard."""

    def __init__(self, control: ControlChannel, all_left: Callable[[], bool], abort: Callable[[int], object]) -> None:
        self._control, self._all_left, self._abort = control, all_left, abort
        self._looked = time.monotonic()

    def __call__(self) -> bool:
        control = self._control
        if self._all_left() and (control.arbiter is None or control.arbiter.heard_all_leave):
            return True
        if control.arbiter is not None:
            control.arbiter.poll()
        dead = []
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            dead, self._looked = control.failures.dead(), time.monotonic()
        if dead:
            control.warn(f"{control.name(dead[0])} died while this rank waited for the end of the job")
            self._abort(1)
        return False
