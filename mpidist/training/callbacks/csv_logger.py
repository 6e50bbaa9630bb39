"""`CSVLogger`: the logs of every epoch as a line of a CSV file."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, TextIO

from mpidist.training.callbacks.base import Callback, Logs
from mpidist.training.given_path import given_path


class CSVLogger(Callback):
    """Write the logs of every epoch to a CSV file; the chief does.  All methods are Local.

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
    """

    def __init__(self, filename: str | Path, separator: str = ",", append: bool = False) -> None:
        self.filename = given_path(filename, "filename", is_file=True)
        self.separator = separator
        self.append = append
        self._file: TextIO | None = None
        self._keys: list[str] = []

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Open the file."""
        if not self.trainer.is_chief:
            return
        self._keys = []
        if self.append and self.filename.exists():
            with open(self.filename, newline="") as file:
                self._keys = next(csv.reader(file, delimiter=self.separator), ["epoch"])[1:]
        self._file = open(self.filename, "a" if self.append else "w", newline="")  # noqa: SIM115 - until on_train_end

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Write a line; the first one has the names."""
        if self._file is None:
            return
        logs = logs or {}
        writer = csv.writer(self._file, delimiter=self.separator)
        if not self._keys:
            self._keys = sorted(logs)
            writer.writerow(["epoch", *self._keys])
        # a validation that is not made after every epoch leaves its columns empty
        writer.writerow([epoch, *(_cell(logs.get(key, "")) for key in self._keys)])
        self._file.flush()

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _cell(value: Any) -> Any:
    return f'"[{", ".join(map(str, value))}]"' if getattr(value, "shape", ()) else value
