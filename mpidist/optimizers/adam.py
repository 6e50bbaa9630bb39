"""Adam (Kingma and Ba, 2015), and AdamW, which decays the weights by themselves (Loshchilov and Hutter, 2019)."""

from __future__ import annotations

import math
from typing import Any

import numpy

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions, OptionsButDecay, Unpack
from mpidist.optimizers.rule import checked_rate


class Adam(Optimizer):
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

    slot_names = ("momentum", "velocity")
    scratch_count = 2

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        super().__init__(learning_rate, **options)
        self.beta_1 = checked_rate("beta_1", beta_1)
        self.beta_2 = checked_rate("beta_2", beta_2)
        self.epsilon = epsilon

    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        step = iterations + 1
        return (learning_rate * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step),)

    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        Adam.renew_slice(self, parameter, parameter, gradient, slots, slots, scratch, coefficients)

    def formula(self, coefficients: tuple[float, ...]) -> tuple[str, dict[str, float]]:
        statement = """
            momentum += (g - momentum) * rate_1;
            velocity += (g * g - velocity) * rate_2;
            real root = sqrt(velocity);
            p -= momentum * alpha / (root + epsilon);
        """
        rates = {"rate_1": 1 - self.beta_1, "rate_2": 1 - self.beta_2}
        return statement, {"alpha": coefficients[0], **rates, "epsilon": self.epsilon}

    def renew_slice(
        self,
        new: Any,
        parameter: Any,
        gradient: Any,
        new_slots: list[Any],
        slots: list[Any],
        scratch: list[Any],
        coefficients: tuple[float, ...],
    ) -> None:
        alpha, (new_m, new_v), (m, v), (a, b) = coefficients[0], new_slots, slots, scratch
        numpy.subtract(gradient, m, out=a)
        numpy.multiply(a, 1 - self.beta_1, out=a)
        numpy.add(m, a, out=new_m)
        numpy.multiply(gradient, gradient, out=a)
        numpy.subtract(a, v, out=a)
        numpy.multiply(a, 1 - self.beta_2, out=a)
        numpy.add(v, a, out=new_v)
        numpy.sqrt(new_v, out=a)
        numpy.add(a, self.epsilon, out=a)
        numpy.multiply(new_m, alpha, out=b)
        numpy.divide(b, a, out=b)
        numpy.subtract(parameter, b, out=new)


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
