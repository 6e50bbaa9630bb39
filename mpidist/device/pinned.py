"""Pinned host memory, which CUDA's devices read and write by themselves, and the events behind which it is free."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any

import cupy
import numpy

#: What CUDA says of an event: it has happened; it has not yet.  All else is an error.
_SUCCESS, _NOT_READY = 0, 600


class PinnedMemory:
    """Host memory that is kept while a device copies: CuPy would hand it out again.  For any thread."""

    def __init__(self) -> None:
        self._kept: deque[tuple[Any, numpy.ndarray]] = deque()
        self._lock = Lock()

    def empty(self, elements: int, dtype: Any) -> numpy.ndarray:
        """Return an array of it."""
        memory = cupy.cuda.alloc_pinned_memory(max(1, elements * numpy.dtype(dtype).itemsize))
        return numpy.frombuffer(memory, dtype, elements)

    def keep(self, array: numpy.ndarray, event: Any) -> None:
        """Keep an array until an event."""
        with self._lock:
            while self._kept and has_happened(self._kept[0][0]):
                self._kept.popleft()
            self._kept.append((event, array))


def event_of(stream: Any) -> Any:
    """Return an event behind all that a stream has been given so far."""
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    return event


def has_happened(event: Any) -> bool:
    """Return whether an event has happened.  CuPy's `Event.done` is False for ever after an error."""
    runtime = cupy.cuda.runtime
    status = runtime.eventQuery(event.ptr)
    if status not in (_SUCCESS, _NOT_READY):
        raise runtime.CUDARuntimeError(status)
    return bool(status == _SUCCESS)
