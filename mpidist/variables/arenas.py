"""Arenas: memory in which mirrored variables of one dtype lie side by side, so that one call updates neighbours.

Variables lie in *blocks*, which never move.  A block goes with its last variable; memory in it is used once.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import ref

import numpy

from mpidist.arrays import ALIGNMENT, aligned

#: Short variables share blocks of so many bytes, of which only pages that are written take memory; longer ones have a
#: block of their own.
_BLOCK_BYTES, _OWN_BLOCK_BYTES = 1 << 20, 1 << 17

#: Variables of so many bytes begin at a multiple of `ALIGNMENT`.  Shorter ones lie densely, as their gradients do when
#: they are packed: so a run of neighbours is one span of either.
_ALIGNED_BYTES = 1 << 14


class BlockSlice(NamedTuple):
    """Where a variable lies.

    `block`, shape (n,), is of the variable's dtype; `start` and `stop` are its elements there; `number` counts in the
    order of creation.
    """

    block: Any
    start: int
    stop: int
    number: int


class Arenas:
    """The memory of one strategy's mirrored variables, an open block for each dtype.  Local."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[numpy.dtype, tuple[ref[Any], int]] = {}
        self._count = 0

    def take(self, size: int, dtype: Any) -> BlockSlice:
        """Return memory for `size` elements, with anything in it."""
        dtype = numpy.dtype(dtype)
        with self._lock:
            self._count += 1
            if size * dtype.itemsize >= _OWN_BLOCK_BYTES:
                return BlockSlice(aligned(size, dtype), 0, size, self._count)
            block, start = self._room(size, dtype)
            self._open[dtype] = ref(block), start + size
            return BlockSlice(block, start, start + size, self._count)

    def _room(self, size: int, dtype: numpy.dtype) -> tuple[Any, int]:
        """Return a block with room for so many elements, and the first of them."""
        known, start = self._open.get(dtype, (None, 0))
        block = None if known is None else known()
        if size * dtype.itemsize >= _ALIGNED_BYTES:
            step = max(1, ALIGNMENT // dtype.itemsize)
            start = -(-start // step) * step
        if block is None or start + size > len(block):
            return aligned(_BLOCK_BYTES // dtype.itemsize, dtype), 0
        return block, start

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without the memory, which belongs to the variables."""
        return type(self), ()
