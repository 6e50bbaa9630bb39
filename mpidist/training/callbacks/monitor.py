"""`Monitor`: a log, and which of two values of it is better."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from mpidist.training.callbacks.base import Callback, Logs
from mpidist.training.metrics import Metric

#: Logs whose names end so are to grow, or to fall, if no metric says.
_GROWING = ("acc", "accuracy", "auc", "precision", "recall")
_FALLING = ("loss", "error", "mse", "mae", "rmse", "entropy", "perplexity", "divergence", "distance")
_MODES = ("auto", "min", "max")


class Monitor:
    """A log, whether it is to fall or to grow, and by how much it must change to count as better.  Local."""

    def __init__(self, name: str, mode: str = "auto", min_delta: float = 0.0) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)}; got {mode!r}")
        self.name, self._mode = name, mode
        self._grows = mode == "max" or (mode == "auto" and name.endswith(_GROWING))
        self._min_delta = abs(min_delta)

    def look_at(self, metrics: Sequence[Metric], asked: str) -> None:
        """Find out whether the log is to fall or to grow; ValueError, which names who `asked`, where nothing tells."""
        if self._mode != "auto":
            return
        of_metric = next((each.grows for each in metrics if each.name == self.name.removeprefix("val_")), None)
        if of_metric is not None:
            self._grows = of_metric
        elif not self.name.endswith((*_GROWING, *_FALLING)):
            raise ValueError(
                f"{asked} monitors {self.name!r}, and nothing tells whether it is to grow or to fall; give mode='max' "
                "or mode='min'"
            )

    def __str__(self) -> str:
        return f"{self.name!r}, which is to {'grow' if self._grows else 'fall'}"

    @property
    def worst(self) -> float:
        """The value that every other one is better than."""
        return -math.inf if self._grows else math.inf

    def is_better(self, value: float, than: float) -> bool:
        """Return whether a value is better than another by `min_delta`; NaN never is."""
        return value - self._min_delta > than if self._grows else value + self._min_delta < than

    def value(self, logs: Logs | None, asked: str) -> float | None:
        """Return the value in the logs; None, with a warning that names who `asked`, where there is none."""
        value = (logs or {}).get(self.name)
        if value is None:
            known = ", ".join(logs or {})
            warnings.warn(
                f"{asked} monitors {self.name!r}, which the logs do not have; there are: {known}", stacklevel=4
            )
            return None
        return float(value)


class Monitoring(Callback):
    """A callback that remembers numbers about the epochs before, and saves them with the training.

    An epoch is judged when it is over.  One that the training leaves in its middle is judged at the end of the
    training, after checkpoints are saved: a training that goes on from these comes to its end, and judges it then.
    """

    #: The names of these attributes.
    _remembered: tuple[str, ...] = ()
    monitor: Monitor
    _is_left = False  # in the middle of an epoch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self._is_left = self.trainer.epoch == epoch
        if not self._is_left:
            self._judge(epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._is_left:
            self._is_left = False
            self._judge(self.trainer.epoch, logs)

    def _judge(self, epoch: int, logs: Logs | None) -> None:
        """Decide by the logs of an epoch."""

    def _look_at_metrics(self) -> None:
        """Find out in which direction the log gets better; ValueError where nothing tells."""
        self.monitor.look_at(self.trainer.metrics, type(self).__name__)

    def state(self) -> dict[str, Any]:
        """Return the numbers for a checkpoint; floats as text, since JSON has no NaN.  Local."""
        found = {name: getattr(self._holder, name) for name in self._remembered}
        return {**{name: _saved(value) for name, value in found.items()}, "monitor": self._monitored}

    @property
    def _monitored(self) -> str:
        return str(self.monitor)

    @property
    def _holder(self) -> Any:
        """What has the numbers that are remembered."""
        return self

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a state; a warning in its place if it is about another log.  Local."""
        if (saved := state.get("monitor", self._monitored)) == self._monitored:
            self._take_over(state)
            return
        warnings.warn(
            f"the checkpoint has what {type(self).__name__} remembered of {saved}; it begins anew with "
            f"{self._monitored}",
            RuntimeWarning,
            stacklevel=2,
        )

    def _take_over(self, state: Mapping[str, Any]) -> None:
        """Take over a state that is about the same log."""
        for name in self._remembered:
            setattr(self._holder, name, _restored(state[name]))


def _saved(value: Any) -> int | str:
    """Return a number for a checkpoint: a float as text, and none as empty text."""
    if value is None:
        return ""
    return int(value) if isinstance(value, Integral) else float(value).hex()


def _restored(saved: Any) -> float | None:
    """Return the number of which `_saved` made this."""
    if isinstance(saved, str):
        return float.fromhex(saved) if saved else None
    return int(saved)
