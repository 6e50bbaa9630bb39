"""Adagrad (Duchi, Hazan and Singer, 2011): rare gradients take larger steps than frequent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions
from mpidist.optimizers.rules.adagrad import AdagradRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adagrad(AdagradRule, Optimizer):
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
