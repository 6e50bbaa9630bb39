"""The call slots of a node's ranks, as words and bytes: what a short collective that adds up nothing needs.

A rank fills its slot before it begins a call, and reads the others' after it has begun: see `SharedSegments`.
"""

from __future__ import annotations

from math import prod
from typing import Any

from mpidist.runtime.shared_memory import LINE_BYTES
from mpidist.transports.node_memory import SharedSegments


class CallSlots:
    """The call slots, each cut into words and bytes.

    `words` 64-bit words come first; `room` bytes are behind them, 0 or less where there are none.  ``heads[call & 1]``
    and ``values[call & 1]`` have the words and the bytes of all ranks, shape (size, bytes).
    """

    def __init__(self, segments: SharedSegments, words: int) -> None:
        head_bytes = -(-8 * words // LINE_BYTES) * LINE_BYTES
        self.room = segments.segment_bytes - head_bytes
        self.heads: tuple[Any, ...] = tuple(slots[:, : 8 * words] for slots in segments.segments)
        self.values: tuple[Any, ...] = tuple(slots[:, head_bytes:] for slots in segments.segments)

    def view(self, rank: int, start: int, shape: tuple[int, ...], dtype: Any, nbytes: int) -> tuple[Any, Any]:
        """Return by parity of the call an array in the slot of `rank`, from byte `start` on.  Local."""
        first, second = (slots[rank, start : start + nbytes].view(dtype).reshape(shape) for slots in self.values)
        return first, second

    def stack(self, start: int, shape: tuple[int, ...], dtype: Any) -> tuple[Any, Any]:
        """Return by parity of the call the arrays of all ranks, each in its slot from byte `start` on.  Local."""
        stop = start + prod(shape) * dtype.itemsize
        first, second = (slots[:, start:stop].view(dtype).reshape(len(slots), *shape) for slots in self.values)
        return first, second
