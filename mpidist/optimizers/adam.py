"""Adam (Kingma and Ba, 2015), and AdamW, which decays the weights by themselves (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions, OptionsButDecay
from mpidist.optimizers.rules.adam import AdamRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class Adam(AdamRule, Optimizer):
    """Steps scaled by running means of the gradient and of its square.

    In step t: ``m += (1 - beta_1) * (g - m)``, ``v += (1 - beta_2) * (g * g - v)``, then
    ``p -= learning_rate * sqrt(1 - beta_2 ** t) / (1 - beta_1 ** t) * m / (sqrt(v) + epsilon)``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    beta_1, beta_2 : float
    epsilon : float
    **options
        See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon


class AdamW(Adam):
    """Adam after ``p -= learning_rate * weight_decay * p``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    weight_decay : float
    beta_1, beta_2 : float
    epsilon : float
    **options
        See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[OptionsButDecay],
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, weight_decay=weight_decay, **options)
