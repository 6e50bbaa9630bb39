"""Learning rates that change with the epoch, or when a log gets no better.  All ranks take the chief's rate."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

from mpidist.training.callbacks.base import Callback, Logs
from mpidist.training.callbacks.monitor import Monitor, Monitoring

_log = logging.getLogger("mpidist")


class RateOfEpoch(Callback):
    """Sets the learning rate at the beginning of an epoch, and not again where that is resumed in its middle."""

    _epoch = _resumed = -1  # the one whose rate was set last; the one whose rate the checkpoint had

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        is_set, self._epoch, self._resumed = epoch == self._resumed, epoch, -1
        if not is_set:
            self._set_rate(epoch, logs)

    def state(self) -> dict[str, Any]:
        """Return the epoch whose rate is set, for a checkpoint, where the optimizer has the rate.  Local."""
        return {"epoch": self._epoch}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state.  Local."""
        self._epoch = self._resumed = int(state["epoch"])

    def _set_rate(self, epoch: int, logs: Logs | None) -> None:
        raise NotImplementedError(type(self).__name__)


class LearningRateScheduler(RateOfEpoch):
    """Set the learning rate at the beginning of every epoch.

    Collective: `on_epoch_begin` gives all ranks the chief's rate.  A training that is resumed in the middle of an epoch
    has the rate of its checkpoint until the next one.

    Parameters
    ----------
    schedule : callable
        ``schedule(epoch, learning_rate)``, or ``schedule(epoch)``, returns the rate of the epoch.
    verbose : int
        1 logs every change, on the chief.

    Raises
    ------
    TypeError
        When training begins: the optimizer's learning rate is a schedule.
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        self.schedule = schedule
        self.verbose = verbose
        self._takes_rate = _takes_two(schedule)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.trainer.optimizer.require_no_schedule(type(self).__name__)

    def _set_rate(self, epoch: int, logs: Logs | None) -> None:
        optimizer = self.trainer.optimizer
        rate = self.schedule(epoch, optimizer.learning_rate) if self._takes_rate else self.schedule(epoch)
        optimizer.learning_rate = self.trainer.from_chief(float(rate))
        if self.verbose and self.trainer.is_chief:
            _log.info("epoch %d: learning rate %g", epoch, optimizer.learning_rate)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = self.trainer.optimizer.learning_rate


class ReduceLROnPlateau(Monitoring):
    """Reduce the learning rate when a log does not get better any more.

    All methods are Local: all ranks see the same logs.

    Parameters
    ----------
    monitor : str
        A log, such as ``"val_loss"``.
    factor : float
        Multiplies the rate; less than 1.
    patience : int
        The rate is reduced after so many epochs in which the log did not get better.
    mode : str
        ``"min"``, ``"max"``, or ``"auto"``: by the metric, or the name of the log; ValueError when training begins if
        neither tells.
    min_delta : float
        A smaller change counts as none.
    cooldown : int
        Epochs to wait after a reduction.
    min_lr : float
        The rate does not fall below it.

    Raises
    ------
    TypeError
        When training begins: the optimizer's learning rate is a schedule.
    """

    _remembered = ("best", "wait", "cooldown_counter")

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        if not factor < 1:
            raise ValueError(f"factor must be less than 1 to reduce the learning rate, got {factor}")
        self.monitor = Monitor(monitor, mode, min_delta)
        self.factor = factor
        self.patience = patience
        self.cooldown = cooldown
        self.min_lr = min_lr

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.trainer.optimizer.require_no_schedule(type(self).__name__)
        self._look_at_metrics()
        self.best, self.wait, self.cooldown_counter = self.monitor.worst, 0, 0

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if logs is not None:
            logs["learning_rate"] = self.trainer.optimizer.learning_rate
        super().on_epoch_end(epoch, logs)

    def _judge(self, epoch: int, logs: Logs | None) -> None:
        value = self.monitor.value(logs, type(self).__name__)
        if value is None:
            return
        if self.cooldown_counter:
            self.cooldown_counter -= 1
            self.wait = 0
        if self.monitor.is_better(value, self.best):
            self.best, self.wait = value, 0
        elif not self.cooldown_counter:
            self.wait += 1
            optimizer = self.trainer.optimizer
            if self.wait >= self.patience and optimizer.learning_rate > self.min_lr:
                optimizer.learning_rate = max(optimizer.learning_rate * self.factor, self.min_lr)
                self.cooldown_counter, self.wait = self.cooldown, 0


def _takes_two(schedule: Callable[..., float]) -> bool:
    try:
        inspect.signature(schedule).bind(0, 0.0)
    except TypeError:
        return False
    return True
