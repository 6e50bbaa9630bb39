"""`KerasModelFunction`: a compiled Keras model as the model function of an `Estimator`.

The weights become variables of the Estimator's strategy, and the optimizer becomes one of mpidist with the same
settings.  The model itself is only called, statelessly, and keeps the weights that it had.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy

from mpidist.errors import quoted
from mpidist.frameworks.keras import backends, checks, metrics
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.classes import is_distributed
from mpidist.frameworks.keras.kept_metrics import kept_metrics
from mpidist.frameworks.keras.own_optimizer import own_optimizer
from mpidist.frameworks.keras.variables import free_name
from mpidist.training.estimator.estimator import Estimator
from mpidist.training.estimator.run_config import RunConfig
from mpidist.training.estimator.spec import EstimatorSpec, ModeKeys, TrainOp
from mpidist.variables import Variable


def to_estimator(
    keras_model: Any, model_dir: str | os.PathLike[str] | None = None, config: RunConfig | None = None
) -> Estimator:
    """Return an Estimator of a compiled Keras model; see `mpidist.estimator.model_to_estimator`."""
    return Estimator(KerasModelFunction(keras_model), model_dir, config)


class KerasModelFunction:
    """The functions of a model that an `EstimatorSpec` needs.

    `model`: built, and compiled with one loss.  TypeError: it is no Keras model.  ValueError: it is not compiled, not
    built, or trains over ranks by itself.  NotImplementedError: its loss, its optimizer or the backend is one that is
    not converted.
    """

    def __init__(self, model: keras.Model) -> None:
        _require_trainable(model)
        self._model = model
        names: set[str] = set()
        self._names = [free_name(each.path, names) for each in model.variables]
        place_of = {id(each): place for place, each in enumerate(model.variables)}
        self._trained = [place_of[id(each)] for each in model.trainable_variables]
        self._others = [place_of[id(each)] for each in model.non_trainable_variables]
        self._output = (getattr(model, "output_names", None) or ["output_1"])[0]
        self._loss = _mean_loss(model.loss)
        self._metrics = kept_metrics(model, self._output)
        self._optimizer = own_optimizer(model.optimizer)
        seam = backends.seam()
        self._value_and_grad = seam.value_and_grad(self._training_loss)
        self._evaluated = seam.without_gradients(self._evaluation)
        self._predicted = seam.without_gradients(self._prediction)

    def __call__(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        """Return the model of a mode.  Collective where the strategy has several replicas."""
        trained = set(self._trained)
        variables = {
            name: Variable(to_numpy(each), trainable=place in trained, name=name)
            for place, (name, each) in enumerate(zip(self._names, self._model.variables, strict=True))
        }
        is_trained = mode == ModeKeys.TRAIN
        return EstimatorSpec(
            mode,
            predictions=self._predict,
            loss=self._evaluate,
            train_op=TrainOp(self._optimizer(), self._train) if is_trained else None,
            eval_metric_ops=self._metrics() if mode == ModeKeys.EVAL else None,
            variables=variables,
        )

    # -- what an Estimator calls ---------------------------------------------------------------------------------------

    def _train(self, parameters: Mapping[str, Any], features: Any, labels: Any) -> Any:
        loss, found = self._value_and_grad(*self._weights(parameters), features, labels)
        gradients: dict[str, Any] = dict.fromkeys(self._names, 0.0)
        gradients.update({self._names[place]: each for place, each in zip(self._trained, found, strict=True)})
        return metrics.number(loss), gradients

    def _evaluate(self, parameters: Mapping[str, Any], features: Any, labels: Any) -> Any:
        loss, predictions = self._evaluated(*self._weights(parameters), features, labels)
        return metrics.number(loss), {self._output: to_numpy(predictions)}

    def _predict(self, parameters: Mapping[str, Any], features: Any) -> Any:
        return {self._output: to_numpy(self._predicted(*self._weights(parameters), features))}

    def _weights(self, parameters: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
        """Return the values of weights that are trained, and of others."""
        values = [numpy.array(parameters[name]) for name in self._names]  # memory that nobody writes to again
        return [values[place] for place in self._trained], [values[place] for place in self._others]

    # -- in terms of Keras ---------------------------------------------------------------------------------------------

    def _called(self, trained: Any, others: Any, features: Any, training: bool) -> tuple[Any, Any]:
        """Return the predictions, and the sum of the losses that layers add."""
        tensors = [keras.ops.convert_to_tensor(each) for each in others]
        trained = [keras.ops.convert_to_tensor(each) for each in trained]
        predictions, after, losses = self._model.stateless_call(
            trained, tensors, features, training=training, return_losses=True
        )
        if isinstance(predictions, (list, tuple, dict)):
            raise NotImplementedError("model_to_estimator converts models with one output; this one has several")
        for place, before, now in zip(self._others, tensors, after, strict=True):
            if now is not before:
                raise NotImplementedError(
                    f"the model changes variable {self._names[place]!r} while it trains, as batch normalization and "
                    "dropout do, which an Estimator cannot follow: train it with model.fit in strategy.scope()"
                )
        return predictions, sum(losses)

    def _training_loss(self, trained: Any, others: Any, features: Any, labels: Any) -> Any:
        predictions, added = self._called(trained, others, features, training=True)
        return self._loss_of(labels, predictions) + added

    def _evaluation(self, trained: Any, others: Any, features: Any, labels: Any) -> Any:
        predictions, added = self._called(trained, others, features, training=False)
        return self._loss_of(labels, predictions) + added, predictions

    def _loss_of(self, labels: Any, predictions: Any) -> Any:
        checks.require_no_mask(predictions, "model_to_estimator")
        with checks.losses_of_rows([self._loss], None, "model_to_estimator"):
            return self._loss(labels, predictions)

    def _prediction(self, trained: Any, others: Any, features: Any) -> Any:
        return self._called(trained, others, features, training=False)[0]


class _MeanOf(keras.losses.Loss):
    """The mean of a function of labels and predictions, which get as many axes as each other, as by Keras."""

    def __init__(self, fn: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.fn = fn

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.fn(_like(y_true, y_pred), _like(y_pred, y_true))


def _like(values: Any, other: Any) -> Any:
    """Return values with an axis of length 1 more or less at their end, where the other ones differ by that alone."""
    axes = len(other.shape)
    if len(values.shape) == 1 and axes == 2 and other.shape[-1] == 1:
        return keras.ops.expand_dims(values, -1)
    return keras.ops.squeeze(values, -1) if len(values.shape) == axes + 1 > 2 and values.shape[-1] == 1 else values


def _mean_loss(given: Any) -> Any:
    """Return a function of labels and predictions that is a mean over rows."""
    if isinstance(given, (list, tuple, dict)):
        raise NotImplementedError(f"model_to_estimator converts models with one loss, got {quoted(given)}")
    loss = keras.losses.get(given)
    if not isinstance(loss, keras.losses.Loss):
        return _MeanOf(loss)
    if loss.reduction not in ("sum_over_batch_size", "mean"):
        raise NotImplementedError(
            f"the loss must be a mean over the rows, as with reduction='sum_over_batch_size'; {type(loss).__name__} "
            f"has reduction={loss.reduction!r}"
        )
    return loss


def _require_trainable(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(f"keras_model must be a keras.Model, got {type(model).__name__}")
    if getattr(model, "optimizer", None) is None or model.loss is None:
        raise ValueError(
            "The given keras model has not been compiled yet. Please compile the model with `model.compile()` before "
            "calling `model_to_estimator`."
        )
    if model.get_compile_config().get("loss_weights") is not None:
        raise NotImplementedError("model_to_estimator takes a loss as it is: compile the model without loss_weights")
    if not model.built or not model.trainable_variables:
        raise ValueError("the model has no weights yet, or none to train: begin it with keras.Input, or call build")
    checks.require_no_constraints(model)
    checks.require_gradients(model)
    checks.require_layers_of_rows(model)
    if is_distributed(model):
        raise ValueError(
            "the model was made in the scope of a strategy, and trains over all ranks by itself: make it outside, and "
            "give the strategy to RunConfig(train_distribute=...)"
        )
    if keras.backend.backend() not in backends.SEAMS:
        raise NotImplementedError(
            f"Keras models become Estimators with the backends jax and torch, and Keras has "
            f"{keras.backend.backend()}: set the environment variable KERAS_BACKEND before Keras is imported"
        )
