"""TensorFlow's Estimator, under its public name."""

from typing import TYPE_CHECKING

from mpidist.hints import public_module
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
from mpidist.training.estimator.modes import ModeKeys
from mpidist.training.estimator.run_config import RunConfig
from mpidist.training.estimator.spec import EstimatorSpec, TrainOp
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
    "train_and_evaluate",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
