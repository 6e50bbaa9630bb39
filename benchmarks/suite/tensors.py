"""What is reduced: new arrays for every step, with values of which every sum is known exactly."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy

from benchmarks.suite.tensor_lists import Shape

#: Element i of all tensors together is ``i % PERIOD + rank + step % STEPS``: whole numbers, whose sums are exact.
PERIOD, STEPS = 11, 7


class TensorList:
    """A list of tensors of which every rank has its own values in every step.

    Parameters
    ----------
    shapes : sequence of tuple of int
    dtype : str or numpy.dtype
        One in which whole numbers up to ``size * (PERIOD + STEPS + size)`` are exact.
    rank, size : int
        Of this process, and the number of ranks.

    Attributes
    ----------
    elements, nbytes : int
        Of all tensors together.
    """

    def __init__(self, shapes: Sequence[Shape], dtype: Any, rank: int, size: int) -> None:
        self.shapes = list(shapes)
        self.dtype = numpy.dtype(dtype)
        self.rank, self.size = rank, size
        self.elements = sum(map(prod, self.shapes))
        self.nbytes = self.elements * self.dtype.itemsize
        self._pattern = (numpy.arange(self.elements) % PERIOD).astype(self.dtype)

    def new(self, step: int) -> list[Any]:
        """Return this rank's tensors of a step, in arrays that nobody has seen before."""
        added = self.dtype.type(self.rank + step % STEPS)
        return [part + added for part in self.cut(self._pattern)]

    def cut(self, flat: Any) -> list[Any]:
        """Return views of a flat array of `elements`, one for each tensor, in its shape."""
        parts, start = [], 0
        for shape in self.shapes:
            stop = start + prod(shape)
            parts.append(flat[start:stop].reshape(shape))
            start = stop
        return parts

    def sums(self, step: int, pattern: Any) -> Any:
        """Return the sums over all ranks of the elements whose ``i % PERIOD`` is in `pattern`."""
        return self.size * (pattern + step % STEPS) + self.size * (self.size - 1) // 2

    def wrong(self, results: Sequence[Any], step: int) -> int:
        """Return how many elements of `results` are not the sums of that step; a missing tensor is wrong as a whole."""
        expected = self.cut(self._pattern)
        missing = sum(part.size for part in expected[len(results) :])
        pairs = zip(results, expected, strict=False)
        return missing + sum(_differing(result, self.sums(step, part)) for result, part in pairs)


def _differing(result: Any, expected: Any) -> int:
    result = numpy.asarray(result)
    return expected.size if result.shape != expected.shape else int(numpy.count_nonzero(result != expected))
