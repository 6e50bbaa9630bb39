"""Metrics with Keras' names and meaning, exact over all ranks: counts and sums are kept, and added up when read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.training.metrics.accuracy import (
    Accuracy,
    AccuracyByShape,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from mpidist.training.metrics.auc import AUC
from mpidist.training.metrics.base import Metric
from mpidist.training.metrics.confusion import Precision, Recall
from mpidist.training.metrics.mean import Mean, MeanAbsoluteError, MeanOfFunction, MeanSquaredError
from mpidist.training.metrics.of_variables import MetricOfVariables, is_metric

__all__ = [
    "AUC",
    "Accuracy",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "Mean",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "SparseCategoricalAccuracy",
    "SparseTopKCategoricalAccuracy",
    "TopKCategoricalAccuracy",
    "get",
]

#: Metrics by the names that `Trainer` takes in place of objects.
_MAKERS: dict[str, Callable[..., Metric]] = {
    "accuracy": AccuracyByShape,
    "acc": AccuracyByShape,
    "auc": AUC,
    "binary_accuracy": BinaryAccuracy,
    "categorical_accuracy": CategoricalAccuracy,
    "mae": MeanAbsoluteError,
    "mean_absolute_error": MeanAbsoluteError,
    "mean_squared_error": MeanSquaredError,
    "mse": MeanSquaredError,
    "precision": Precision,
    "recall": Recall,
    "sparse_categorical_accuracy": SparseCategoricalAccuracy,
    "sparse_top_k_categorical_accuracy": SparseTopKCategoricalAccuracy,
    "top_k_categorical_accuracy": TopKCategoricalAccuracy,
}


def get(identifier: str | Metric | Callable[..., Any]) -> Metric:
    """Return the metric that a name means, called by that name; a metric is returned as it is.  Local.

    Parameters
    ----------
    identifier : str, Metric or callable
        ``"accuracy"`` is the binary, categorical or sparse one, by the shapes of labels and predictions.  Of a function
        ``fn(y_true, y_pred)`` that returns a value for each row it is the mean, called by the function's name.  A
        metric of Keras, or of its like, is taken as it is, see `MetricOfVariables`.

    Raises
    ------
    ValueError
        There is no such name.
    TypeError
        It is none of these.
    """
    if isinstance(identifier, Metric):
        return identifier
    if not isinstance(identifier, type) and is_metric(identifier):
        return MetricOfVariables(identifier)
    if callable(identifier) and not isinstance(identifier, type):
        return MeanOfFunction(identifier)
    if not isinstance(identifier, str):
        raise TypeError(f"a metric is a mpidist.metrics.Metric, a name or a function, got {type(identifier).__name__}")
    if identifier not in _MAKERS:
        raise ValueError(f"there is no metric {identifier!r}; known ones: {', '.join(sorted(_MAKERS))}")
    return _MAKERS[identifier](name=identifier)
