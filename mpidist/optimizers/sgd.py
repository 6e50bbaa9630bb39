"""Stochastic gradient descent, with momentum if asked."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions, Unpack
from mpidist.optimizers.rule import checked_momentum


class SGD(Optimizer):
    """Gradient descent: ``p -= learning_rate * g``.

    With momentum: ``velocity = momentum * velocity - learning_rate * g``, then ``p += velocity``; or, with
    `nesterov`, ``p += momentum * velocity - learning_rate * g``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    momentum : float
        From 0 to 1.
    nesterov : bool
    **options
        See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self.momentum = checked_momentum(momentum)
        self.nesterov = nesterov
        self.slot_names = ("momentum",) if momentum else ()
        self.zero_gradient_changes_nothing = not momentum
        super().__init__(learning_rate, **options)

    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        if slots:
            SGD.renew_slice(self, parameter, parameter, gradient, slots, slots, scratch, coefficients)
            return
        (step,) = scratch
        numpy.multiply(gradient, coefficients[0], out=step)
        numpy.subtract(parameter, step, out=parameter)

    def formula(self, coefficients: tuple[float, ...]) -> tuple[str, dict[str, float]]:
        step = "real step = g * rate;"
        if self.slot_names:
            step += " momentum = momentum * kept - step;"
            step += " p = p - step + momentum * kept;" if self.nesterov else " p += momentum;"
        else:
            step += " p -= step;"
        return step, {"rate": coefficients[0], "kept": self.momentum}

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
