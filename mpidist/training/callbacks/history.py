"""`History`: the logs that `fit` returns."""

from __future__ import annotations

from typing import Any

from mpidist.training.callbacks.base import Callback, Logs


class History(Callback):
    """The logs of all epochs.  All methods are Local.

    Attributes
    ----------
    epoch : list of int
        The epochs trained, from 0.
    history : dict of str to list
        For each log its value in each of them.
    """

    def __init__(self) -> None:
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)

    def __repr__(self) -> str:
        return f"<History of epochs {self.epoch}: {self.history}>"
