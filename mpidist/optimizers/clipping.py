"""Clipping of gradients after the sum over the replicas: by value, by the norm of each, by the norm of all together.

All ranks hold the same bits of a summed gradient, so every rank finds the same norm by itself; only for variables that
are split over the ranks of a replica these add up the squares of their parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mpidist import arrays
from mpidist.optimizers import slices
from mpidist.variables import sums_over_parts


@dataclass(frozen=True)
class Clipping:
    """What gradients are clipped to, at most one of the three; None for no limit.

    `clipnorm` scales down each gradient whose Euclidean norm is larger; `clipvalue` cuts elements off at this value and
    its negative; `global_clipnorm` scales all gradients by one factor where the norm of all together is larger.
    ValueError where more than one is given, or one is not positive.
    """

    clipnorm: float | None = None
    clipvalue: float | None = None
    global_clipnorm: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set. Received: {given}")
        for name, value in given.items():
            if not value > 0:
                raise ValueError(f"{name} must be positive, or None for no clipping; got {value}")

    @property
    def needs_norms(self) -> bool:
        """Whether the gradients must be known as a whole before any of them is applied."""
        return self.clipnorm is not None or self.global_clipnorm is not None

    def factors(
        self, gradients: Sequence[Any], variables: Sequence[Any], factor: float, scratch: slices.SliceScratch
    ) -> list[float]:
        """Return what to multiply every gradient by, so that `factor` times the gradient is within the norm.

        Collective where variables are split and norms needed, as `sums_over_parts`; Local otherwise.  A norm that is
        not finite makes the factor NaN, so that nobody mistakes what is left for a gradient.
        """
        if not self.needs_norms:
            return [factor] * len(gradients)
        squares = sums_over_parts(variables, [square_sum(gradient, scratch) for gradient in gradients])
        norms = [math.sqrt(square) * abs(factor) for square in squares]
        if self.clipnorm is not None:
            return [factor * _shrinkage(norm, self.clipnorm) for norm in norms]
        assert self.global_clipnorm is not None
        return [factor * _shrinkage(math.hypot(*norms), self.global_clipnorm)] * len(gradients)


def square_sum(gradient: Any, scratch: slices.SliceScratch) -> float:
    """Return the sum of the squares of an array, in float64, slice by slice in a fixed order.  Local."""
    flat = gradient.reshape(-1)
    (buffer,) = scratch.arrays(flat, numpy.dtype("float64"), 1)
    total = 0.0
    for where in slices.bounds(flat):
        (wide,) = slices.pick([buffer], slice(0, where.stop - where.start))
        wide[...] = flat[where]
        numpy.multiply(wide, wide, out=wide)
        total += float(arrays.number(wide.sum()))
    return total


def is_finite(gradient: Any) -> bool:
    """Return whether no element of an array is infinite or NaN.  Local."""
    flat = gradient.reshape(-1)
    return all(arrays.number(numpy.isfinite(flat[where]).all()) for where in slices.bounds(flat))


def _shrinkage(norm: float, limit: float) -> float:
    return limit / max(norm, limit) if math.isfinite(norm) else math.nan
