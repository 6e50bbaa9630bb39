"""`BuiltModel`: what a model function returned for one mode, ready to be called and saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.input import structure
from mpidist.training.checkpoint import Checkpoint
from mpidist.training.estimator.spec import EstimatorSpec
from mpidist.training.estimator.step_batches import StepPosition
from mpidist.training.metrics import Mean, Metric, get
from mpidist.training.metrics.base import Sums
from mpidist.training.metrics.mean import values_of_rows
from mpidist.training.model import Model
from mpidist.training.train_step import rows_of

#: The names of a checkpoint's parts.
VARIABLES, POSITION = "variables", "training"


class BuiltModel:
    """The model of one mode under one strategy.

    `model` has the functions, with checks of what they return; `metrics` are the loss and those of the specification.
    `checkpoint` has the variables and the `position`; of a training, the optimizer too.  TypeError or ValueError where
    the variables are none, or were not made by the model function.
    """

    def __init__(self, spec: EstimatorSpec, strategy: Any) -> None:
        self.spec, self.strategy = spec, strategy
        train_op = spec.train_op
        self.metrics: list[Metric] = [
            Mean("loss"),
            *(metric_of(name, each) for name, each in spec.eval_metric_ops.items()),
        ]
        self.model = Model(
            _with_labels(train_op.value_and_grad_fn if train_op is not None else _no_gradients),
            spec.variables,
            spec.predictions,
            None if spec.loss is None else _with_labels(spec.loss),
            needs_predictions=train_op is None and len(self.metrics) > 1,
        )
        if self.model.strategy is not strategy:
            raise ValueError(
                f"the variables belong to {self.model.strategy!r}, and the model to {strategy!r}: model_fn must make "
                "its variables itself, each time it is called"
            )
        self.optimizer = None if train_op is None else train_op.optimizer
        self.is_served = any(not variable.is_here for variable in self.model.variables)
        self.position = StepPosition()
        optimizer = {} if self.optimizer is None else {"optimizer": self.optimizer}
        variables = spec.variables if isinstance(spec.variables, (dict, list, tuple)) else [spec.variables]
        self.checkpoint = Checkpoint(**{VARIABLES: variables}, **optimizer, **{POSITION: self.position})


def without_rows(outline: Any) -> tuple[Any, Any]:
    """Return features and labels without rows, to show a model function their shapes and dtypes.  Local."""
    batch = structure.without_rows(outline)
    return batch if len(batch) == 2 else (batch[0], None)


def _with_labels(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose labels are None where a batch has features only."""
    return lambda parameters, features, labels=None: fn(parameters, features, labels)


def _no_gradients(*arguments: Any) -> Any:
    raise AssertionError("a model that is not trained was asked for gradients")


class FunctionMean(Mean):
    """The mean of what ``fn(labels, predictions)`` returns for each row; predictions may be a dict."""

    def __init__(self, name: str, fn: Callable[[Any, Any], Any]) -> None:
        super().__init__(name)
        self._fn = fn

    def update_state(self, y_true: Any, y_pred: Any) -> None:  # type: ignore[override]
        """Take rows into account.  Local."""
        self._add(values_of_rows(self.name, self._fn, y_true, y_pred, rows_of((y_pred, y_true))), None)


class EntryMetric(Metric):
    """A metric about one entry of predictions that are a dict, and about what a function makes of the labels."""

    def __init__(self, metric: Metric, key: str, labels_fn: Callable[[Any], Any] = lambda labels: labels) -> None:
        super().__init__(metric.name)
        self._metric, self._key, self._labels_fn = metric, key, labels_fn
        self.sums = metric.sums

    def update_state(self, y_true: Any, y_pred: Any) -> None:
        """Take rows into account.  Local."""
        if not isinstance(y_pred, dict) or self._key not in y_pred:
            has = ", ".join(map(repr, y_pred)) if isinstance(y_pred, dict) else f"a {type(y_pred).__name__}"
            raise ValueError(f"metric {self.name!r} is about {self._key!r} of the predictions, which are {has}")
        self._metric.update_state(self._labels_fn(y_true), y_pred[self._key])

    def compute(self, sums: Sums) -> Any:
        """Return what the metric makes of the sums.  Local."""
        return self._metric.compute(sums)


def metric_of(name: str, entry: Any) -> Metric:
    """Return the metric of an entry of ``eval_metric_ops``, with that name.  Local.

    TypeError or ValueError where it is no metric, or is called ``loss`` or ``global_step``, which a result has already.
    """
    if name in ("loss", "global_step"):
        raise ValueError(f"eval_metric_ops has {name!r}, which every evaluation has already: choose another name")
    if isinstance(entry, tuple):
        if len(entry) != 2:
            raise TypeError(f"eval_metric_ops[{name!r}] must be a metric or (metric, key), got {entry!r}")
        return EntryMetric(metric_of(name, entry[0]), entry[1])
    if callable(entry) and not isinstance(entry, (type, Metric)):
        return FunctionMean(name, entry)
    metric = get(entry)
    metric.name = name
    return metric
