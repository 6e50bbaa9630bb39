"""Counts of true and false positives by threshold: `Precision` and `Recall`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.training.losses import shape_of_weights
from mpidist.training.metrics.base import Metric, Sums, on_host, quotient, require_classes, same_shape

#: Of positive labels those above a threshold and the others, and of negative ones.
COUNTS = ("true_positives", "false_negatives", "false_positives", "true_negatives")


class ThresholdMetric(Metric):
    """Counts of true and false positives and negatives, at each of some thresholds."""

    grows = True

    def __init__(
        self,
        name: str,
        thresholds: Sequence[float],
        counts: Sequence[str],
        top_k: int | None = None,
        class_id: int | None = None,
    ) -> None:
        super().__init__(name)
        self.thresholds = numpy.array(thresholds, "float64")
        self.top_k = _whole(name, "top_k", top_k, 1)
        self.class_id = _whole(name, "class_id", class_id, 0)
        for count in counts:
            self.add_sums(count, self.thresholds.shape)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Take rows into account.  Local.

        Parameters
        ----------
        y_true : array, shape (rows,) or (rows, classes)
            What is not 0 is positive.
        y_pred : array of the same shape
        sample_weight : array, shape (rows,), optional

        Raises
        ------
        ValueError
            The shapes differ; or there are no classes for `class_id` and `top_k`, or too few.
        """
        y_true, y_pred = same_shape(self.name, on_host(y_true), on_host(y_pred))
        self._check_classes(y_pred)
        labels, scores, thresholds = (
            y_true.astype(bool),
            y_pred.astype("float64"),
            _rounded(self.thresholds, y_pred.dtype),
        )
        weights = numpy.ones(()) if sample_weight is None else on_host(sample_weight).astype("float64")
        by_element = numpy.broadcast_to(weights.reshape(shape_of_weights(weights.shape, labels.shape)), labels.shape)
        if self.top_k is not None:
            scores = _only_top_k(scores, self.top_k)
        if self.class_id is not None:
            labels, scores, by_element = (array[..., self.class_id] for array in (labels, scores, by_element))
        self._count(thresholds, labels.reshape(-1), scores.reshape(-1), by_element.reshape(-1))

    def _check_classes(self, y_pred: numpy.ndarray) -> None:
        """Raise ValueError where the classes that `class_id` and `top_k` tell of are not there."""
        for what, value, first in (("class_id", self.class_id, 0), ("top_k", self.top_k, 1)):
            if value is None:
                continue
            require_classes(self.name, y_pred, what)
            if value - first >= y_pred.shape[-1]:
                raise ValueError(f"metric {self.name!r}: {what}={value}, but y_pred has {y_pred.shape[-1]} classes")

    def _count(
        self, thresholds: numpy.ndarray, labels: numpy.ndarray, scores: numpy.ndarray, weights: numpy.ndarray
    ) -> None:
        for label, names in ((True, COUNTS[:2]), (False, COUNTS[2:])):
            if not self.sums.keys() & {*names}:
                continue
            chosen = labels == label
            for name, counts in zip(names, _over_and_under(thresholds, scores[chosen], weights[chosen]), strict=True):
                if name in self.sums:
                    self.sums[name] += counts


class _Rate(ThresholdMetric):
    """True positives over themselves and errors of one kind."""

    _name, _errors = "", ""

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
    ) -> None:
        counts = ("true_positives", self._errors)
        super().__init__(name or self._name, _thresholds(thresholds, top_k), counts, top_k, class_id)

    def compute(self, sums: Sums) -> Any:
        """Return the quotient, 0 where there is nothing to count.  Local."""
        found = quotient(sums["true_positives"], sums["true_positives"] + sums[self._errors])
        return float(found[0]) if len(found) == 1 else found


class Precision(_Rate):
    """Which share of what is predicted as positive is so: true positives / (true positives + false positives).

    Parameters
    ----------
    thresholds : float or sequence of float, optional
        From 0 to 1; 0.5 by default.  Several give an array of results.
    top_k : int, optional
        Only the k highest scores of a row can be positive; without thresholds they all are.
    class_id : int, optional
        Only this class counts.
    name : str
        By default ``"precision"``.
    """

    _name, _errors = "precision", "false_positives"


class Recall(_Rate):
    """Which share of what is positive is predicted so: true positives / (true positives + false negatives).

    Parameters
    ----------
    thresholds, top_k, class_id
        As for `Precision`.
    name : str
        By default ``"recall"``.
    """

    _name, _errors = "recall", "false_negatives"


def _whole(name: str, what: str, value: Any, least: int) -> int | None:
    """Return an optional whole number; a list of them, or True, would be another index of an array."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, numpy.integer)) or value < least:
        raise ValueError(f"metric {name!r}: {what} must be a whole number of {least} or more, got {value!r}")
    return int(value)


def _thresholds(thresholds: float | Sequence[float] | None, top_k: int | None) -> Sequence[float]:
    if thresholds is None:
        return (0.5,) if top_k is None else (-numpy.finfo("float64").max,)
    numbers = (thresholds,) if numpy.ndim(thresholds) == 0 else tuple(thresholds)  # type: ignore[arg-type]
    wrong = [value for value in numbers if not 0 <= value <= 1]  # type: ignore[operator]
    if wrong or not numbers:
        raise ValueError(f"thresholds must be numbers from 0 to 1, got {thresholds!r}")
    return numbers  # type: ignore[return-value]


def _rounded(thresholds: numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
    """Return thresholds as precise as the scores: a score that is a threshold in float32 is not above it."""
    if dtype.kind in "biu" or dtype.itemsize > 4:
        return thresholds
    with numpy.errstate(over="ignore"):  # the one below all scores
        return thresholds.astype("float32").astype("float64")


def _only_top_k(scores: numpy.ndarray, k: int) -> numpy.ndarray:
    """Return the scores with all but the k highest of each row at -inf; of equal ones the first are taken."""
    order = numpy.argsort(-scores, axis=-1, kind="stable")[..., :k]
    kept = numpy.full(scores.shape, -numpy.inf)
    numpy.put_along_axis(kept, order, numpy.take_along_axis(scores, order, axis=-1), axis=-1)
    return kept


def _over_and_under(
    thresholds: numpy.ndarray, scores: numpy.ndarray, weights: numpy.ndarray
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return for each threshold the weight of the scores above it, and of the others; NaN is above none."""
    order = numpy.argsort(thresholds, kind="stable")
    scores = numpy.where(numpy.isnan(scores), -numpy.inf, scores)
    # how many thresholds each score is above; then sums from behind: above threshold i are those that exceed i + 1
    exceeded = numpy.searchsorted(thresholds[order], scores, side="left")
    by_exceeded = numpy.bincount(exceeded, weights, minlength=len(thresholds) + 1)
    over = numpy.empty(len(thresholds))
    over[order] = by_exceeded[::-1].cumsum()[::-1][1:]
    return over, weights.sum() - over
