"""What the host asks a CUDA device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpidist.device.memory import Arrived

#: What CUDA says of an event: it has happened; it has not yet.  All else is an error.
_SUCCESS, _NOT_READY = 0, 600


def recorded() -> Arrived:
    """Return whether all that the current stream has been given so far is done.  Local; does not wait."""
    import cupy

    event, runtime = cupy.cuda.Event(disable_timing=True), cupy.cuda.runtime
    event.record()

    def arrived() -> bool:
        status = runtime.eventQuery(event.ptr)
        if status not in (_SUCCESS, _NOT_READY):  # `Event.done` is False then, for ever
            raise runtime.CUDARuntimeError(status)
        return bool(status == _SUCCESS)

    return arrived
