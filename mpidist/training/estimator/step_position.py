"""`StepPosition`: how far a training is, for its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StepPosition:
    """The global step, and the batches that the present call of `train` has read.  All Local.

    `global_step` counts the steps of all calls of `train`; `batches_read` the batches that all replicas together have
    taken in the present call, 0 when it has come to its end; they have `batch_size` rows, 0 where that is not known.
    """

    def __init__(self) -> None:
        self.global_step = self.batches_read = self.batch_size = 0

    def state(self) -> dict[str, int]:
        """Return all numbers."""
        return {name: getattr(self, name) for name in _NUMBERS}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a number is missing in a state."""
        for name in _NUMBERS:
            if name not in state:
                raise ValueError(f"it has no {name!r}: no Estimator has saved it")

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state; errors as for `check`."""
        self.check(state)
        for name in _NUMBERS:
            setattr(self, name, int(state[name]))


_NUMBERS = ("global_step", "batches_read", "batch_size")
