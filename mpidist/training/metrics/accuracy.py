"""Accuracies: how often predictions are right, for labels as they are, classes by scores, and the best k classes."""

from __future__ import annotations

import numpy

from mpidist.training.metrics.base import require_classes, same_shape
from mpidist.training.metrics.mean import MeanOfRows


class Accuracy(MeanOfRows):
    """How often predictions equal labels.

    Parameters
    ----------
    name : str
        By default ``"accuracy"``.
    """

    _name = "accuracy"
    grows = True

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        y_true, y_pred = same_shape(self.name, y_true, y_pred)
        kinds = y_true.dtype.kind + y_pred.dtype.kind
        if set(kinds) & set("biu") and not set(kinds) & set("OSU"):  # a narrower one would hold another whole number
            return _exact(y_true) == _exact(y_pred)
        return y_true.astype(y_pred.dtype, copy=False) == y_pred


class BinaryAccuracy(MeanOfRows):
    """How often predictions and labels (0 or 1) are on the same side of the threshold.

    Parameters
    ----------
    name : str
        By default ``"binary_accuracy"``.
    threshold : float
        Predictions above it are 1; of floats, above it as their dtype has it.
    """

    _name = "binary_accuracy"
    grows = True

    def __init__(self, name: str | None = None, threshold: float = 0.5) -> None:
        super().__init__(name)
        self.threshold = threshold

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        return _right_side(self.name, y_true, y_pred, self.threshold)


class CategoricalAccuracy(MeanOfRows):
    """How often the class with the highest score is that of a one-hot label.

    Parameters
    ----------
    name : str
        By default ``"categorical_accuracy"``.
    """

    _name = "categorical_accuracy"
    grows = True

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        return _hot(self.name, y_true, y_pred) == y_pred.argmax(axis=-1)


class SparseCategoricalAccuracy(MeanOfRows):
    """How often the class with the highest score is the labelled one; labels are class numbers.

    Parameters
    ----------
    name : str
        By default ``"sparse_categorical_accuracy"``.
    """

    _name = "sparse_categorical_accuracy"
    grows = True

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        return _classes(self.name, y_true, y_pred) == y_pred.argmax(axis=-1)


class TopKCategoricalAccuracy(MeanOfRows):
    """How often the class of a one-hot label is among the k highest scores.

    Parameters
    ----------
    k : int
    name : str
        By default ``"top_k_categorical_accuracy"``.
    """

    _name = "top_k_categorical_accuracy"
    grows = True

    def __init__(self, k: int = 5, name: str | None = None) -> None:
        super().__init__(name)
        if k < 1:
            raise ValueError(f"k must be 1 or more, got {k}")
        self.k = k

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        return in_top_k(_hot(self.name, y_true, y_pred), y_pred, self.k)


class SparseTopKCategoricalAccuracy(TopKCategoricalAccuracy):
    """How often the labelled class is among the k highest scores; labels are class numbers.

    Parameters
    ----------
    k : int
    name : str
        By default ``"sparse_top_k_categorical_accuracy"``.
    """

    _name = "sparse_top_k_categorical_accuracy"

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        return in_top_k(_classes(self.name, y_true, y_pred), y_pred, self.k)


class AccuracyByShape(MeanOfRows):
    """The accuracy that fits the shapes, as ``"accuracy"`` means in Keras: binary, categorical or sparse."""

    _name = "accuracy"
    grows = True

    def of_rows(self, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
        if y_pred.ndim < 2 or y_pred.shape[-1] == 1:
            return _right_side(self.name, y_true, y_pred, 0.5)
        is_sparse = y_true.ndim < y_pred.ndim or y_true.shape[-1] == 1
        return (_classes if is_sparse else _hot)(self.name, y_true, y_pred) == y_pred.argmax(axis=-1)


def _exact(values: numpy.ndarray) -> numpy.ndarray:
    """Return numbers that can be compared with whole numbers."""
    return values if values.dtype.kind in "biu" else values.astype("float64")


def _right_side(name: str, y_true: numpy.ndarray, y_pred: numpy.ndarray, threshold: float) -> numpy.ndarray:
    y_true, y_pred = same_shape(name, y_true, y_pred)
    # a prediction that is the threshold, as far as its dtype tells, is not above it
    limit = y_pred.dtype.type(threshold) if y_pred.dtype.kind in "fV" else threshold
    return y_true == (y_pred > limit)


def _classes(name: str, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
    """Return labels that are class numbers, one for each row of scores.

    ValueError where they are more or fewer, or no whole numbers.
    """
    require_classes(name, y_pred)
    has_column = y_true.ndim == y_pred.ndim and y_true.shape[-1] == 1
    numbers = _exact(y_true[..., 0] if has_column else y_true)
    if numbers.shape != y_pred.shape[:-1]:
        raise ValueError(
            f"metric {name!r}: one class number belongs to each row of y_pred, {y_pred.shape}, got {y_true.shape}"
        )
    with numpy.errstate(invalid="ignore"):  # what is no number is an error below
        classes = numbers.astype("int64", copy=False)
    wrong = classes != numbers
    if wrong.any():
        raise ValueError(f"metric {name!r}: labels are class numbers, whole ones; got {numbers[wrong][0]}")
    return classes


def _hot(name: str, y_true: numpy.ndarray, y_pred: numpy.ndarray) -> numpy.ndarray:
    """Return the class numbers of one-hot labels; ValueError where they are not as the scores."""
    require_classes(name, y_pred)
    if y_true.shape != y_pred.shape:
        raise ValueError(
            f"metric {name!r}: one-hot labels have the shape of y_pred, {y_pred.shape}, got {y_true.shape}; labels "
            "that are class numbers have the sparse metrics"
        )
    return y_true.argmax(axis=-1)


def in_top_k(classes: numpy.ndarray, scores: numpy.ndarray, k: int) -> numpy.ndarray:
    """Return whether fewer than k scores are higher than that of the class, which must exist; ties count.  Local."""
    exists = (classes >= 0) & (classes < scores.shape[-1])
    own = numpy.take_along_axis(scores, numpy.where(exists, classes, 0)[..., None], axis=-1)
    return exists & ((scores > own).sum(axis=-1) < k) & numpy.isfinite(own[..., 0])
