"""The rule of Adagrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from mpidist.optimizers.rules.rule import Rule


class AdagradRule(Rule):
    """The rule of `Adagrad`."""

    slot_names = ("accumulator",)
    zero_gradient_changes_nothing = True
    initial_accumulator_value: float
    epsilon: float

    def initial_slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        return (learning_rate,)

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
