"""RMSprop (Tieleman and Hinton, 2012): steps divided by a running root mean square of the gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions
from mpidist.optimizers.rules.rmsprop import RMSpropRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class RMSprop(RMSpropRule, Optimizer):
    """Steps divided by a running root mean square of the gradient, or, centered, by its running deviation.

    ``velocity = rho * velocity + (1 - rho) * g * g``, then ``p -= learning_rate * g / sqrt(velocity + epsilon)``.
    With `centered` the square of a running mean of the gradient is taken from the velocity in the root.  With
    `momentum` the steps are summed: ``sum = momentum * sum + step``, then ``p -= sum``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    rho : float
    momentum : float
    epsilon : float
    centered : bool
    **options
        See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be from 0 to 1, got {momentum}")
        self.rho = rho
        self.momentum = momentum
        self.epsilon = epsilon
        self.centered = centered
        self.slot_names = ("velocity", *["average_gradient"] * centered, *["momentum"] * (momentum > 0))
        super().__init__(learning_rate, **options)
