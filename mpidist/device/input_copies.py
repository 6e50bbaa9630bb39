"""`InputCopies`: arrays of the host that are copied to a GPU while it works."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any
from weakref import finalize

import numpy

from mpidist import arrays


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
        import cupy

        self._cupy, self._device = cupy, cupy.cuda.Device(index)
        with self._device:
            self._user, self._own = cupy.cuda.get_current_stream(), _own(index)

    def begin(self, array: Any) -> Copy:
        """Begin to copy an array, in any thread, one at a time.  Local; does not wait."""
        with self._device, self._user:
            if arrays.is_device(array):
                return Copy(self._cupy.asarray(array), None)
            source = numpy.asarray(array)
            source = source.astype(source.dtype.newbyteorder("="), copy=False)
            target = self._cupy.empty(source.shape, source.dtype)
            pinned = self._cupy.cuda.alloc_pinned_memory(max(1, source.nbytes))
            numpy.frombuffer(pinned, source.dtype, source.size).reshape(source.shape)[...] = source
            self._own.stream.wait_event(_recorded(self._user))
            target.data.copy_from_host_async(pinned.ptr, source.nbytes, self._own.stream)
            event = _recorded(self._own.stream)
        self._own.keep(pinned, event)
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
            self._cupy.cuda.get_current_stream().wait_event(copy.event)
        return copy.array


class _Own:
    """The stream of all copies to the current GPU, and pinned memory that it still reads."""

    def __init__(self) -> None:
        import cupy

        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._read: deque[tuple[Any, Any]] = deque()
        self._lock = Lock()  # each iterator has a thread

    def keep(self, pinned: Any, event: Any) -> None:
        """Keep memory until an event, or it would be handed out again; also when its iterator is dropped."""
        with self._lock:
            while self._read and self._read[0][0].done:
                self._read.popleft()
            self._read.append((event, pinned))


@cache
def _own(index: int) -> _Own:
    """Return what GPU `index`, which is current, has."""
    return _Own()


def _recorded(stream: Any) -> Any:
    """Return an event behind all that a stream has been given so far."""
    import cupy

    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event
