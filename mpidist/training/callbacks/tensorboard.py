"""`TensorBoard`: logs as event files, which TensorBoard shows as curves."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from mpidist.errors import MissingDependencyError
from mpidist.packages import pip_install
from mpidist.training.callbacks.base import Callback, Logs
from mpidist.training.given_path import given_path

_VALIDATION = "val_"


class TensorBoard(Callback):
    """Write the logs to event files, on the chief.  All methods are Local.  Needs tensorboardX.

    Curves have Keras' names: ``epoch_loss`` and so on, in the directories ``train`` and ``validation`` of `log_dir`.

    Parameters
    ----------
    log_dir : str or Path
        All ranks take the chief's.
    update_freq : str or int
        ``"epoch"`` writes at the end of epochs only.  ``"batch"`` writes ``batch_loss`` after every step too; a number
        n does so after every n steps.

    Raises
    ------
    MissingDependencyError
        tensorboardX is not installed.
    ValueError
        `log_dir` is empty.
    """

    def __init__(self, log_dir: str | Path = "logs", update_freq: str | int = "epoch") -> None:
        if importlib.util.find_spec("tensorboardX") is None:
            raise MissingDependencyError(f"event files need tensorboardX: {pip_install('tensorboard')}")
        self.log_dir = given_path(log_dir, "log_dir")
        self._every = _steps(update_freq)
        self._writers: dict[str, Any] = {}

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        step = self.trainer.steps_made
        if self._every and step % self._every == 0:
            self._write("train", "batch_", {"loss": (logs or {})["loss"]}, step)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        logs = {"learning_rate": self.trainer.optimizer.learning_rate, **(logs or {})}
        validation = {name.removeprefix(_VALIDATION): logs.pop(name) for name in list(logs) if _VALIDATION in name[:4]}
        self._write("train", "epoch_", logs, epoch)
        if validation:
            self._write("validation", "epoch_", validation, epoch)

    def on_train_end(self, logs: Logs | None = None) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _write(self, directory: str, prefix: str, logs: Logs, step: int) -> None:
        if not self.trainer.is_chief:
            return
        if directory not in self._writers:
            from tensorboardX import SummaryWriter

            self._writers[directory] = SummaryWriter(str(self.log_dir / directory))
        for name, value in logs.items():
            if not getattr(value, "shape", ()):
                self._writers[directory].add_scalar(f"{prefix}{name}", float(value), step)


def _steps(update_freq: str | int) -> int:
    """Return the number of steps between writes; 0 for never."""
    if update_freq in ("epoch", "batch"):
        return int(update_freq == "batch")
    if not isinstance(update_freq, int) or update_freq < 1:
        raise ValueError(f"update_freq must be 'epoch', 'batch' or a number of steps, got {update_freq!r}")
    return update_freq
