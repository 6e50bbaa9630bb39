"""Update rules as a textbook has them, and in blocks that stay in cache, to hold `apply_gradients` against."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

import mpidist

#: Elements of a block: parameter, gradient, two slots and two scratch arrays of float32 stay within 1 MiB.
BLOCK = 1 << 15

_SGD_RATE, _MOMENTUM = 1e-4, 0.9
_ADAM_RATE, _BETA_1, _BETA_2, _EPSILON = 1e-3, 0.9, 0.999, 1e-7


@dataclass(frozen=True)
class Rule:
    """An optimizer in three forms that give the same numbers.

    Attributes
    ----------
    slots, scratch : int
        How many arrays like the parameter it keeps, and how many a block needs besides.
    textbook : callable
        ``textbook(parameter, gradient, slots, step)`` updates `parameter` in place, and the list `slots`.
    block : callable
        ``block(parameter, gradient, slots, scratch, step)`` updates in place and allocates nothing.
    optimizer : callable
        Makes the optimizer of mpidist.
    """

    slots: int
    scratch: int
    textbook: Callable[[Any, Any, list[Any], int], None]
    block: Callable[[Any, Any, list[Any], list[Any], int], None]
    optimizer: Callable[[], Any]

    def in_blocks(self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], step: int) -> None:
        """Update flat arrays block by block; `scratch` are arrays of `BLOCK` elements."""
        for start in range(0, parameter.size, BLOCK):
            stop = min(start + BLOCK, parameter.size)
            short = [each[: stop - start] for each in scratch]
            self.block(parameter[start:stop], gradient[start:stop], [each[start:stop] for each in slots], short, step)


def _sgd_textbook(x: Any, dx: Any, slots: list[Any], step: int) -> None:
    v = _MOMENTUM * slots[0] - _SGD_RATE * dx
    x += v
    slots[0] = v


def _sgd_block(x: Any, dx: Any, slots: list[Any], scratch: list[Any], step: int) -> None:
    (v,), (change,) = slots, scratch
    numpy.multiply(dx, _SGD_RATE, out=change)
    numpy.multiply(v, _MOMENTUM, out=v)
    numpy.subtract(v, change, out=v)
    numpy.add(x, v, out=x)


def _adam_rate(step: int) -> float:
    return _ADAM_RATE * math.sqrt(1 - _BETA_2**step) / (1 - _BETA_1**step)


def _adam_textbook(x: Any, dx: Any, slots: list[Any], step: int) -> None:
    m, v = slots
    m = _BETA_1 * m + (1 - _BETA_1) * dx
    v = _BETA_2 * v + (1 - _BETA_2) * dx**2
    x -= _adam_rate(step) * m / (numpy.sqrt(v) + _EPSILON)
    slots[:] = m, v


def _adam_block(x: Any, dx: Any, slots: list[Any], scratch: list[Any], step: int) -> None:
    (m, v), (a, b) = slots, scratch
    numpy.subtract(dx, m, out=a)
    numpy.multiply(a, 1 - _BETA_1, out=a)
    numpy.add(m, a, out=m)
    numpy.multiply(dx, dx, out=a)
    numpy.subtract(a, v, out=a)
    numpy.multiply(a, 1 - _BETA_2, out=a)
    numpy.add(v, a, out=v)
    numpy.sqrt(v, out=a)
    numpy.add(a, _EPSILON, out=a)
    numpy.multiply(m, _adam_rate(step), out=b)
    numpy.divide(b, a, out=b)
    numpy.subtract(x, b, out=x)


def _sgd() -> Any:
    return mpidist.optimizers.SGD(_SGD_RATE, momentum=_MOMENTUM)


def _adam() -> Any:
    return mpidist.optimizers.Adam(_ADAM_RATE, _BETA_1, _BETA_2, _EPSILON)


#: Name on the command line -> rule.
RULES = {
    "sgd": Rule(1, 1, _sgd_textbook, _sgd_block, _sgd),
    "adam": Rule(2, 2, _adam_textbook, _adam_block, _adam),
}
