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
        (learning_rate,), (step,) = coefficients, scratch
        numpy.multiply(gradient, learning_rate, out=step)
        if not slots:
            numpy.subtract(parameter, step, out=parameter)
            return
        (velocity,) = slots
        numpy.multiply(velocity, self.momentum, out=velocity)
        numpy.subtract(velocity, step, out=velocity)
        if not self.nesterov:
            numpy.add(parameter, velocity, out=parameter)
            return
        numpy.subtract(parameter, step, out=parameter)
        numpy.multiply(velocity, self.momentum, out=step)
        numpy.add(parameter, step, out=parameter)

    def renew_slice(
        self,
        new: Any,
        parameter: Any,
        gradient: Any,
        slots: list[Any],
        scratch: list[Any],
        coefficients: tuple[float, ...],
    ) -> None:
        if slots:
            super().renew_slice(new, parameter, gradient, slots, scratch, coefficients)
            return
        numpy.multiply(gradient, coefficients[0], out=new)
        numpy.subtract(parameter, new, out=new)
