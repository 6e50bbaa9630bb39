"""Errors of predicted numbers."""

from __future__ import annotations

import numpy

from mpidist.training.metrics.base import same_shape
from mpidist.training.metrics.mean import MeanOfRows


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


def _difference(name: str, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
    y_true, y_pred = same_shape(name, y_true, y_pred)
    return y_true.astype("float64", copy=False) - y_pred
