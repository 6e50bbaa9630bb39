"""`ProgressBar`: the progress of a training, in lines and as a bar on a terminal; on the chief."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

from mpidist.training.callbacks.base import Callback, Logs

#: The time between two drawings of the bar.
_REFRESH_SECONDS = 0.1


class ProgressBar(Callback):
    """A line for every epoch, evaluation and prediction, and a bar on a terminal while they last.

    The chief shows them, as Keras does.  A validation is part of its epoch's line.  The bar has the time left, rows a
    second of all ranks, the mean loss so far, and the slow replica of the epoch before.  All methods are Local.

    Parameters
    ----------
    verbose : int or str
        0 shows nothing.  1 or ``"auto"`` shows lines, and a bar on a terminal; the bar needs the package rich.  2 shows
        lines only.
    """

    def __init__(self, verbose: int | str = "auto") -> None:
        if verbose not in (0, 1, 2, "auto"):
            raise ValueError(f"verbose must be 0, 1, 2 or 'auto', got {verbose!r}")
        self.verbose = verbose
        self._bar: Any = None

    def on_train_end(self, logs: Logs | None = None) -> None:
        self._end_bar()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self._begin(f"epoch {epoch + 1}/{self.params['epochs']}", self.params["epochs"] - epoch - 1)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self._move(batch, logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._end(logs)

    def on_test_begin(self, logs: Logs | None = None) -> None:
        if not self._in_fit:
            self._begin("evaluate")

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        if not self._in_fit:
            self._move(batch, logs)

    def on_test_end(self, logs: Logs | None = None) -> None:
        if not self._in_fit:
            self._end(logs)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        self._begin("predict")

    on_predict_batch_end = on_train_batch_end

    def on_predict_end(self, logs: Logs | None = None) -> None:
        self._end(logs)

    @property
    def _in_fit(self) -> bool:
        """Whether `fit` runs, so that an evaluation is a validation."""
        return "validates" in self.params

    def _begin(self, title: str, epochs_after: int = 0) -> None:
        self._title, self._epochs_after = title, epochs_after
        self._start = self._drawn = time.perf_counter()
        self._steps = 0  # since then: an epoch that is resumed begins in its middle
        self._rows_before = self.trainer.rows_of_epoch
        rich = _rich() if self.trainer.is_chief and self.verbose in (1, "auto") and on_terminal() else None
        if rich is None:
            return
        columns = ("{task.description}", rich.BarColumn(), rich.MofNCompleteColumn(), "{task.fields[text]}")
        self._bar = rich.Progress(*columns, transient=True)
        self._task = self._bar.add_task(title, total=self.params["steps"], text="")
        self._bar.start()

    def _move(self, batch: int, logs: Logs | None) -> None:
        if self._bar is None:
            return
        now = time.perf_counter()
        self._steps += 1
        if now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = now
            text = "  ".join(filter(None, (self._left(batch, now), self._rate(now), _text(logs), self._slow_replica())))
            self._bar.update(self._task, completed=batch + 1, text=text)

    def _left(self, batch: int, now: float) -> str:
        """Return the time that is left at the pace of this epoch; empty where its steps are not known."""
        steps = self.params["steps"]
        if not steps:
            return ""
        left = steps - batch - 1 + steps * self._epochs_after
        return f"{timedelta(seconds=round((now - self._start) / self._steps * left))} left"

    def _rate(self, now: float) -> str:
        rows = self.trainer.rows_of_epoch - self._rows_before
        return f"{rows / (now - self._start):.0f} rows/s" if rows else ""

    def _slow_replica(self) -> str:
        slow = self.trainer.slow_replica if self._in_fit else None
        return f"replica {slow.replica} is slow: {slow.times:.1f} times the others" if slow else ""

    def _end(self, logs: Logs | None) -> None:
        self._end_bar()
        if self.trainer.is_chief and self.verbose:
            seconds = time.perf_counter() - self._start
            print(f"{self._title}  {seconds:.1f} s  {_text(logs)}".rstrip(), flush=True)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def on_terminal() -> bool:
    """Return whether the output is a terminal.  Local.

    Open MPI gives every rank a terminal of its own; what counts there is where its launcher writes to.
    """
    if not sys.stdout.isatty() or "OMPI_COMM_WORLD_RANK" not in os.environ:
        return sys.stdout.isatty()
    try:
        return os.readlink(f"/proc/{os.getppid()}/fd/1").startswith(("/dev/pts/", "/dev/tty"))
    except OSError:
        return False


def _rich() -> Any:
    try:
        import rich.progress
    except ImportError:
        return None
    return rich.progress


def _text(logs: Logs | None) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in (logs or {}).items() if not getattr(value, "shape", ()))
