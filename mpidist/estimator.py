"""TensorFlow's Estimator, under its public name."""

import importlib
import os
from typing import Any

from mpidist.errors import MissingDependencyError
from mpidist.hints import public_module
from mpidist.packages import pip_install
from mpidist.training.estimator.estimator import Estimator
from mpidist.training.estimator.hooks import (
    CheckpointSaverListener,
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    StopAtStepHook,
)
from mpidist.training.estimator.linear import LinearClassifier, LinearRegressor
from mpidist.training.estimator.run_config import RunConfig
from mpidist.training.estimator.spec import EstimatorSpec, ModeKeys, TrainOp
from mpidist.training.estimator.train_and_evaluate import EvalSpec, TrainSpec, train_and_evaluate
from mpidist.training.estimator.train_loop import NanLossDuringTrainingError

__all__ = [
    "CheckpointSaverListener",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "LinearClassifier",
    "LinearRegressor",
    "ModeKeys",
    "NanLossDuringTrainingError",
    "RunConfig",
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StopAtStepHook",
    "TrainOp",
    "TrainSpec",
    "model_to_estimator",
    "train_and_evaluate",
]


def model_to_estimator(
    keras_model: Any, model_dir: str | os.PathLike[str] | None = None, config: RunConfig | None = None
) -> Estimator:
    """Return an Estimator that trains the weights of a compiled Keras 3 model, with the backend JAX or PyTorch.

    Training begins with the weights that the model has now; the model keeps these.  Those that are trained are in the
    checkpoints, under their paths in the model (`Estimator.get_variable_value`).  Loss, metrics and the settings of the
    optimizer are those of `compile`.  Predictions are a dict with the name of the output.

    Collective: every rank calls it in the same order, with the same model.

    Parameters
    ----------
    keras_model : keras.Model
        Built, compiled with one loss, and made outside of `Strategy.scope`.
    model_dir : str or Path, optional
    config : RunConfig, optional

    Raises
    ------
    TypeError, ValueError
        It is no Keras model, is not compiled or not built, or trains over ranks by itself.
    NotImplementedError
        An optimizer other than SGD, Adam, AdamW, Adagrad, Ftrl and RMSprop, several outputs, or a loss that is no mean.
        When it trains: a layer that changes variables itself, such as batch normalization and dropout.
    MissingDependencyError
        Keras is not installed.
    """
    try:
        module = importlib.import_module("mpidist.frameworks.keras.model_function")
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"model_to_estimator needs Keras 3 with JAX or PyTorch: {pip_install('keras', 'jax')} ({error})"
        ) from error
    found: Estimator = module.to_estimator(keras_model, model_dir, config)
    return found


public_module(__name__)
