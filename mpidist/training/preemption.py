"""`PreemptionCheckpointHandler`: a job that is told to end saves what it has, on all ranks at the same step, and exits.

Ranks agree on that step without a collective of their own.  Say a rank is told to end before step k.  Before it begins
step k, it asks all ranks to stop before step k + 1.  All ranks of a node see this on the status board.  No rank comes
to step k + 1 before it has met the asking rank in step k.  Where steps have no collective, ranks may be further apart:
then those behind catch up with the one in front, before all save.  Between nodes one number is reduced along with every
step.  This reduction begins before the step, and is waited for before the next one.

A batch system may send another signal while ranks save, and a launcher may end all ranks by SIGTERM as soon as the
first one has left with a status that is not 0.  So from the last save on all ranks ignore the signals, and they meet
after it.  Only then they exit.  The chief leaves a file beside the checkpoints
before that, which says to a batch script what the status says: queue this job again.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy

from mpidist import own_process
from mpidist.cluster.join_notes import noting_exit
from mpidist.cluster.launchers import detect_launcher
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.collectives.communicator import Communicator
from mpidist.context import T
from mpidist.training.checkpoint import CHIEF, Checkpoint
from mpidist.training.checkpoint_manager import CheckpointManager
from mpidist.training.given_path import given_path
from mpidist.world import world_communicator

_log = logging.getLogger("mpidist")

#: The name of the handler in a checkpoint.
_PART = "preemption_checkpoint_handler"
#: The end of the program waits so long for the reduction of a step that never came.
_SETTLE_SECONDS = 1.0
#: A step that nobody comes to.
_NEVER = (1 << 63) - 1
#: The file beside the checkpoints of a job that has saved, and is to be queued again.
MARKER = "requeue"
#: What a launcher, or a batch system, ends ranks by.
_END = "SIGTERM"


class TerminationConfig:
    """When a job is to end, and how.  Local.

    Parameters
    ----------
    termination_watcher_fn : callable, optional
        Returns whether this rank is to end.  It is called before a step, once a second at most.  With it, no signals
        are watched.
    exit_fn : callable, optional
        Ends the program, on every rank.  Default: ``sys.exit(exit_code)``.
    grace_period : float, optional
        Seconds from the notice to the end.  A checkpoint is saved at once, the training goes on, and another checkpoint
        is saved shortly before the end.  With 0 or None the handler saves and exits at once.
    save_fn : callable, optional
        Saves, in place of the manager's `save`; every rank calls it.
    signals : sequence of str
        Signals that are notices.
    exit_code : int
        Not 0, so that a launcher or script can tell that the job is not finished.  A launcher can report another one:
        the file ``requeue`` beside the checkpoints tells it too.
    poll_seconds : float
        How often `termination_watcher_fn` is asked at most.
    """

    def __init__(
        self,
        termination_watcher_fn: Callable[[], Any] | None = None,
        exit_fn: Callable[[], Any] | None = None,
        grace_period: float | None = None,
        save_fn: Callable[[], Any] | None = None,
        *,
        signals: Sequence[str] = ("SIGTERM", "SIGUSR1"),
        exit_code: int = 42,
        poll_seconds: float = 1.0,
    ) -> None:
        if grace_period is not None and not grace_period >= 0:
            raise ValueError(f"grace_period must be 0 seconds or more, got {grace_period}")
        unknown = [name for name in signals if not isinstance(getattr(signal, name, None), signal.Signals)]
        if unknown:
            raise ValueError(f"unknown signals {unknown}; known are {[each.name for each in signal.Signals]}")
        self.termination_watcher_fn = termination_watcher_fn
        self.exit_fn = exit_fn if exit_fn is not None else lambda: sys.exit(exit_code)
        self.grace_period = grace_period or 0.0
        self.save_fn = save_fn
        self.signals = tuple(signals)
        self.poll_seconds = poll_seconds


class PreemptionCheckpointHandler:
    """Saves a checkpoint when the job is told to end, on all ranks at the same step, and exits.

    Collective: every rank makes it in the same order, in its main thread.  It restores the newest whole checkpoint.

    Before the exit, the chief writes the file ``requeue`` beside the checkpoints, for a batch script.  The next handler
    of the directory removes it.  From the last save on, SIGTERM and the signals that are notices are ignored, since a
    launcher ends ranks by SIGTERM when the first one exits.  `close` puts the handlers of signals back.

    Parameters
    ----------
    cluster_resolver : ClusterResolver or None
        Only asked whether there are parameter servers.
    checkpoint_or_manager : Checkpoint or CheckpointManager
        The handler becomes a part of the checkpoint.
    checkpoint_dir : str or Path, optional
        Needed with a `Checkpoint`; the newest is kept there.
    termination_config : TerminationConfig, optional

    Attributes
    ----------
    total_run_calls : int
        Calls of `run`, before and after the checkpoint that was restored: how far a loop has come.
    restored : Path or None
        The checkpoint that was restored; None if there was none.

    Raises
    ------
    NotImplementedError
        The cluster has parameter servers.
    TypeError
        It was given neither a Checkpoint nor a CheckpointManager.
    ValueError
        A Checkpoint without a directory, or with an empty one.
    CheckpointError
        On all ranks: as for `CheckpointManager.restore_or_initialize`.

    Examples
    --------
    ::

        handler = mpidist.experimental.PreemptionCheckpointHandler(None, checkpoint, "run")
        while handler.total_run_calls < steps:
            handler.run(train_step)
    """

    #: A checkpoint that was saved without a handler restores too.
    may_be_missing = True
    #: Returns the number of steps made, for loops that do not use `run`.  A checkpoint gets it as its number.
    steps_fn: Callable[[], int] | None = None

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | Path | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        _refuse_servers(cluster_resolver)
        self._manager = _manager(checkpoint_or_manager, checkpoint_dir)
        self._config = TerminationConfig() if termination_config is None else termination_config
        self._manager.checkpoint.include(_PART, self)
        self.total_run_calls = 0
        self._marker = self._manager.directory / MARKER
        self._communicator = world_communicator()
        self._is_chief = self._communicator.rank == CHIEF
        self._vote = _StopVote(self._communicator)
        own_process.at_exit(self._vote.settle)
        self._noticed_at: float | None = None
        self._polled_at = -numpy.inf
        self._began_at: float | None = None
        self._longest_seconds = 0.0
        self._is_last = self._config.grace_period == 0
        self._is_over = False
        self._handlers: dict[int, own_process.Handler] = {}
        self._watch_signals()
        self.restored = self._manager.restore_or_initialize()
        self._remove_marker()

    def run(self, distributed_train_function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function that makes a step, and return its result.  If ranks have agreed to end, save and exit first.

        Collective: every rank calls it the same number of times.
        """
        self.save_checkpoint_if_preempted()
        result = distributed_train_function(*args, **kwargs)
        self.total_run_calls += 1
        return result

    def save_checkpoint_if_preempted(self) -> None:
        """Save and exit if the ranks have agreed to end before this step.  For loops that do not use `run`.

        Collective: every rank calls it before every step.
        """
        self._measure_step()
        if self._vote.stops_here(self._wants_to_stop()):
            self._save()

    def close(self) -> None:
        """Restore the signal handlers there were before.  Local."""
        for handler in self._handlers.values():
            handler.close()
        self._handlers = {}
        self._vote.settle()

    # -- as a part of the checkpoint ----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return ``total_run_calls``.  Local."""
        return {"total_run_calls": self.total_run_calls}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state.  Local."""
        self.total_run_calls = int(state["total_run_calls"])

    # -- notices ------------------------------------------------------------------------------------------------------

    def _watch_signals(self) -> None:
        if self._config.termination_watcher_fn is not None:
            return
        if threading.current_thread() is not threading.main_thread():
            _log.warning("no signals are watched from a thread that is not the main one; use termination_watcher_fn")
            return
        for name in self._config.signals:
            self._watch(signal.Signals[name])

    def _watch(self, number: signal.Signals) -> own_process.Handler:
        """Return this rank's handler of a signal, put in place if there is none."""
        if number not in self._handlers:
            self._handlers[number] = own_process.Handler(number, self._on_signal)
        return self._handlers[number]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        handler = self._handlers.get(number)
        if handler is not None and callable(handler.previous) and self._communicator.control.failures.dead():
            # a launcher ends a job in which a rank has died: nothing can be agreed on
            handler.pass_on(number, frame)
        elif self._noticed_at is None:
            self._noticed_at = time.monotonic()

    def _wants_to_stop(self) -> bool:
        """Return whether this rank knows a reason to stop soon."""
        self._poll()
        if self._noticed_at is None or self._is_over:
            return False
        if not self._is_last or self._config.grace_period == 0:
            return True
        left = self._config.grace_period - (time.monotonic() - self._noticed_at)
        return left < 3 * self._longest_seconds

    def _poll(self) -> None:
        watcher = self._config.termination_watcher_fn
        if watcher is None or self._noticed_at is not None:
            return
        now = time.monotonic()
        if now - self._polled_at >= self._config.poll_seconds:
            self._polled_at = now
            if watcher():
                self._noticed_at = now

    def _measure_step(self) -> None:
        """Remember the longest step or save: the last save must begin early enough."""
        now = time.monotonic()
        if self._began_at is not None:
            self._longest_seconds = max(self._longest_seconds, now - self._began_at)
        self._began_at = now

    # -- the end ------------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Save, on all ranks; then exit, or go on until the grace period is nearly over."""
        if self._noticed_at is None:
            self._noticed_at = time.monotonic()
        is_last, self._is_last = self._is_last, True
        if self._is_chief:  # where no line follows that says "saved", the time was too short
            _log.warning("the job was told to end: it saves after %s", self._steps_text())
        self._save_undisturbed() if is_last else self._save_once()
        self._measure_step()
        if self._is_chief:
            then = "exits" if is_last else f"goes on for what is left of {self._config.grace_period:g} s"
            _log.warning("the job was told to end: saved after %s; it %s", self._steps_text(), then)
        if is_last:
            self._is_over = True  # an `exit_fn` may come back
            self._exit()

    def _save_undisturbed(self) -> None:
        """Save, and ignore further signals from here to the end; where the save fails, they end the program again."""
        self._ignore_signals()
        try:
            self._save_once()
        except BaseException:
            self.close()
            raise

    def _save_once(self) -> None:
        """Save, under the number of steps where that is known: so are all other checkpoints of such a loop."""
        if self._config.save_fn is not None:
            self._config.save_fn()
        else:
            self._manager.save(None if self.steps_fn is None else self.steps_fn())

    def _exit(self) -> None:
        """Exit with all ranks; nobody leaves before all of them have saved, and ignore what launchers end ranks by."""
        self._write_marker()
        self._communicator.exchange(b"", what="preemption")
        with suppress(AttributeError, OSError, ValueError):
            sys.stdout.flush()
        with noting_exit(detect_launcher()):
            self._config.exit_fn()
        self.close()

    def _ignore_signals(self) -> None:
        """Ignore the signals that are notices, and those that launchers end ranks by, from here to the end."""
        if threading.current_thread() is threading.main_thread():
            for name in {_END, *self._config.signals}:
                self._watch(signal.Signals[name]).ignore()

    def _write_marker(self) -> None:
        """Tell a batch script, on the chief, to queue the job again; without it there is still the exit status."""
        if self._is_chief:
            try:
                self._manager.directory.mkdir(parents=True, exist_ok=True)
                self._marker.write_text(f"saved after {self._steps_text()}\n")
            except OSError as error:
                _log.warning("%s cannot be written: %s", self._marker, error)

    def _remove_marker(self) -> None:
        """Take back, on the chief, what the job before this one has told: this one has not saved yet."""
        if self._is_chief:
            try:
                self._marker.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("%s is of an earlier job, and cannot be removed: %s", self._marker, error)

    def _steps_text(self) -> str:
        """Return the number of steps made, for a message."""
        if self.steps_fn is not None:
            return f"{self.steps_fn()} steps"
        if self.total_run_calls:
            return f"{self.total_run_calls} steps"
        return f"{self._vote.step - 1} steps of this run"  # the vote is in front of a step


class _StopVote:
    """Finds the step in front of which all ranks stop."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.step = 0
        self._done = 0
        self._agreed = 0
        # in worlds of several boards: (buffer, what is to be waited for), of the reduction begun one step before
        self._pending: tuple[numpy.ndarray, Any] | None = None
        control = communicator.control
        control.board.requests[control.board_index] = 0  # a vote before this one may have left its step

    def stops_here(self, wants: bool) -> bool:
        """Return whether all ranks stop in front of this step.  Collective where they do, and between nodes."""
        self.step += 1
        if self._communicator.control.arbiter is None:
            return self._by_board(wants)
        return self._by_reduction(wants)

    def _by_board(self, wants: bool) -> bool:
        board, line = self._communicator.control.board, self._communicator.control.board_index
        if self._agreed == 0:
            asked = min((step for step in board.requests if step > self._done), default=_NEVER)
            if asked > self.step:
                if wants and asked == _NEVER:
                    board.requests[line] = self.step + 1
                return False
            steps = self._communicator.exchange(str(self.step).encode(), what="preemption")
            self._agreed = max(int(step) for step in steps)
        if self.step < self._agreed:
            return False
        self._done, self._agreed = self.step, 0
        return True

    def _by_reduction(self, wants: bool) -> bool:
        transport, control = self._communicator.transport, self._communicator.control
        if self._pending is not None:
            buffer, pending = self._pending
            with self._communicator.turnstile:
                transport.wait([pending], control.watch("preemption"))
            self._pending = None
            if int(buffer[0]) <= self.step:
                return True
        buffer = numpy.array([self.step + 1 if wants else _NEVER], "int64")
        with self._communicator.turnstile:
            self._pending = buffer, transport.native["all_reduce"](buffer, "min")
        return False

    def settle(self) -> None:
        """Wait a short time for the reduction under way.  Local."""
        transport, end = self._communicator.transport, time.monotonic() + _SETTLE_SECONDS
        while self._pending is not None and not self._communicator.control.broken and time.monotonic() < end:
            if transport.poll([self._pending[1]]):
                self._pending = None


def _refuse_servers(cluster_resolver: Any) -> None:
    spec = cluster_resolver.cluster_spec() if cluster_resolver is not None else None
    if spec and "ps" in spec.jobs:
        raise NotImplementedError(
            "PreemptionCheckpointHandler does not support parameter servers: workers there have no step in common; "
            "save from the coordinator"
        )


def _manager(checkpoint_or_manager: Any, directory: str | Path | None) -> CheckpointManager:
    if isinstance(checkpoint_or_manager, CheckpointManager):
        return checkpoint_or_manager
    if not isinstance(checkpoint_or_manager, Checkpoint):
        raise TypeError(
            "checkpoint_or_manager must be a Checkpoint or a CheckpointManager, got "
            f"{type(checkpoint_or_manager).__name__}"
        )
    if directory is None:
        raise ValueError("a PreemptionCheckpointHandler with a Checkpoint needs checkpoint_dir, where to save it")
    return CheckpointManager(checkpoint_or_manager, given_path(directory, "checkpoint_dir"), max_to_keep=1)
