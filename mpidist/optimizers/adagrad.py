"""Adagrad (Duchi, Hazan and Singer, 2011): rare gradients take larger steps than frequent ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions, Unpack


class Adagrad(Optimizer):
    """Steps divided by the root of all squared gradients so far.

    ``accumulator += g * g``, then ``p -= learning_rate * g / sqrt(accumulator + epsilon)``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    initial_accumulator_value : float
        0 or more.
    epsilon : float
    **options
        See `Optimizer`.
    """

    slot_names = ("accumulator",)
    zero_gradient_changes_nothing = True

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        if not initial_accumulator_value >= 0:
            raise ValueError(f"initial_accumulator_value must be 0 or more, got {initial_accumulator_value}")
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon
        super().__init__(learning_rate, **options)

    def initial_slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        (accumulator,), (root, *_) = slots, scratch
        numpy.multiply(gradient, gradient, out=root)
        numpy.add(accumulator, root, out=accumulator)
        numpy.add(accumulator, self.epsilon, out=root)
        numpy.sqrt(root, out=root)
        numpy.divide(gradient, root, out=root)
        numpy.multiply(root, coefficients[0], out=root)
        numpy.subtract(parameter, root, out=parameter)
