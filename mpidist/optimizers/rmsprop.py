"""RMSprop (Tieleman and Hinton, 2012): steps divided by a running root mean square of the gradient."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions, Unpack
from mpidist.optimizers.rule import checked_momentum, checked_rate


class RMSprop(Optimizer):
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

    scratch_count = 2

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self.rho = checked_rate("rho", rho)
        self.momentum = checked_momentum(momentum)
        self.epsilon = epsilon
        self.centered = centered
        self.slot_names = ("velocity", *["average_gradient"] * centered, *["momentum"] * (momentum > 0))
        super().__init__(learning_rate, **options)

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
