"""Snapshots of variables, for libraries that read an array after the call in which they got it.

Such a library is given memory that is never written again; elsewhere `value` is a live view, which costs nothing.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.kept_memory import KeptMemory
from mpidist.options import settings

#: Libraries that read an array later, by their name in `sys.modules`, and whether they want memory that they may write.
#: JAX aliases aligned memory, and computes after the call.  PyTorch's autograd reads what the forward pass saw again in
#: the backward pass, and PyTorch warns of memory that cannot be written.
LATE_READERS = {"jax": False, "torch": True}

#: Pieces of memory kept for one array: who reads late mostly lets go of one when the next is taken.
_KEPT = 2

#: Shorter copies are made anew each time: nobody asks where they lie, as with variables in arenas.
_LEAST_BYTES = 1 << 14


def are_needed() -> bool:
    """Return whether `value` has to be a snapshot: a library that reads late is imported, or the user says so.  Local.

    ``MPIDIST_SNAPSHOTS`` is 0, 1, or ``auto``, which is what is imported by now.
    """
    asked = _asked()
    if asked != "auto":
        return asked == "1"
    modules = sys.modules
    for name in LATE_READERS:  # noqa: SIM110 - `any` takes three times as long, at each reading of a variable
        if name in modules:
            return True
    return False


def are_written() -> bool:
    """Return whether a library is imported that wants memory which it may write.  Local."""
    return any(writes and name in sys.modules for name, writes in LATE_READERS.items())


@functools.cache
def _asked() -> str:
    return settings().snapshots


class SnapshotMemory(KeptMemory):
    """Copies of arrays of one shape and dtype; nobody's memory is written while anybody holds it, or a part of it."""

    def __init__(self) -> None:
        super().__init__(_KEPT, least_bytes=_LEAST_BYTES)

    def of(self, array: Any) -> Any:
        """Return a copy of an array, which the caller may write.  Local."""
        copy = arrays.empty_like(array) if arrays.is_device(array) else self.array(array.shape, array.dtype)
        copy[...] = array
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without the memory: it belongs to its holders."""
        return type(self), ()


class Snapshot:
    """What an array held at a moment: one read-only object for all who ask before the array changes.  Local."""

    def __init__(self) -> None:
        self._copies = SnapshotMemory()
        self._shown: tuple[int, Any] | None = None
        self._lock = threading.Lock()

    def of(self, array: Any, moment: int) -> Any:
        """Return what the array held when it was first asked for at this moment.

        There is another `moment` before each change of the array, and after it: while it is written, another thread may
        read.
        """
        shown = self._shown
        if shown is None or shown[0] != moment:
            shown = None  # so its memory is free, unless somebody else holds it
            with self._lock:
                shown = self._shown
                if shown is None or shown[0] != moment:
                    shown = self._shown = None
                    shown = self._shown = moment, read_only(self._copies.of(array))
        return shown[1]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without what was shown."""
        return type(self), ()


def read_only(array: Any) -> Any:
    """Return a view of `array` that cannot be written to; CuPy has no such views and gives a plain one.  Local."""
    view = array.view()
    if isinstance(view, numpy.ndarray):
        view.flags.writeable = False
    return view
