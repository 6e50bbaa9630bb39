"""Memory in which the reductions of a rank work.  They run one at a time, so one piece is enough."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy


class Scratch:
    """Memory whose content nobody relies on after a call, as long as the longest that was asked for."""

    def __init__(self) -> None:
        self._memory = numpy.empty(0, numpy.uint8)

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array, which others may be given as well.  Local."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes > self._memory.size:  # who was given the shorter piece keeps it
            self._memory = numpy.empty(max(nbytes, 2 * self._memory.size), numpy.uint8)
        return self._memory[:nbytes].view(dtype).reshape(shape)
