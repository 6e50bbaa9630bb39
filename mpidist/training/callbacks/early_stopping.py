"""`EarlyStopping` and `TerminateOnNaN`: end a training that gets no better, or whose loss is no number any more."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy

from mpidist import arrays
from mpidist.options import VariableSynchronization
from mpidist.strategies import workers
from mpidist.training.callbacks.base import Callback, Logs
from mpidist.training.callbacks.monitor import Monitor, Monitoring
from mpidist.variables import DistributedVariable

_log = logging.getLogger("mpidist")

#: In a state, the names of the variables of which it has the best values.
_NAMES = "best_variables_of"


class EarlyStopping(Monitoring):
    """End a training when a log does not get better any more.  All ranks see the same logs.

    Methods are Local unless they say otherwise; with parameter servers, collective among the ranks of a worker.  With
    `restore_best_weights` the end of a training is Collective: CollectiveMismatchError where ranks have other logs.

    Parameters
    ----------
    monitor : str
        A log, such as ``"val_loss"``.
    min_delta : float
        A smaller change counts as none.
    patience : int
        The training ends after so many epochs in which the log did not get better.
    mode : str
        ``"min"``, ``"max"``, or ``"auto"``: by the metric, or the name of the log; ValueError when training begins if
        neither tells.
    baseline : float, optional
        A value that the log must get better than.
    restore_best_weights : bool
        Whether to go back to the variables of the best epoch at the end.  Checkpoints of the training hold them too, so
        that a training that was resumed goes back to them.  With parameter servers, where workers train by themselves,
        the first worker puts back the variables of its best epoch when the training of all has ended.
    start_from_epoch : int
        Earlier epochs do not count.

    Attributes
    ----------
    best : float
    best_epoch : int
    stopped_epoch : int
        0 unless it has ended the training.
    """

    _remembered = ("best", "best_epoch", "wait")

    def __init__(
        self,
        monitor: str = "val_loss",
        min_delta: float = 0,
        patience: int = 0,
        mode: str = "auto",
        baseline: float | None = None,
        restore_best_weights: bool = False,
        start_from_epoch: int = 0,
    ) -> None:
        self.monitor = Monitor(monitor, mode, min_delta)
        self.patience = patience
        self.baseline = baseline
        self.restore_best_weights = restore_best_weights
        self.start_from_epoch = start_from_epoch

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self._look_at_metrics()
        self.best, self.best_epoch, self.stopped_epoch = self.monitor.worst, 0, 0
        self.wait = 0
        self._best_copies: list[Any] | None = None
        self._are_saved = False  # whether the copies are as a checkpoint holds them

    def _judge(self, epoch: int, logs: Logs | None) -> None:
        value = self.monitor.value(logs, type(self).__name__)
        if value is None or epoch < self.start_from_epoch:
            return
        if self.restore_best_weights and self._best_copies is None:
            self._keep(epoch)
        self.wait += 1
        if self.monitor.is_better(value, self.best):
            self.best = value
            self._keep(epoch)
            if self.baseline is None or self.monitor.is_better(value, self.baseline):
                self.wait = 0
        elif self.wait >= self.patience and epoch > 0:
            self.stopped_epoch = epoch
            self.trainer.stop_training = True

    def on_train_end(self, logs: Logs | None = None) -> None:
        super().on_train_end(logs)
        if self.stopped_epoch and self.trainer.is_chief:
            _log.info("EarlyStopping: ended after epoch %d; the best was epoch %d", self.stopped_epoch, self.best_epoch)
        if self.restore_best_weights:
            if self.trainer.variables[0].is_here:
                # ranks with other logs, such as one that the chief alone has, would go back to other variables
                epoch = None if self._best_copies is None else self.best_epoch
                self.trainer.require_same_settings(**{"best epoch": epoch})
                self._put_back()
            else:
                # when the others have made their last steps, however long they train
                workers.of_job().by_first_worker(self._put_back, timeout_seconds=0)

    def _put_back(self) -> None:
        """Set the variables to the best ones, if there are any; those on servers, in the first worker only."""
        if self._best_copies is None:
            return
        for variable, copy in zip(self.trainer.variables, self._best_copies, strict=True):
            if self._are_saved or not variable.is_here:
                variable.restore(copy)
            else:
                _put_back(variable, copy)

    def state(self) -> dict[str, Any]:
        """Return the numbers for a checkpoint, and the best variables if they are to be restored.

        Collective with `restore_best_weights`: every rank calls it in the same order.
        """
        entries, copies = super().state(), self._best_copies
        if copies is None:
            return entries
        variables = self.trainer.variables
        if not self._are_saved:
            copies = [_saved(variable, copy) for variable, copy in zip(variables, copies, strict=True)]
        entries[_NAMES] = [variable.name for variable in variables]
        return {**entries, **{_key(number): copy for number, copy in enumerate(copies)}}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if the best variables of a state are not those of the trainer.  Local."""
        names, variables = state.get(_NAMES), self.trainer.variables
        if names is None or not self.restore_best_weights:
            return
        saved = [numpy.shape(state[_key(number)]) for number in range(len(names))]
        expected = [variable.saved_shape for variable in variables]
        if saved != expected:
            raise ValueError(f"the best variables were saved with the shapes {saved}, expected {expected}")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state.  Local."""
        self.check(state)
        super().restore(state)

    def _take_over(self, state: Mapping[str, Any]) -> None:
        super()._take_over(state)
        if not self.restore_best_weights:
            return
        if _NAMES in state:  # also where none was better than the first, whose loss was no number
            self._best_copies, self._are_saved = [state[_key(number)] for number in range(len(state[_NAMES]))], True
            return
        if self.best == self.monitor.worst:
            return
        warnings.warn(
            f"the checkpoint does not have the variables of epoch {self.best_epoch}, the best so far; EarlyStopping "
            "goes back to the best of the epochs from now on",
            RuntimeWarning,
            stacklevel=4,
        )
        self.best = self.monitor.worst

    def _keep(self, epoch: int) -> None:
        self.best_epoch = epoch
        if self.restore_best_weights:
            self.trainer.strategy.extended.pull()
            self._best_copies = [_copy(variable) for variable in self.trainer.variables]
            self._are_saved = False


def _key(number: int) -> str:
    """Return the name of a best variable in a state."""
    return f"best_variables/{number}"


def _copy(variable: DistributedVariable) -> Any:
    """Return a copy of this rank's value of a variable, or of the value that it last pulled from servers."""
    held = variable.live
    return arrays.namespace(held).array(held)


def _put_back(variable: DistributedVariable, copy: Any) -> None:
    """Set a variable that is here to its copy."""
    variable.storage[...] = copy
    variable.note_change()


def _saved(variable: DistributedVariable, copy: Any) -> Any:
    """Return what a checkpoint would hold of a variable if it had the value of its copy.  Collective."""
    if not variable.is_here:
        return copy
    if variable.synchronization is not VariableSynchronization.ON_READ:
        return variable.joined(copy)
    now = _copy(variable)
    _put_back(variable, copy)
    saved = numpy.array(variable.saved_value())
    _put_back(variable, now)
    return saved


class TerminateOnNaN(Callback):
    """End the training after the step in which the loss is NaN or infinite on any rank.

    Local: the loss of a step is that of all ranks.  Collective once, when the training ends: the chief logs the ranks.
    """

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if math.isfinite(loss):
            return
        trainer = self.trainer
        ranks = [rank for rank, own in enumerate(trainer.each_rank(trainer.last_loss)) if not math.isfinite(own)]
        if trainer.is_chief:
            where = f"on ranks {ranks}" if ranks else "in the sum over the ranks"
            _log.warning("the loss is %s in step %d of epoch %d, %s: training ends", loss, batch, trainer.epoch, where)
        trainer.stop_now()
