"""LARS and LAMB: steps scaled to the norm of each variable, for training with very large batches.

The norms are those of whole variables, after the sum over the replicas, so every rank finds the same by itself; for a
variable that is split over the ranks of a replica these add up the squares of their parts.  Both read a variable twice:
once for the norms, once to update it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy

from mpidist import arrays
from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions, OptionsButDecay, Unpack
from mpidist.optimizers.rule import Step, checked_momentum, checked_rate, is_found, patterns
from mpidist.variables import sums_over_parts


class LayerwiseOptimizer(Optimizer):
    """Base of LARS and LAMB.

    The weight decay is part of the step whose norm is taken; `step_of` puts it behind the other coefficients, and the
    ratio that scales the step goes behind that.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    exclude_from_layer_adaptation : iterable of str
        Regular expressions; variables with a name in which one is found are updated with a ratio of 1.  Only these may
        have several shards on parameter servers.
    **options
        See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        exclude_from_layer_adaptation: Iterable[str] = (),
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self.not_adapted = patterns(exclude_from_layer_adaptation, "exclude_from_layer_adaptation")
        super().__init__(learning_rate, **options)

    @property
    def takes_slices(self) -> bool:
        return False

    def takes_slices_of(self, variable: Any) -> bool:
        return any(is_found(pattern, variable) for pattern in self.not_adapted)

    def step_of(self, variable: Any, learning_rate: float, coefficients: tuple[float, ...], factor: float) -> Step:
        ratio = 1.0 if self.takes_slices_of(variable) else math.nan
        return Step((*coefficients, self.decay_of(variable), ratio), factor, variable=variable)

    def update(self, parameter: Any, gradient: Any, slots: list[Any], step: Step) -> None:
        *others, ratio = step.coefficients
        known = (*others, 1.0)
        sums = [0.0, 0.0]
        for p, g, s, scratch, _ in self._slices(parameter, gradient, slots, step.factor):
            measured = self.measure_slice(p, g, s, scratch, known)
            sums = [total + part for total, part in zip(sums, measured, strict=True)]
        if math.isnan(ratio):
            sums = sums_over_parts([step.variable] * 2, sums)
            stays = self._leaves_norms_there and arrays.is_device(parameter)
            root: Any = numpy.sqrt if stays else lambda total: math.sqrt(arrays.number(total))
            ratio = self.ratio(root(sums[0]), root(sums[1]), others[-1])
            ratio = ratio if stays else float(arrays.number(ratio))
        super().update(parameter, gradient, slots, dataclasses.replace(step, coefficients=(*others, ratio)))

    @property
    def _leaves_norms_there(self) -> bool:
        """Whether norms and ratio may lie on a device, for which the host does not wait; users' rules take floats."""
        family = type(self)
        return all(each.__module__ == __name__ for each in (family.measure_slice, family.ratio, family.update_slice))

    def measure_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> tuple[Any, Any]:
        """Return the sums of squares of a slice of the parameter and of what it is compared to.  Local.

        Those of arrays in device memory lie there.  May bring `slots` up to date, which `update_slice` then leaves as
        they are.
        """
        raise NotImplementedError

    def ratio(self, parameter_norm: Any, step_norm: Any, weight_decay: float) -> Any:
        """Return what the step is scaled by; 1 where a norm is 0.  Local.

        Norms are floats; those of LARS and LAMB themselves may lie on a device, and so may what they return.
        """
        raise NotImplementedError


class LARS(LayerwiseOptimizer):
    """Momentum with a learning rate for each variable (You, Gitman and Ginsburg, 2017, arXiv:1708.03888, algorithm 1).

    ``ratio = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))``, then
    ``velocity = momentum * velocity + learning_rate * ratio * (g + weight_decay * p)`` and ``p -= velocity``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    momentum : float
        From 0 to 1.
    trust_coefficient : float
    weight_decay : float
    exclude_from_layer_adaptation : iterable of str
        See `LayerwiseOptimizer`.
    **options
        See `Optimizer`.
    """

    slot_names = ("momentum",)

    def __init__(
        self,
        learning_rate: LearningRate = 0.1,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        weight_decay: float = 0.0005,
        exclude_from_layer_adaptation: Iterable[str] = (),
        **options: Unpack[OptionsButDecay],
    ) -> None:
        self.momentum = checked_momentum(momentum)
        self.trust_coefficient = trust_coefficient
        super().__init__(learning_rate, exclude_from_layer_adaptation, weight_decay=weight_decay, **options)

    def measure_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> tuple[Any, Any]:
        return _square_sum(parameter, scratch[0]), _square_sum(gradient, scratch[0])

    def ratio(self, parameter_norm: Any, step_norm: Any, weight_decay: float) -> Any:
        is_zero = (parameter_norm == 0) | (step_norm == 0)
        lengths = step_norm + weight_decay * parameter_norm + is_zero
        return numpy.where(is_zero, 1.0, self.trust_coefficient * parameter_norm / lengths)

    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        learning_rate, decay, ratio = coefficients
        (velocity,), step = slots, scratch[0]
        numpy.multiply(parameter, decay, out=step)
        numpy.add(step, gradient, out=step)
        numpy.multiply(step, learning_rate * ratio, out=step)
        numpy.multiply(velocity, self.momentum, out=velocity)
        numpy.add(velocity, step, out=velocity)
        numpy.subtract(parameter, velocity, out=parameter)


class LAMB(LayerwiseOptimizer):
    """Adam with a learning rate for each variable (You et al., 2020, arXiv:1904.00962, algorithm 2).

    Running means m and v as in `Adam`, both corrected for their start; ``step = m / (sqrt(v) + epsilon) +
    weight_decay * p``, then ``p -= learning_rate * norm(p) / norm(step) * step``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    beta_1, beta_2 : float
    epsilon : float
    weight_decay : float, optional
        As in the paper it is part of the step whose norm is taken; Keras decays the weights apart from it.
    exclude_from_layer_adaptation : iterable of str
        See `LayerwiseOptimizer`.
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
        weight_decay: float | None = None,
        exclude_from_layer_adaptation: Iterable[str] = (),
        **options: Unpack[OptionsButDecay],
    ) -> None:
        self.beta_1 = checked_rate("beta_1", beta_1)
        self.beta_2 = checked_rate("beta_2", beta_2)
        self.epsilon = epsilon
        super().__init__(learning_rate, exclude_from_layer_adaptation, weight_decay=weight_decay, **options)

    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        step = iterations + 1
        return (learning_rate, 1 - self.beta_1**step, 1 - self.beta_2**step)

    def measure_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> tuple[Any, Any]:
        (m, v), (step, other, *_) = slots, scratch
        numpy.subtract(gradient, m, out=step)
        numpy.multiply(step, 1 - self.beta_1, out=step)
        numpy.add(m, step, out=m)
        numpy.multiply(gradient, gradient, out=step)
        numpy.subtract(step, v, out=step)
        numpy.multiply(step, 1 - self.beta_2, out=step)
        numpy.add(v, step, out=v)
        self._step(parameter, slots, scratch, coefficients)
        return _square_sum(parameter, other), _square_sum(step, other)

    def ratio(self, parameter_norm: Any, step_norm: Any, weight_decay: float) -> Any:
        is_zero = (parameter_norm == 0) | (step_norm == 0)
        return numpy.where(is_zero, 1.0, parameter_norm / (step_norm + is_zero))

    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        learning_rate, *_, ratio = coefficients
        self._step(parameter, slots, scratch, coefficients)
        numpy.multiply(scratch[0], learning_rate * ratio, out=scratch[0])
        numpy.subtract(parameter, scratch[0], out=parameter)

    def _step(self, parameter: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]) -> None:
        """Write the step, not yet scaled, to the first scratch array."""
        _, mean_start, square_start, decay, _ = coefficients
        (m, v), (step, root, *_) = slots, scratch
        numpy.divide(v, square_start, out=root)
        numpy.sqrt(root, out=root)
        numpy.add(root, self.epsilon, out=root)
        numpy.divide(m, mean_start, out=step)
        numpy.divide(step, root, out=step)
        if decay:
            numpy.multiply(parameter, decay, out=root)
            numpy.add(step, root, out=step)


def _square_sum(array: Any, buffer: Any) -> Any:
    numpy.multiply(array, array, out=buffer)
    return buffer.sum(dtype="float64")
