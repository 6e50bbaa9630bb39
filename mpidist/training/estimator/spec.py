"""`ModelFunction` calls a model function for one of `ModeKeys`; `EstimatorSpec` and `TrainOp` are what that returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mpidist.errors import quoted
from mpidist.optimizers import Optimizer
from mpidist.training.estimator.hooks import SessionRunHook, checked_hooks

_KNOWN = ("features", "labels", "mode", "params", "config")


class ModeKeys:
    """The modes of a model function, as TensorFlow spells them.

    Attributes
    ----------
    TRAIN : str
        ``"train"``.
    EVAL : str
        ``"eval"``.
    PREDICT : str
        ``"infer"``.
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


#: All of them.
_MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)


class TrainOp(NamedTuple):
    """A training step: an optimizer, and the function whose gradients it applies.

    Parameters
    ----------
    optimizer : Optimizer
    value_and_grad_fn : callable
        ``fn(parameters, features, labels)`` returns ``(loss, gradients)``: the mean loss over the rows given, and its
        gradient in the structure of the parameters.
    """

    optimizer: Optimizer
    value_and_grad_fn: Callable[..., Any]


class EstimatorSpec:
    """The model of one mode.  Local.

    NumPy has no symbolic tensors.  What is a tensor in TensorFlow's specification is a function here.  A function gets
    ``parameters`` in the structure of `variables`, with the value of each variable in its place.

    Parameters
    ----------
    mode : str
        One of `ModeKeys`.
    predictions : callable, optional
        ``fn(parameters, features)`` returns an array with one row for each row of the features, or a dict of such
        arrays.  PREDICT needs it; so does EVAL where there are metrics.
    loss : callable, optional
        ``fn(parameters, features, labels)`` returns the mean loss over the rows given, or ``(loss, predictions)``.
        TRAIN and EVAL need it.
    train_op : TrainOp, optional
        TRAIN needs it.
    eval_metric_ops : mapping, optional
        Name of a result -> `Metric`, the name of one, a function ``fn(labels, predictions)`` that returns a value for
        each row, or ``(metric, key)``, where the predictions are a dict and the metric is about one entry.
    training_hooks, training_chief_hooks, evaluation_hooks, prediction_hooks : sequence of SessionRunHook
        Beside those of the call; chief hooks run on the chief alone.
    variables : variable, or nested lists, tuples and dicts of variables
        All of the model, made by the model function.  Checkpoints have them under these names.

    Raises
    ------
    ValueError
        The mode is unknown, or its loss, training step, predictions or variables are missing.
    TypeError
        Something is not what it should be.
    """

    def __init__(
        self,
        mode: str,
        predictions: Callable[..., Any] | None = None,
        loss: Callable[..., Any] | None = None,
        train_op: TrainOp | None = None,
        eval_metric_ops: Mapping[str, Any] | None = None,
        training_hooks: Sequence[SessionRunHook] = (),
        training_chief_hooks: Sequence[SessionRunHook] = (),
        evaluation_hooks: Sequence[SessionRunHook] = (),
        prediction_hooks: Sequence[SessionRunHook] = (),
        *,
        variables: Any = None,
    ) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode must be one of ModeKeys ({', '.join(map(repr, _MODES))}), got {mode!r}")
        _require(mode, predictions=predictions, loss=loss, train_op=train_op)
        _require_function("predictions", predictions, "parameters, features")
        _require_function("loss", loss, "parameters, features, labels")
        _require_train_op(train_op)
        if variables is None:
            raise ValueError("Missing variables: give EstimatorSpec(variables={...}) all variables of the model")
        self.mode = mode
        self.predictions, self.loss, self.train_op = predictions, loss, train_op
        self.eval_metric_ops = dict(eval_metric_ops or {})
        self.training_hooks = checked_hooks(training_hooks)
        self.training_chief_hooks = checked_hooks(training_chief_hooks)
        self.evaluation_hooks = checked_hooks(evaluation_hooks)
        self.prediction_hooks = checked_hooks(prediction_hooks)
        self.variables = variables


#: Mode -> what it cannot do without.
_NEEDS = {ModeKeys.TRAIN: ("loss", "train_op"), ModeKeys.EVAL: ("loss",), ModeKeys.PREDICT: ("predictions",)}


def _require(mode: str, **given: Any) -> None:
    for name in _NEEDS[mode]:
        if given[name] is None:
            raise ValueError(f"Missing {name}. An EstimatorSpec of mode {mode!r} needs {' and '.join(_NEEDS[mode])}")


def _require_function(name: str, value: Any, parameters: str) -> None:
    if value is not None and not callable(value):
        raise TypeError(
            f"{name} must be a function fn({parameters}), got {type(value).__name__}: a model function is called once, "
            "and returns functions of the batches to come"
        )


def _require_train_op(train_op: Any) -> None:
    if train_op is None:
        return
    if not isinstance(train_op, TrainOp):
        raise TypeError(
            f"train_op must be a mpidist.estimator.TrainOp(optimizer, value_and_grad_fn), got {type(train_op).__name__}"
        )
    if not isinstance(train_op.optimizer, Optimizer):
        kind = type(train_op.optimizer).__name__
        raise TypeError(f"the optimizer of a TrainOp must be a mpidist.optimizers.Optimizer, got {kind}")
    _require_function("value_and_grad_fn of a TrainOp", train_op.value_and_grad_fn, "parameters, features, labels")
    if train_op.value_and_grad_fn is None:
        raise TypeError("value_and_grad_fn of a TrainOp must be a function, got None")


class ModelFunction:
    """A model function, called with those arguments that it names.  All Local.

    The function has some of the parameters ``features, labels, mode, params, config``, ``features`` at least.
    TypeError where it is no function; ValueError where it has others, no ``features``, or no ``params`` where there are
    some.
    """

    def __init__(self, model_fn: Callable[..., EstimatorSpec], params: Any) -> None:
        if not callable(model_fn):
            raise TypeError(f"model_fn must be a function, got {type(model_fn).__name__}")
        self.fn = model_fn
        self._name = getattr(model_fn, "__name__", type(model_fn).__name__)
        self._accepted = list(inspect.signature(model_fn).parameters)
        if "features" not in self._accepted:
            raise ValueError(f"model_fn ({self._name}) must include features argument.")
        if params is not None and "params" not in self._accepted:
            raise ValueError(
                f"model_fn ({self._name}) does not include params argument, but params {quoted(params)} is given."
            )
        if unknown := [name for name in self._accepted if name not in _KNOWN]:
            raise ValueError(f"model_fn ({self._name}) has following not expected args: {unknown}; known: {_KNOWN}")

    def __call__(self, features: Any, labels: Any, mode: str, params: Any, config: Any) -> EstimatorSpec:
        """Return the model of a mode.

        ValueError where there are labels and the function takes none, or the model is of another mode; TypeError where
        it returns no EstimatorSpec.
        """
        if labels is not None and "labels" not in self._accepted:
            raise ValueError(f"model_fn ({self._name}) does not take labels, but input_fn returns labels.")
        given = dict(zip(_KNOWN, (features, labels, mode, params, config), strict=True))
        spec = self.fn(**{name: given[name] for name in self._accepted})
        if not isinstance(spec, EstimatorSpec):
            raise TypeError(f"model_fn ({self._name}) should return an EstimatorSpec, got {type(spec).__name__}")
        if spec.mode != mode:
            raise ValueError(f"model_fn ({self._name}) returned an EstimatorSpec of mode {spec.mode!r} for {mode!r}")
        return spec
