"""`Position`: how far a training has come, as plain numbers for checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Position:
    """The next step of a training.  All methods are Local."""

    def __init__(self) -> None:
        self.steps_made = self.batch_size = 0
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.step, self.rows, self.loss = epoch, 0, 0, 0.0

    @property
    def is_in_epoch(self) -> bool:
        """Whether a step of this epoch has been made."""
        return bool(self.step or self.rows)

    def advance(self, rows: int, loss: float) -> None:
        """Count a step."""
        self.step += 1
        self.steps_made += 1
        self.rows += rows
        self.loss += loss

    @property
    def mean_loss(self) -> float:
        """The mean loss of this epoch so far, 0 before its first row."""
        return self.loss / self.rows if self.rows else 0.0

    def state(self) -> dict[str, Any]:
        """Return everything as numbers."""
        loss = float.hex(self.loss)  # as text: JSON has no NaN
        counts = {"epoch": self.epoch, "step": self.step, "rows": self.rows, "steps_made": self.steps_made}
        return {**counts, "batch_size": self.batch_size, "loss": loss}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave, but for the batch size."""
        self.epoch, self.step, self.rows = int(state["epoch"]), int(state["step"]), int(state["rows"])
        self.steps_made = int(state["steps_made"])
        self.loss = float.fromhex(state["loss"])
        if self.batch_size and int(state.get("batch_size", 0)) not in (0, self.batch_size):
            self.step = self.rows // self.batch_size
