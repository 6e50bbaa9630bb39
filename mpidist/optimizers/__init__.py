"""Optimizers with Keras' meaning, working in place on flat slices; one file a family."""

from __future__ import annotations

from mpidist.hints import public_module
from mpidist.optimizers import schedules
from mpidist.optimizers.adagrad import Adagrad
from mpidist.optimizers.adam import Adam, AdamW
from mpidist.optimizers.base import Optimizer
from mpidist.optimizers.ftrl import Ftrl
from mpidist.optimizers.layerwise import LAMB, LARS
from mpidist.optimizers.loss_scale import LossScaleOptimizer
from mpidist.optimizers.rmsprop import RMSprop
from mpidist.optimizers.sgd import SGD

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "LossScaleOptimizer",
    "Optimizer",
    "RMSprop",
    "schedules",
]

public_module(__name__)
