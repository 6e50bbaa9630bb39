"""Optimizers by name, one of each kind, by which tests show that N ranks equal one."""

from __future__ import annotations

from mpidist.optimizers import LAMB, LARS, SGD, Adagrad, Adam, AdamW, Ftrl, LossScaleOptimizer, RMSprop, schedules

OPTIMIZERS = {
    "sgd": lambda: SGD(0.1),
    "momentum": lambda: SGD(0.1, momentum=0.9),
    "nesterov": lambda: SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: Adam(0.01),
    "adamw": lambda: AdamW(0.01, weight_decay=0.01),
    "adagrad": lambda: Adagrad(0.1),
    "ftrl": lambda: Ftrl(0.1, l1_regularization_strength=0.001, l2_shrinkage_regularization_strength=0.01),
    "rmsprop": lambda: RMSprop(0.01, momentum=0.5),
    "centered": lambda: RMSprop(0.01, centered=True),
    "lars": lambda: LARS(0.5, trust_coefficient=0.1),
    "lamb": lambda: LAMB(0.01, weight_decay=0.01),
    "clipvalue": lambda: SGD(0.1, clipvalue=0.05),
    "clipnorm": lambda: SGD(0.1, momentum=0.9, clipnorm=0.1),
    "global": lambda: Adam(0.01, global_clipnorm=0.1),
    "accumulated": lambda: Adam(0.01, gradient_accumulation_steps=3),
    "scaled": lambda: LossScaleOptimizer(SGD(0.1), 2.0**10),
    "schedule": lambda: SGD(schedules.WarmUp(schedules.CosineDecay(0.2, 15), 5), momentum=0.9),
}
