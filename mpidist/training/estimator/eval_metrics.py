"""The metrics of a specification, under the names of its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.training.metrics import Mean, Metric, get
from mpidist.training.metrics.base import Sums, on_host


class FunctionMean(Mean):
    """The mean of what ``fn(labels, predictions)`` returns for each row; predictions may be a dict."""

    def __init__(self, name: str, fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(name)
        self._fn = fn

    def update_state(self, y_true: Any, y_pred: Any) -> None:  # type: ignore[override]
        """Take rows into account.  Local."""
        self._add(on_host(self._fn(y_true, y_pred)), None)


class EntryMetric(Metric):
    """A metric about one entry of predictions that are a dict."""

    def __init__(self, metric: Metric, key: str) -> None:
        super().__init__(metric.name)
        self._metric, self._key = metric, key
        self.sums = metric.sums

    def update_state(self, y_true: Any, y_pred: Any) -> None:
        """Take rows into account.  Local."""
        if not isinstance(y_pred, dict) or self._key not in y_pred:
            has = ", ".join(map(repr, y_pred)) if isinstance(y_pred, dict) else f"a {type(y_pred).__name__}"
            raise ValueError(f"metric {self.name!r} is about {self._key!r} of the predictions, which are {has}")
        self._metric.update_state(y_true, y_pred[self._key])

    def compute(self, sums: Sums) -> Any:
        """Return what the metric makes of the sums.  Local."""
        return self._metric.compute(sums)


def metric_of(name: str, given: Any) -> Metric:
    """Return the metric of an entry of ``eval_metric_ops``, with that name.  Local.

    Raises
    ------
    TypeError, ValueError
        It is no metric; or it is called ``loss`` or ``global_step``, which a result has already.
    """
    if name in ("loss", "global_step"):
        raise ValueError(f"eval_metric_ops has {name!r}, which every evaluation has already: choose another name")
    if isinstance(given, tuple):
        if len(given) != 2:
            raise TypeError(f"eval_metric_ops[{name!r}] must be a metric or (metric, key), got {given!r}")
        return EntryMetric(metric_of(name, given[0]), given[1])
    if callable(given) and not isinstance(given, (type, Metric)):
        return FunctionMean(name, given)
    found = get(given)
    found.name = name
    return found
