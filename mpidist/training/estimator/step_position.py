"""`StepPosition`: how far a training is, for its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StepPosition:
    """The global step, and the batches that the present call of `train` has read.  All Local.

    Attributes
    ----------
    global_step : int
        Steps made, in all calls of `train` together.
    batches_read : int
        Batches that all replicas together have taken in the present call; 0 when it has come to its end.
    """

    def __init__(self) -> None:
        self.global_step = self.batches_read = 0

    def state(self) -> dict[str, int]:
        """Return both numbers."""
        return {"global_step": self.global_step, "batches_read": self.batches_read}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a state has not both numbers."""
        for name in ("global_step", "batches_read"):
            if name not in state:
                raise ValueError(f"it has no {name!r}: no Estimator has saved it")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state; errors as for `check`."""
        self.check(state)
        self.global_step, self.batches_read = int(state["global_step"]), int(state["batches_read"])
