"""`TrainingState`: the position, metrics and callbacks of a training, for its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mpidist.training.checkpoint import state_in
from mpidist.training.metrics import Metric


class TrainingPosition:
    """The next step of a training: its epoch, its number in the epoch, the rows so far, and the sum of their losses.

    All methods are Local.
    """

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
        """Take over a state, but for its batch size."""
        self.epoch, self.step, self.rows = int(state["epoch"]), int(state["step"]), int(state["rows"])
        self.steps_made = int(state["steps_made"])
        self.loss = float.fromhex(state["loss"])
        if self.batch_size and int(state.get("batch_size", 0)) not in (0, self.batch_size):
            self.step = self.rows // self.batch_size  # as if all batches had been of this size


class TrainingState:
    """Position, metrics of the present epoch, and states of callbacks, as one object of a `Checkpoint`."""

    def __init__(self, position: TrainingPosition, metrics: Sequence[Metric], callbacks: Sequence[Any]) -> None:
        self._position = position
        self._parts: dict[str, Any] = {f"metrics/{metric.name}": metric for metric in metrics}
        for callback in callbacks:
            if hasattr(callback, "state") and hasattr(callback, "restore"):
                name = f"callbacks/{type(callback).__name__}"
                same = sum(key.startswith(name) for key in self._parts)
                self._parts[f"{name}_{same}" if same else name] = callback

    def state(self) -> dict[str, Any]:
        """Return arrays and numbers by name."""
        found = self._position.state()
        for name, part in self._parts.items():
            found.update({f"{name}/{key}": value for key, value in part.state().items()})
        return found

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise the error of a metric, a callback or the position that the state does not fit.  Local."""
        TrainingPosition().restore(state)
        for part, own in self._states(state):
            if hasattr(part, "check"):
                part.check(own)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state; a metric or callback that it does not have stays as it is.  Local."""
        # what could not be checked may still raise, and comes first
        for part, own in sorted(self._states(state), key=lambda item: hasattr(item[0], "check")):
            part.restore(own)
        self._position.restore(state)

    def _states(self, state: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield each metric and callback of which the state has anything, with that."""
        for name, part in self._parts.items():
            if own := state_in(state, name):
                yield part, own
