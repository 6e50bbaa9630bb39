"""The rule of RMSprop."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist.optimizers.rules.rule import Rule


class RMSpropRule(Rule):
    """The rule of `RMSprop`."""

    scratch_count = 2
    rho: float
    momentum: float
    epsilon: float
    centered: bool

    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        return (learning_rate,)

    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        (velocity, *rest), (root, step, *_) = slots, scratch
        numpy.multiply(gradient, gradient, out=step)
        _move_towards(velocity, step, self.rho)
        if self.centered:
            average = rest.pop(0)
            numpy.copyto(step, gradient)
            _move_towards(average, step, self.rho)
            numpy.multiply(average, average, out=step)
            numpy.subtract(velocity, step, out=root)
            numpy.add(root, self.epsilon, out=root)
        else:
            numpy.add(velocity, self.epsilon, out=root)
        numpy.sqrt(root, out=root)
        numpy.multiply(gradient, coefficients[0], out=step)
        numpy.divide(step, root, out=step)
        if rest:
            numpy.multiply(rest[0], self.momentum, out=rest[0])
            numpy.add(rest[0], step, out=rest[0])
            step = rest[0]
        numpy.subtract(parameter, step, out=parameter)


def _move_towards(mean: Any, value: Any, rho: float) -> None:
    """Set ``mean = rho * mean + (1 - rho) * value``; changes `value`."""
    numpy.multiply(mean, rho, out=mean)
    numpy.multiply(value, 1 - rho, out=value)
    numpy.add(mean, value, out=mean)
