"""The rule of Adam."""

from __future__ import annotations

import math
from typing import Any

import numpy

from mpidist.optimizers.rules.rule import Rule


class AdamRule(Rule):
    """The rule of `Adam`."""

    slot_names = ("momentum", "velocity")
    scratch_count = 2
    beta_1: float
    beta_2: float
    epsilon: float

    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        step = iterations + 1
        return (learning_rate * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step),)

    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        AdamRule.renew_slice(self, parameter, parameter, gradient, slots, slots, scratch, coefficients)

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
