"""`AUC`: the area under a curve of two rates, each known at some thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.training.metrics.base import Sums, on_host, quotient
from mpidist.training.metrics.confusion import COUNTS, ThresholdMetric

_CURVES = ("ROC", "PR")
_METHODS = ("interpolation", "minoring", "majoring")
#: The outermost thresholds lie so far outside of 0 and 1 that all predictions are between them.
_MARGIN = 1e-7


class AUC(ThresholdMetric):
    """The approximate area under the ROC or the precision-recall curve.

    Parameters
    ----------
    num_thresholds : int
        Evenly spaced from 0 to 1; more approximate the area better.
    curve : str
        ``"ROC"`` (true positive rate over false positive rate) or ``"PR"`` (precision over recall).
    summation_method : str
        Between thresholds ``"interpolation"`` takes the mean height (for PR the formula of Davis and Goadrich, 2006),
        ``"minoring"`` the lower and ``"majoring"`` the higher one.
    name : str
    thresholds : sequence of float, optional
        From 0 to 1, in place of evenly spaced ones.
    from_logits : bool
        Whether predictions are to be passed through a sigmoid first.
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str = "auc",
        thresholds: Sequence[float] | None = None,
        from_logits: bool = False,
    ) -> None:
        self.curve = _known("curve", curve.upper(), _CURVES)
        self.summation_method = _known("summation_method", summation_method.lower(), _METHODS)
        self.from_logits = from_logits
        inner = _evenly(num_thresholds) if thresholds is None else sorted(thresholds)
        if any(not 0 <= value <= 1 for value in inner):
            raise ValueError(f"thresholds must be from 0 to 1, got {thresholds!r}")
        super().__init__(name, [-_MARGIN, *inner, 1 + _MARGIN], COUNTS)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Take rows into account, as `Precision` does; ValueError if a prediction is not from 0 to 1.  Local."""
        y_pred = on_host(y_pred)
        if self.from_logits:
            y_pred = (1 + numpy.tanh(y_pred.astype("float64") / 2)) / 2
        outside = ~((y_pred >= 0) & (y_pred <= 1))
        if outside.any():
            first = y_pred[outside][0]
            cure = "pass from_logits=True if they are logits" if first == first else "look for where the NaN comes from"
            raise ValueError(f"metric {self.name!r} needs predictions from 0 to 1, got {first}; {cure}")
        super().update_state(y_true, y_pred, sample_weight)

    def compute(self, sums: Sums) -> float:
        """Return the area.  Local."""
        tp, fn, fp, tn = (sums[name] for name in COUNTS)
        recall = quotient(tp, tp + fn)
        if self.curve == "ROC":
            return self._area(quotient(fp, fp + tn), recall)
        if self.summation_method == "interpolation":
            return _interpolated_precision_recall(tp, fp, fn)
        return self._area(recall, quotient(tp, tp + fp))

    def _area(self, x: numpy.ndarray, y: numpy.ndarray) -> float:
        """Return the sum of the rectangles between neighbouring thresholds; x descends."""
        higher, lower = numpy.maximum(y[:-1], y[1:]), numpy.minimum(y[:-1], y[1:])
        heights = {"interpolation": (higher + lower) / 2, "minoring": lower, "majoring": higher}
        return float(((x[:-1] - x[1:]) * heights[self.summation_method]).sum())


def _known(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(known)}; got {value!r}")
    return value


def _evenly(num_thresholds: int) -> list[float]:
    if num_thresholds <= 1:
        raise ValueError(f"num_thresholds must be more than 1, got {num_thresholds}")
    return [number / (num_thresholds - 1) for number in range(1, num_thresholds - 1)]


def _interpolated_precision_recall(tp: numpy.ndarray, fp: numpy.ndarray, fn: numpy.ndarray) -> float:
    """Return the area where true positives and predicted positives vary linearly between neighbouring thresholds."""
    # with t true positives and p predicted ones, and t = slope p + offset in between, it is the integral of t / p over
    # the recall: (slope / positives) (difference of t + offset log(ratio of p))
    p = tp + fp
    more_tp, more_p = tp[:-1] - tp[1:], p[:-1] - p[1:]
    slope = quotient(more_tp, numpy.maximum(more_p, 0))
    offset = tp[1:] - slope * p[1:]
    both = (p[:-1] > 0) & (p[1:] > 0)
    ratio = numpy.divide(p[:-1], p[1:], out=numpy.ones_like(p[1:]), where=both)
    return float(quotient(slope * (more_tp + offset * numpy.log(ratio)), tp[1:] + fn[1:]).sum())
