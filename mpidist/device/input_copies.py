"""`InputCopies`: arrays of the host that are copied to a GPU while it works."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import finalize

import cupy
import numpy

from mpidist import arrays
from mpidist.device.pinned import PinnedMemory, event_of


@dataclass(frozen=True, eq=False)
class Copy:
    """An array that is being copied, and the event of its end; None where it was on the GPU."""

    array: Any
    event: Any


class InputCopies:
    """Copies to a GPU in a stream of their own, for work in the stream that is current where this is made.

    The arrays are that stream's: their memory is handed out again in its order, and a copy waits for what it was given
    before.  So a copy goes on beside work that the stream is given later.
    """

    def __init__(self, index: int) -> None:
        self._device = cupy.cuda.Device(index)
        with self._device:
            self._user = cupy.cuda.get_current_stream()
            self._stream, self._pinned = _own(index)

    def begin(self, array: Any) -> Copy:
        """Begin to copy an array, in any thread, one at a time.  Local; does not wait."""
        with self._device, self._user:
            if arrays.is_device(array):
                return Copy(cupy.asarray(array), None)
            source = numpy.asarray(array)
            source = source.astype(source.dtype.newbyteorder("="), copy=False)
            target = cupy.empty(source.shape, source.dtype)
            pinned = self._pinned.empty(source.size, source.dtype)
            pinned.reshape(source.shape)[...] = source
            self._stream.wait_event(event_of(self._user))
            target.data.copy_from_host_async(pinned.ctypes.data, source.nbytes, self._stream)
            event = event_of(self._stream)
            self._pinned.keep(pinned, event)
        copy = Copy(target, event)
        finalize(copy, self._order, event).atexit = False  # also if nobody waits for it: its memory is handed out again
        return copy

    def _order(self, event: Any) -> None:
        """Order the user's stream behind an event."""
        with self._device:
            self._user.wait_event(event)

    def end(self, copy: Copy) -> Any:
        """Return the array; later work of the current stream is behind its copy.  Local; does not wait."""
        if copy.event is not None:
            cupy.cuda.get_current_stream().wait_event(copy.event)
        return copy.array


@cache
def _own(index: int) -> tuple[Any, PinnedMemory]:
    """Return the stream of all copies to GPU `index`, which is current, and the memory that it reads."""
    return cupy.cuda.Stream(non_blocking=True), PinnedMemory()
