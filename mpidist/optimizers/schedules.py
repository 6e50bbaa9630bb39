"""Learning rates that follow the steps, with the names and formulas of Keras.  All Local.

Any callable from the number of steps made so far to a float is a schedule; these are the usual ones::

    rate = mpidist.optimizers.schedules.WarmUp(mpidist.optimizers.schedules.CosineDecay(0.1, 1000), steps=100)
    optimizer = mpidist.optimizers.SGD(rate)
"""

from __future__ import annotations

import abc
import bisect
import math
from collections.abc import Callable, Sequence

__all__ = [
    "Constant",
    "CosineDecay",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
    "WarmUp",
]


class LearningRateSchedule(abc.ABC):
    """Base of the schedules: called with the number of steps made so far, returns the learning rate of the next."""

    @abc.abstractmethod
    def __call__(self, step: int) -> float:
        """Return the learning rate after `step` steps.  Local."""


class Constant(LearningRateSchedule):
    """The same rate at every step; to be warmed up."""

    def __init__(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate

    def __call__(self, step: int) -> float:
        return self.learning_rate


class PiecewiseConstantDecay(LearningRateSchedule):
    """``values[0]`` up to and including step ``boundaries[0]``, then ``values[1]``, and so on.

    Parameters
    ----------
    boundaries : sequence of int
        Ascending.
    values : sequence of float
        One more than boundaries.

    Raises
    ------
    ValueError
        The lengths do not fit, or the boundaries do not ascend.
    """

    def __init__(self, boundaries: Sequence[int], values: Sequence[float]) -> None:
        if len(values) != len(boundaries) + 1:
            raise ValueError(
                f"The length of boundaries should be 1 less than the length of values. Received: boundaries="
                f"{boundaries} of length {len(boundaries)}, and values={values} of length {len(values)}."
            )
        if list(boundaries) != sorted(set(boundaries)):
            raise ValueError(f"boundaries must ascend, got {list(boundaries)}")
        self.boundaries, self.values = list(boundaries), list(values)

    def __call__(self, step: int) -> float:
        return self.values[bisect.bisect_left(self.boundaries, step)]


class ExponentialDecay(LearningRateSchedule):
    """``initial_learning_rate * decay_rate ** (step / decay_steps)``.

    Parameters
    ----------
    decay_steps : int
        Positive.
    staircase : bool
        Decay at once every `decay_steps` steps, not a little at each.
    """

    def __init__(
        self, initial_learning_rate: float, decay_steps: int, decay_rate: float, staircase: bool = False
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = _positive("decay_steps", decay_steps)
        self.decay_rate = decay_rate
        self.staircase = staircase

    def __call__(self, step: int) -> float:
        return self.initial_learning_rate * self.decay_rate ** self._elapsed(step)

    def _elapsed(self, step: int) -> float:
        return step // self.decay_steps if self.staircase else step / self.decay_steps


class InverseTimeDecay(ExponentialDecay):
    """``initial_learning_rate / (1 + decay_rate * step / decay_steps)``; parameters as for `ExponentialDecay`."""

    def __call__(self, step: int) -> float:
        return self.initial_learning_rate / (1 + self.decay_rate * self._elapsed(step))


class PolynomialDecay(LearningRateSchedule):
    """From one rate to another within so many steps: ``(initial - end) * (1 - step / decay_steps) ** power + end``.

    Parameters
    ----------
    decay_steps : int
        Positive; afterwards the rate stays.
    power : float
        1 for a straight line.
    """

    def __init__(
        self, initial_learning_rate: float, decay_steps: int, end_learning_rate: float = 0.0001, power: float = 1.0
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = _positive("decay_steps", decay_steps)
        self.end_learning_rate = end_learning_rate
        self.power = power

    def __call__(self, step: int) -> float:
        left = (1 - min(step, self.decay_steps) / self.decay_steps) ** self.power
        return (self.initial_learning_rate - self.end_learning_rate) * left + self.end_learning_rate


class CosineDecay(LearningRateSchedule):
    """Down along half a cosine wave (Loshchilov and Hutter, 2017), after a linear warm-up if one is asked for.

    Parameters
    ----------
    initial_learning_rate : float
        The rate at step 0.
    decay_steps : int
        Positive; steps from the highest rate to the lowest, which then stays.
    alpha : float
        The lowest rate, as a share of the highest.
    warmup_target : float, optional
        The highest rate, which is reached after `warmup_steps`; without it, `initial_learning_rate` is the highest.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: int,
        alpha: float = 0.0,
        warmup_target: float | None = None,
        warmup_steps: int = 0,
    ) -> None:
        self.initial_learning_rate = initial_learning_rate
        self.decay_steps = _positive("decay_steps", decay_steps)
        self.alpha = alpha
        self.warmup_target = warmup_target
        self.warmup_steps = warmup_steps

    def __call__(self, step: int) -> float:
        if self.warmup_target is None:
            return self._decayed(step, self.initial_learning_rate)
        if step < self.warmup_steps:
            rise = self.warmup_target - self.initial_learning_rate
            return self.initial_learning_rate + rise * step / self.warmup_steps
        return self._decayed(step - self.warmup_steps, self.warmup_target)

    def _decayed(self, step: int, highest: float) -> float:
        share = 0.5 * (1 + math.cos(math.pi * min(step, self.decay_steps) / self.decay_steps))
        return highest * ((1 - self.alpha) * share + self.alpha)


class WarmUp(LearningRateSchedule):
    """Any schedule after a linear warm-up from `start` to its first rate; the schedule counts from the end of it.

    Parameters
    ----------
    steps : int
        Positive.
    """

    def __init__(self, schedule: Callable[[int], float] | float, steps: int, start: float = 0.0) -> None:
        self.schedule = schedule if callable(schedule) else Constant(schedule)
        self.steps = _positive("steps", steps)
        self.start = start

    def __call__(self, step: int) -> float:
        if step >= self.steps:
            return self.schedule(step - self.steps)
        return self.start + (self.schedule(0) - self.start) * step / self.steps


def _positive(name: str, value: int) -> int:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return value
