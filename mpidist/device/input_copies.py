"""`InputCopies`: arrays of the host that are copied to a GPU while it works."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy

from mpidist import arrays

if TYPE_CHECKING:
    from mpidist.device.memory import Arrived


@dataclass(frozen=True)
class Begun:
    """An array that is being copied, and the event of its end; None where it was on the GPU."""

    array: Any
    event: Any


class InputCopies:
    """Copies to a GPU in a stream of their own, for work in the stream that is current where this is made.

    The arrays are that stream's: their memory is handed out again in its order, and a copy waits for what it was given
    before.  So a copy goes on beside work that the stream is given later.
    """

    def __init__(self, index: int) -> None:
        import cupy

        self._cupy, self._device = cupy, cupy.cuda.Device(index)
        with self._device:
            self._user, self._own = cupy.cuda.get_current_stream(), _stream(index)
        # Pinned memory that is still read, which must not be handed out again.
        self._read: deque[tuple[Arrived, Any]] = deque()

    def begin(self, array: Any) -> Begun:
        """Begin to copy an array, in any thread, one at a time.  Local; does not wait."""
        with self._device, self._user:
            if arrays.is_device(array):
                return Begun(self._cupy.asarray(array), None)
            source = numpy.asarray(array)
            target = self._cupy.empty(source.shape, source.dtype)
            pinned = self._cupy.cuda.alloc_pinned_memory(max(1, source.nbytes))
            numpy.frombuffer(pinned, source.dtype, source.size).reshape(source.shape)[...] = source
            self._own.wait_event(self._event(self._user))
            target.data.copy_from_host_async(pinned.ptr, source.nbytes, self._own)
            event = self._event(self._own)
        while self._read and self._read[0][0]():
            self._read.popleft()
        self._read.append((lambda: event.done, pinned))
        return Begun(target, event)

    def end(self, begun: Begun) -> Any:
        """Return the array; later work of the current stream is behind its copy.  Local; does not wait."""
        if begun.event is not None:
            self._cupy.cuda.get_current_stream().wait_event(begun.event)
        return begun.array

    def _event(self, stream: Any) -> Any:
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event


@cache
def _stream(index: int) -> Any:
    """Return the stream of all copies to a GPU, which is current."""
    import cupy

    return cupy.cuda.Stream(non_blocking=True)
