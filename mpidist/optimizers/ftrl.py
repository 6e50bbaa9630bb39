"""Ftrl (McMahan and others, 2013): follow the regularized leader, for linear models with few weights that are not 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions, Unpack


class Ftrl(Optimizer):
    """The minimum of all linearized losses so far, with penalties.

    With ``root = accumulator ** -learning_rate_power``, before and after ``accumulator += g * g``:
    ``linear += g + 2 * l2_shrinkage * p - (root_after - root_before) / learning_rate * p``, then
    ``p = (clip(linear, -l1, l1) - linear) / ((root_after + beta) / learning_rate + 2 * l2)``.
    Without penalties, and from 0, these are the steps of `Adagrad` with an epsilon of 0.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.  Above 0 at every step, else that step is a ValueError.
    learning_rate_power : float
        0 or less; at 0 the steps do not shrink.
    initial_accumulator_value : float
        0 or more.
    l1_regularization_strength : float
        0 or more; elements whose `linear` is not larger are exactly 0.
    l2_regularization_strength, l2_shrinkage_regularization_strength : float
        0 or more.
    beta : float
    **options
        See `Optimizer`.  ``weight_decay`` changes `p` before the rule makes a new one of `linear`, as in Keras; a
        penalty is what `l2_regularization_strength` is for.
    """

    slot_names = ("accumulator", "linear")
    scratch_count = 2

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        if not learning_rate_power <= 0:
            raise ValueError(f"learning_rate_power must be 0 or less, got {learning_rate_power}")
        self.learning_rate_power = learning_rate_power
        self.initial_accumulator_value = _not_negative("initial_accumulator_value", initial_accumulator_value)
        self.l1_regularization_strength = _not_negative("l1_regularization_strength", l1_regularization_strength)
        self.l2_regularization_strength = _not_negative("l2_regularization_strength", l2_regularization_strength)
        self.l2_shrinkage_regularization_strength = _not_negative(
            "l2_shrinkage_regularization_strength", l2_shrinkage_regularization_strength
        )
        self.beta = _not_negative("beta", beta)
        super().__init__(learning_rate, **options)

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


def _not_negative(name: str, value: float) -> float:
    if not value >= 0:
        raise ValueError(f"{name} must be 0 or more, got {value}")
    return value
