"""Metrics with Keras' names and meaning, exact over all ranks: counts and sums are kept, and added up when read."""

from __future__ import annotations

from mpidist.training.metrics.accuracy import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
)
from mpidist.training.metrics.auc import AUC
from mpidist.training.metrics.base import Metric
from mpidist.training.metrics.confusion import Precision, Recall
from mpidist.training.metrics.mean import Mean, MeanAbsoluteError, MeanSquaredError
from mpidist.training.metrics.names import get

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
