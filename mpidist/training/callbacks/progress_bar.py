"""`ProgressBar`: how far the training is, on the chief, where somebody watches."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from mpidist.training.callbacks.base import Callback, Logs

#: How often the bar is drawn anew.
_REFRESH_SECONDS = 0.1


class ProgressBar(Callback):
    """A bar with the loss on a terminal, and a line an epoch.  All methods are Local.

    Parameters
    ----------
    verbose : int or str
        0 shows nothing; 1 a bar on a terminal, for which rich must be installed, and lines elsewhere; 2 lines;
        ``"auto"`` is 1 on a terminal and 0 elsewhere.
    """

    def __init__(self, verbose: int | str = "auto") -> None:
        if verbose not in (0, 1, 2, "auto"):
            raise ValueError(f"verbose must be 0, 1, 2 or 'auto', got {verbose!r}")
        self.verbose = verbose
        self._bar: Any = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Find out whether anything is to be shown."""
        watched = self.verbose in (1, "auto") and on_terminal()
        self._lines = self.trainer.is_chief and (self.verbose in (1, 2) or watched)
        self._rich = _rich() if watched and self.trainer.is_chief else None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begin a bar."""
        self._start = self._drawn = time.perf_counter()
        if self._rich is None:
            return
        columns = ("{task.description}", self._rich.BarColumn(), self._rich.MofNCompleteColumn(), "{task.fields[text]}")
        self._bar = self._rich.Progress(*columns, transient=True)
        self._task = self._bar.add_task(self._title(epoch), total=self.params["steps"], text="")
        self._bar.start()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Move the bar, if it is time."""
        if self._bar is None:
            return
        now = time.perf_counter()
        if now - self._drawn >= _REFRESH_SECONDS:
            self._drawn = now
            self._bar.update(self._task, completed=batch + 1, text=_text(logs))

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """End the bar, and print a line."""
        self._end_bar()
        if self._lines:
            seconds = time.perf_counter() - self._start
            print(f"{self._title(epoch)}  {seconds:.1f} s  {_text(logs)}", flush=True)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """End the bar."""
        self._end_bar()

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _title(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self.params['epochs']}"


def on_terminal() -> bool:
    """Return whether somebody watches.  Local.

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
