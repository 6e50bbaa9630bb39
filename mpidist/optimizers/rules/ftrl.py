"""The rule of Ftrl."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from mpidist.optimizers.rules.rule import Rule


class FtrlRule(Rule):
    """The rule of `Ftrl`."""

    slot_names = ("accumulator", "linear")
    scratch_count = 2
    learning_rate_power: float
    initial_accumulator_value: float
    l1_regularization_strength: float
    l2_regularization_strength: float
    l2_shrinkage_regularization_strength: float
    beta: float

    def initial_slots(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        if not learning_rate > 0:
            raise ValueError(
                f"Ftrl divides by the learning rate, which must be above 0; got {learning_rate} after {iterations} "
                "steps. Give a schedule that stays above 0"
            )
        return learning_rate, 2 * self.l2_regularization_strength + self.beta / learning_rate

    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        (accumulator, linear), (root, change, *_), (rate, penalty) = slots, scratch, coefficients
        l1, shrinkage = self.l1_regularization_strength, self.l2_shrinkage_regularization_strength
        self._root_of(accumulator, change)
        numpy.multiply(gradient, gradient, out=root)
        numpy.add(accumulator, root, out=accumulator)
        self._root_of(accumulator, root)
        numpy.subtract(root, change, out=change)
        numpy.divide(change, rate, out=change)
        if shrinkage:
            numpy.subtract(change, 2 * shrinkage, out=change)
        numpy.multiply(change, parameter, out=change)
        numpy.add(linear, gradient, out=linear)
        numpy.subtract(linear, change, out=linear)
        numpy.divide(root, rate, out=root)
        # the smallest number is nothing beside any other, and makes 0 of an element that never had a gradient
        numpy.add(root, penalty + float(numpy.finfo(root.dtype).tiny), out=root)
        numpy.clip(linear, -l1, l1, out=change)
        numpy.subtract(change, linear, out=change)
        numpy.divide(change, root, out=parameter)

    def _root_of(self, accumulator: Any, out: Any) -> None:
        """Write ``accumulator ** -learning_rate_power``."""
        if self.learning_rate_power == -0.5:
            numpy.sqrt(accumulator, out=out)
        else:
            numpy.power(accumulator, -self.learning_rate_power, out=out)
