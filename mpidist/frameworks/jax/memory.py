"""Memory that JAX takes over without a copy: nobody writes it again while JAX, or anybody else, refers to it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy

from mpidist.arrays import ALIGNMENT
from mpidist.collectives.kept_memory import KeptMemory


class ResultMemory:
    """Arrays of fixed shapes and dtypes, each at an aligned place of one piece of memory."""

    def __init__(self, signatures: Sequence[tuple[Any, tuple[int, ...]]]) -> None:
        self._places: list[tuple[int, int, Any, tuple[int, ...]]] = []
        end = 0
        for dtype, shape in signatures:
            nbytes = numpy.dtype(dtype).itemsize * prod(shape)
            self._places.append((end, end + nbytes, numpy.dtype(dtype), tuple(shape)))
            end += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._nbytes = end
        self._memory = KeptMemory(2)  # who computes with results mostly lets go of them when the next ones come

    def whole(self) -> Any:
        """Return the memory of new arrays, as bytes, which is the caller's; nobody else refers to it.  Local."""
        return self._memory.array((self._nbytes,), numpy.dtype(numpy.uint8))

    def cut(self, whole: Any) -> list[Any]:
        """Return the arrays in a piece of memory.  Local."""
        return [whole[first:last].view(dtype).reshape(shape) for first, last, dtype, shape in self._places]
