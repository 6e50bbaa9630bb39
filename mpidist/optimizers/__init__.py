"""Optimizers with Keras' meaning, working in place on flat slices; one file a family."""

from __future__ import annotations

from mpidist.optimizers.adam import Adam, AdamW
from mpidist.optimizers.base import Optimizer
from mpidist.optimizers.sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
