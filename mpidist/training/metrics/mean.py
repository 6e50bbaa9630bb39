"""`Mean` of values; `MeanOfRows`, the base of metrics that are means over rows; and means of errors."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import numpy

from mpidist.training.metrics.base import Metric, Sums, on_host, quotient, same_rank, same_shape


class Mean(Metric):
    """The mean of values over all rows; of values with more dimensions, the mean of each row counts.

    Parameters
    ----------
    name : str
        By default ``"mean"``.
    """

    _name = "mean"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name or self._name)
        self.add_sums("total")
        self.add_sums("count")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Take values into account.  Local.

        Parameters
        ----------
        values : array, shape (rows, ...), or number
            A number is one row.
        sample_weight : array or number, optional
            For each row; of more dimensions for each value.
        """
        self._add(on_host(values), sample_weight)

    def _add(self, values: numpy.ndarray, sample_weight: Any) -> None:
        values = values.astype("float64", copy=False)
        weights = None
        if sample_weight is not None:
            values, weights = _weighted(values, on_host(sample_weight).astype("float64"))
        rows = values.shape[0] if values.ndim else 1
        if rows:
            self.sums["total"] += _row_means(values).sum()
            self.sums["count"] += rows if weights is None else _row_means(weights).sum()

    def compute(self, sums: Sums) -> float:
        """Return total / count, 0 before the first row.  Local."""
        return quotient(sums["total"], sums["count"])


class MeanOfRows(Mean, abc.ABC):
    """The mean of something about each row; `of_rows` says of what."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:  # type: ignore[override]
        """Take rows into account, as `Metric.update_state` does.  Local."""
        self._add(self.of_rows(on_host(y_true), on_host(y_pred)), sample_weight)

    @abc.abstractmethod
    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        """Return a value for each row, or several, of which the mean counts.  Local."""


class MeanOfFunction(MeanOfRows):
    """The mean of what ``fn(y_true, y_pred)`` returns for each row, called by the function's name."""

    def __init__(self, fn: Callable[[numpy.ndarray, numpy.ndarray], Any]) -> None:
        super().__init__(str(getattr(fn, "__name__", "metric")))
        self._fn = fn

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        return values_of_rows(self.name, self._fn, y_true, y_pred, len(y_true))


class MeanSquaredError(MeanOfRows):
    """The mean of (label - prediction)².

    Parameters
    ----------
    name : str
        By default ``"mean_squared_error"``.
    """

    _name = "mean_squared_error"
    grows = False

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        return numpy.square(_difference(self.name, y_true, y_pred))


class MeanAbsoluteError(MeanOfRows):
    """The mean of abs(label - prediction).

    Parameters
    ----------
    name : str
        By default ``"mean_absolute_error"``.
    """

    _name = "mean_absolute_error"
    grows = False

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        return numpy.abs(_difference(self.name, y_true, y_pred))


def values_of_rows(name: str, fn: Callable[[Any, Any], Any], y_true: Any, y_pred: Any, rows: int) -> numpy.ndarray:
    """Return what ``fn(y_true, y_pred)`` returns for each row.

    ValueError where it returns something else, whose sum over parts of a batch is not that over all of it: one number
    for all rows, or values of labels and predictions that are spread over one another.  A rank with one row or none
    does not see these; it goes on, and hears of the error in its next collective.
    """
    values = _by_row(name, fn(y_true, y_pred), rows)
    if rows > 1 and _may_spread(y_true, y_pred):
        first = _by_row(name, fn(y_true[:1], y_pred[:1]), 1)
        beside_others = values[:1]
        small = 1e-5 * numpy.abs(values[numpy.isfinite(values)]).max(initial=0)
        if first.shape != beside_others.shape or not numpy.allclose(first, beside_others, 1e-3, small, equal_nan=True):
            raise ValueError(
                f"metric {name!r} returned another value for a row alone than among {rows} rows: it spreads labels of "
                f"shape {y_true.shape} and predictions of shape {y_pred.shape} over one another; give both one shape, "
                "as by labels.reshape(predictions.shape)"
            )
    return values


def _may_spread(y_true: Any, y_pred: Any) -> bool:
    """Return whether two arrays differ in a last dimension of 1 only: NumPy would pair each row with all others."""
    if not hasattr(y_true, "ndim") or not hasattr(y_pred, "ndim"):
        return False
    return [each.ndim for each in same_rank(y_true, y_pred)] != [y_true.ndim, y_pred.ndim]


def _by_row(name: str, values: Any, rows: int) -> numpy.ndarray:
    by_row = on_host(values)
    if by_row.shape[:1] != (rows,):
        raise ValueError(
            f"metric {name!r} returned values of shape {by_row.shape} for {rows} rows: return a value for each row, as "
            "numpy.abs(labels - predictions) is, without their mean"
        )
    return by_row


def _weighted(values: numpy.ndarray, weights: numpy.ndarray) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return values times weights, and the weights in the same shape; a number is the weight of every value."""
    if not weights.ndim:
        weights = weights.reshape((1,) * values.ndim)
    values, weights = same_rank(values, weights)
    if values.ndim > weights.ndim:
        values = values.mean(axis=tuple(range(weights.ndim, values.ndim)))
    weights = numpy.broadcast_to(weights, values.shape)
    return values * weights, weights


def _row_means(values: numpy.ndarray) -> numpy.ndarray:
    return values.mean(axis=tuple(range(1, values.ndim))) if values.ndim > 1 else values


def _difference(name: str, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
    y_true, y_pred = same_shape(name, y_true, y_pred)
    return y_true.astype("float64", copy=False) - y_pred
