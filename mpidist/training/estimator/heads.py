"""Heads: what a linear model's logits mean: loss, predictions and metrics."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy

from mpidist import arrays
from mpidist.training.estimator.built_model import EntryMetric
from mpidist.training.metrics import AUC, Precision, Recall
from mpidist.training.metrics.base import Sums
from mpidist.training.metrics.mean import Mean


class Head(abc.ABC):
    """Base of the heads.  All methods are Local.

    `units`: logits of each row.
    """

    units: int

    @abc.abstractmethod
    def losses(self, logits: Any, labels: Any) -> Any:
        """Return the loss of each row, shape (rows,)."""

    @abc.abstractmethod
    def slope(self, logits: Any, labels: Any) -> Any:
        """Return the gradient of the mean loss by the logits."""

    @abc.abstractmethod
    def predictions(self, logits: Any) -> dict[str, Any]:
        """Return what `Estimator.predict` yields."""

    @abc.abstractmethod
    def metrics(self) -> dict[str, Any]:
        """Return ``eval_metric_ops``."""

    def average_loss(self, labels: Any, predictions: Any) -> Any:
        """Return the loss of each row, for a metric."""
        return self.losses(predictions[self._logits], labels)

    _logits = "logits"


class RegressionHead(Head):
    """The mean of squared errors."""

    _logits = "predictions"

    def __init__(self, label_dimension: int = 1) -> None:
        if label_dimension < 1:
            raise ValueError(f"Invalid label_dimension {label_dimension}: it must be 1 or more")
        self.units = label_dimension

    def losses(self, logits: Any, labels: Any) -> Any:
        return ((logits - self._labels(logits, labels)) ** 2).mean(axis=1)

    def slope(self, logits: Any, labels: Any) -> Any:
        error = logits - self._labels(logits, labels)
        return error * error.dtype.type(2 / error.size)

    def predictions(self, logits: Any) -> dict[str, Any]:
        return {"predictions": logits}

    def metrics(self) -> dict[str, Any]:
        return {
            "average_loss": self.average_loss,
            "label/mean": lambda labels, predictions: numpy.asarray(labels),
            "prediction/mean": lambda labels, predictions: predictions["predictions"],
        }

    def _labels(self, logits: Any, labels: Any) -> Any:
        return _shaped(labels, logits.shape).astype(logits.dtype, copy=False)


class ClassHead(Head):
    """Base of the heads of classes.

    `vocabulary`: the labels, where they are text; else they are the numbers of classes.
    """

    def __init__(self, n_classes: int, vocabulary: Sequence[str] | None) -> None:
        if vocabulary is not None and len(vocabulary) != n_classes:
            raise ValueError(f"label_vocabulary has {len(vocabulary)} words for {n_classes} classes")
        self.n_classes = n_classes
        self._words = numpy.array([str(each) for each in vocabulary or range(n_classes)])
        self._has_words = vocabulary is not None

    def class_ids(self, labels: Any) -> numpy.ndarray:
        """Return the number of each row's class, shape (rows,); ValueError for other labels."""
        array = numpy.asarray(arrays.plain(labels))
        array = _shaped(array, (len(array), 1))[:, 0]
        if self._has_words:
            places = (
                numpy.argmax(array.astype(str)[:, None] == self._words, axis=1) if len(array) else array.astype(int)
            )
            wrong = self._words[places] != array.astype(str)
        else:
            if array.dtype.kind not in "biuf":
                raise ValueError(f"labels of {array.dtype} need a label_vocabulary")
            places = array.astype(numpy.int64)
            wrong = (places != array) | (places < 0) | (places >= self.n_classes)
        if wrong.any():
            known = self._words.tolist() if self._has_words else f"whole numbers from 0 to {self.n_classes - 1}"
            raise ValueError(f"labels must be {known}, got {array[wrong][0]!r}")
        return places

    def _named(self, logits: Any, probabilities: Any) -> dict[str, Any]:
        rows, ids = len(probabilities), probabilities.argmax(axis=1)[:, None]
        every = numpy.arange(self.n_classes, dtype="int32")
        return {
            "logits": logits,
            "probabilities": probabilities,
            "class_ids": ids,
            "classes": self._words[ids],
            "all_class_ids": numpy.broadcast_to(every, (rows, self.n_classes)),
            "all_classes": numpy.broadcast_to(self._words, (rows, self.n_classes)),
        }

    def _is_right(self, labels: Any, predictions: Any) -> Any:
        return (self.class_ids(labels) == predictions["class_ids"][:, 0]).astype("float64")


class BinaryHead(ClassHead):
    """Two classes, by one logit."""

    units = 1

    def __init__(self, vocabulary: Sequence[str] | None = None) -> None:
        super().__init__(2, vocabulary)

    def losses(self, logits: Any, labels: Any) -> Any:
        z, y = logits[:, 0], self.class_ids(labels).astype(logits.dtype)
        return numpy.maximum(z, 0) - z * y + numpy.log1p(numpy.exp(-abs(z)))

    def slope(self, logits: Any, labels: Any) -> Any:
        y = self.class_ids(labels).astype(logits.dtype)
        return (_sigmoid(logits) - y[:, None]) / logits.dtype.type(len(logits))

    def predictions(self, logits: Any) -> dict[str, Any]:
        logistic = _sigmoid(logits)
        found = self._named(logits, numpy.concatenate([1 - logistic, logistic], axis=1))
        return {**found, "logistic": logistic}

    def metrics(self) -> dict[str, Any]:
        return {
            "average_loss": self.average_loss,
            "accuracy": self._is_right,
            "accuracy_baseline": _Baseline(self),
            "auc": EntryMetric(AUC(), "logistic", self.class_ids),
            "auc_precision_recall": EntryMetric(AUC(curve="PR"), "logistic", self.class_ids),
            "precision": EntryMetric(Precision(), "logistic", self.class_ids),
            "recall": EntryMetric(Recall(), "logistic", self.class_ids),
            "label/mean": lambda labels, predictions: self.class_ids(labels),
            "prediction/mean": lambda labels, predictions: predictions["logistic"],
        }


class MultiClassHead(ClassHead):
    """More than two classes, one logit each."""

    def __init__(self, n_classes: int, vocabulary: Sequence[str] | None = None) -> None:
        super().__init__(n_classes, vocabulary)
        self.units = n_classes

    def losses(self, logits: Any, labels: Any) -> Any:
        shifted = logits - logits.max(axis=1, keepdims=True)
        of_label = numpy.take_along_axis(shifted, self.class_ids(labels)[:, None], axis=1)[:, 0]
        return numpy.log(numpy.exp(shifted).sum(axis=1)) - of_label

    def slope(self, logits: Any, labels: Any) -> Any:
        found, ids = _softmax(logits), self.class_ids(labels)
        found[numpy.arange(len(ids)), ids] -= 1
        return found / logits.dtype.type(len(ids))

    def predictions(self, logits: Any) -> dict[str, Any]:
        return self._named(logits, _softmax(logits))

    def metrics(self) -> dict[str, Any]:
        return {"average_loss": self.average_loss, "accuracy": self._is_right}


class _Baseline(Mean):
    """The accuracy of always guessing the class that is more frequent."""

    def __init__(self, head: BinaryHead) -> None:
        super().__init__("accuracy_baseline")
        self._head = head

    def update_state(self, y_true: Any, y_pred: Any) -> None:  # type: ignore[override]
        self._add(self._head.class_ids(y_true), None)

    def compute(self, sums: Sums) -> float:
        share = super().compute(sums)
        return max(share, 1 - share)


def _shaped(labels: Any, shape: tuple[int, ...]) -> numpy.ndarray:
    """Return labels in a shape of two dimensions; ValueError if they have other numbers of rows or columns."""
    if labels is None:
        raise ValueError("labels are needed, and input_fn gives features only")
    array = numpy.asarray(arrays.plain(labels))
    found = array[:, None] if array.ndim == 1 else array
    if found.shape != shape:
        raise ValueError(f"labels must have the shape {shape}, got {array.shape}")
    return found


def _sigmoid(logits: Any) -> Any:
    half = logits.dtype.type(0.5)
    return half + half * numpy.tanh(half * logits)


def _softmax(logits: Any) -> Any:
    found = numpy.exp(logits - logits.max(axis=1, keepdims=True))
    return found / found.sum(axis=1, keepdims=True)
