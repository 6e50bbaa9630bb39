"""The rule of gradient descent, with momentum if asked."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist.optimizers.rules.rule import Rule


class SGDRule(Rule):
    """The rule of `SGD`."""

    momentum: float
    nesterov: bool

    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        return (learning_rate,)

    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        if slots:
            SGDRule.renew_slice(self, parameter, parameter, gradient, slots, slots, scratch, coefficients)
            return
        (step,) = scratch
        numpy.multiply(gradient, coefficients[0], out=step)
        numpy.subtract(parameter, step, out=parameter)

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
        (learning_rate,), (step,) = coefficients, scratch
        if not slots:
            numpy.multiply(gradient, learning_rate, out=new)
            numpy.subtract(parameter, new, out=new)
            return
        (new_velocity,), (velocity,) = new_slots, slots
        numpy.multiply(gradient, learning_rate, out=step)
        numpy.multiply(velocity, self.momentum, out=new_velocity)
        numpy.subtract(new_velocity, step, out=new_velocity)
        if not self.nesterov:
            numpy.add(parameter, new_velocity, out=new)
            return
        numpy.subtract(parameter, step, out=new)
        numpy.multiply(new_velocity, self.momentum, out=step)
        numpy.add(new, step, out=new)
