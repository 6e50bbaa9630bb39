"""`LinearRegressor` and `LinearClassifier`: estimators whose model is made already."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from mpidist.errors import quoted
from mpidist.optimizers import SGD, Adagrad, Adam, Ftrl, Optimizer, RMSprop
from mpidist.training.estimator.estimator import Estimator
from mpidist.training.estimator.feature_columns import NumericColumn
from mpidist.training.estimator.heads import BinaryHead, Head, MultiClassHead, RegressionHead
from mpidist.training.estimator.run_config import RunConfig
from mpidist.training.estimator.spec import EstimatorSpec, ModeKeys, TrainOp
from mpidist.variables import Variable

#: An optimizer, its name, or a function that makes it.
OptimizerChoice = str | Optimizer | Callable[[], Optimizer]

_OPTIMIZERS: Mapping[str, Callable[[float], Optimizer]] = {
    "Adagrad": Adagrad,
    "Adam": Adam,
    "Ftrl": Ftrl,
    "RMSProp": RMSprop,
    "SGD": SGD,
}

#: The largest learning rate of an optimizer that is given by name.
_LEARNING_RATE = 0.2


class _LinearModel:
    """Logits that are linear in the features of some columns."""

    def __init__(self, columns: Sequence[NumericColumn], head: Head, optimizer: OptimizerChoice | None) -> None:
        self._columns = _checked_columns(columns)
        self._head = head
        self._optimizer_fn = _optimizer_fn(optimizer, len(self._columns))
        is_double = any(column.dtype == numpy.dtype("float64") for column in self._columns)
        self._dtype = "float64" if is_double else "float32"

    def model_fn(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        """Return the model of a mode, with weights that are zero."""
        units = self._head.units
        variables = {_BIAS: Variable(numpy.zeros(units, self._dtype), name=_BIAS)}
        for column in self._columns:
            name = _weights(column)
            variables[name] = Variable(numpy.zeros((column.size, units), self._dtype), name=name)
        train_op = TrainOp(self._optimizer_fn(), self._value_and_grad) if mode == ModeKeys.TRAIN else None
        return EstimatorSpec(
            mode,
            predictions=lambda parameters, features: self._head.predictions(self._logits(parameters, features)),
            loss=self._loss,
            train_op=train_op,
            eval_metric_ops=self._head.metrics() if mode == ModeKeys.EVAL else None,
            variables=variables,
        )

    def _logits(self, parameters: Mapping[str, Any], features: Any) -> Any:
        terms = [self._read(column, features) @ parameters[_weights(column)] for column in self._columns]
        return sum(terms[1:], terms[0]) + parameters[_BIAS]

    def _loss(self, parameters: Mapping[str, Any], features: Any, labels: Any) -> Any:
        logits = self._logits(parameters, features)
        return self._head.losses(logits, labels).mean(), self._head.predictions(logits)

    def _value_and_grad(self, parameters: Mapping[str, Any], features: Any, labels: Any) -> Any:
        logits = self._logits(parameters, features)
        slope = self._head.slope(logits, labels)
        gradients = {_BIAS: slope.sum(axis=0)}
        for column in self._columns:
            gradients[_weights(column)] = self._read(column, features).T @ slope
        return self._head.losses(logits, labels).mean(), gradients

    def _read(self, column: NumericColumn, features: Any) -> Any:
        return column.read(features).astype(self._dtype, copy=False)


class LinearRegressor(Estimator):
    """A linear model of numbers, by the mean of squared errors.

    Collective: every rank makes it in the same order.

    `Estimator.evaluate` returns ``average_loss``, ``global_step``, ``label/mean``, ``loss`` and ``prediction/mean``.
    `Estimator.predict` yields ``{"predictions": ...}``.  Features are a dict.  Labels have a column for each dimension.

    Parameters
    ----------
    feature_columns : sequence of NumericColumn
        From `mpidist.feature_column.numeric_column`.
    model_dir : str or Path, optional
    label_dimension : int
    optimizer : str, Optimizer or callable, optional
        ``"Ftrl"``, ``"SGD"``, ``"Adam"``, ``"Adagrad"`` or ``"RMSProp"``, with a learning rate of 0.2, or one over the
        root of the number of columns if that is less; an optimizer; or a function that returns one.
    config : RunConfig, optional

    Raises
    ------
    ValueError
        There is no column, two have one name, or the optimizer is unknown.
    TypeError
        A column or the optimizer is of another type.
    """

    def __init__(
        self,
        feature_columns: Sequence[NumericColumn],
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        optimizer: OptimizerChoice | None = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        model = _LinearModel(feature_columns, RegressionHead(label_dimension), optimizer)
        super().__init__(model.model_fn, model_dir, config)


class LinearClassifier(Estimator):
    """A linear model of classes, by cross entropy.

    Collective: every rank makes it in the same order.

    `Estimator.evaluate` returns ``accuracy``, ``average_loss``, ``loss`` and ``global_step``; of two classes also
    ``accuracy_baseline``, ``auc``, ``auc_precision_recall``, ``label/mean``, ``precision``, ``prediction/mean`` and
    ``recall``.  `Estimator.predict` yields dicts of ``logits``, ``probabilities``, ``class_ids``, ``classes`` and more.

    Parameters
    ----------
    feature_columns : sequence of NumericColumn
    model_dir : str or Path, optional
    n_classes : int
        2 or more.
    label_vocabulary : sequence of str, optional
        The labels, where they are text; else they are whole numbers from 0.
    optimizer, config
        As for `LinearRegressor`.

    Raises
    ------
    ValueError
        As for `LinearRegressor`; there are less than two classes, or a vocabulary of another length.
    TypeError
        As for `LinearRegressor`.
    """

    def __init__(
        self,
        feature_columns: Sequence[NumericColumn],
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerChoice | None = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        if n_classes < 2:
            raise ValueError(f"n_classes must be 2 or more, got {n_classes}")
        head = BinaryHead(label_vocabulary) if n_classes == 2 else MultiClassHead(n_classes, label_vocabulary)
        model = _LinearModel(feature_columns, head, optimizer)
        super().__init__(model.model_fn, model_dir, config)


_BIAS = "linear/linear_model/bias_weights"


def _weights(column: NumericColumn) -> str:
    return f"linear/linear_model/{column.name}/weights"


def _checked_columns(columns: Any) -> list[NumericColumn]:
    """Return columns in the order of their names."""
    numeric = [columns] if isinstance(columns, NumericColumn) else list(columns)
    for each in numeric:
        if not isinstance(each, NumericColumn):
            raise TypeError(f"Items of feature_columns must be made by numeric_column, got {each!r}")
    names = [each.name for each in numeric]
    if not numeric or len(set(names)) < len(names):
        raise ValueError(f"feature_columns must be one or more, each with a key of its own; got {names}")
    return sorted(numeric, key=lambda each: each.name)


def _optimizer_fn(optimizer: OptimizerChoice | None, columns: int) -> Callable[[], Optimizer]:
    optimizer = "Ftrl" if optimizer is None else optimizer
    known = ", ".join(sorted(_OPTIMIZERS))
    if isinstance(optimizer, str):
        if optimizer not in _OPTIMIZERS:
            raise ValueError(f"Unsupported optimizer name: {optimizer}. Supported names are: {known}")
        return lambda: _OPTIMIZERS[optimizer](min(_LEARNING_RATE, 1 / math.sqrt(columns)))
    if isinstance(optimizer, Optimizer):
        return lambda: optimizer
    if callable(optimizer):
        return optimizer
    raise TypeError(f"The given object is not an Optimizer instance. Given: {quoted(optimizer)}")
