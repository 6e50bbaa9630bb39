"""`CSVLogger`: the logs of every epoch as a line of a CSV file."""

from __future__ import annotations

import csv
import warnings
from pathlib import Path
from typing import Any, TextIO

from mpidist.training.callbacks.base import Callback, Logs
from mpidist.training.given_path import given_path


class CSVLogger(Callback):
    """Write the logs of every epoch to a CSV file; the chief does.  All methods are Local.

    The first line has the names.  Where `fit` validates, it has those of the validation too, also if that is not made
    after every epoch.  A log that an epoch does not have is written as ``NA``.

    Parameters
    ----------
    filename : str or Path
        Its directory must be there, for the chief.
    separator : str
    append : bool
        Whether to go on with a file that is there, and has its first line already, as after a restart.

    Raises
    ------
    ValueError
        `filename` is empty.

    Warns
    -----
    UserWarning
        A log is left out because the first line does not have its name.
    """

    def __init__(self, filename: str | Path, separator: str = ",", append: bool = False) -> None:
        self.filename = given_path(filename, "filename", is_file=True)
        self.separator = separator
        self.append = append
        self._file: TextIO | None = None
        self._keys: list[str] = []
        self._left_out: set[str] = set()

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if not self.trainer.is_chief:
            return
        self._keys, self._left_out = [], set()
        if self.append and self.filename.exists():
            with open(self.filename, newline="") as file:
                self._keys = next(csv.reader(file, delimiter=self.separator), ["epoch"])[1:]
        self._file = open(self.filename, "a" if self.append else "w", newline="")  # noqa: SIM115 - until on_train_end

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if self._file is None:
            return
        logs = logs or {}
        writer = csv.writer(self._file, delimiter=self.separator)
        if not self._keys:
            validates = self.params.get("validates")  # in whichever epoch
            names = ["loss", *(metric.name for metric in self.trainer.metrics)] if validates else []
            self._keys = sorted({*logs, *(f"val_{name}" for name in names)})
            writer.writerow(["epoch", *self._keys])
        if left_out := sorted({*logs} - {*self._keys} - self._left_out):
            self._left_out.update(left_out)
            missing = f"the first line of {self.filename} does not have them"
            warnings.warn(f"CSVLogger leaves out {left_out}: {missing}", stacklevel=2)
        writer.writerow([epoch, *(_cell(logs.get(key, "NA")) for key in self._keys)])
        self._file.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _cell(value: Any) -> Any:
    return f'"[{", ".join(map(str, value))}]"' if getattr(value, "shape", ()) else value
