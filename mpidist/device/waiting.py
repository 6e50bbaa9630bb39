"""The waits of the host for a device, each with an eye on what the device itself may wait for."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from mpidist import arrays
from mpidist.errors import TransportError

if TYPE_CHECKING:
    from mpidist.device.memory import Arrived, Link
    from mpidist.runtime.watch import Watch

#: How often a wait looks at the links.
_LOOK_SECONDS = 0.05


def recorded() -> Arrived:
    """Return whether all that the current stream has been given so far is done.  Local; does not wait."""
    import cupy

    from mpidist.device.pinned import event_of, has_happened

    return partial(has_happened, event_of(cupy.cuda.get_current_stream()))


#: The links of this process at which each wait for a device looks: what is waited for may be behind their work.
open_links: list[Link] = []

#: The names of links that were broken off in the middle of their work: what it should have given is not right.
broken_links: list[str] = []


def wait_for(arrived: Arrived, watch: Watch | None = None) -> None:
    """Return when a device has come so far.  Local.

    `watch`: of the call that waits; outside of calls None, for the links' own.

    TransportTimeoutError or RankFailedError: as `Watch.tick`.  TransportError: a link has failed.
    """
    if watch is None:
        _check_links()
    if arrived():
        return
    watches = [link.control.watch("a wait for the device") for link in open_links] if watch is None else [watch]
    looked = time.monotonic()
    while not arrived():
        for each in watches:
            each.tick()
        if not watches:
            time.sleep(0)
        if time.monotonic() - looked > _LOOK_SECONDS:
            for link in tuple(open_links):
                link.look()
            looked = time.monotonic()


def _before_copy(array: Any) -> None:
    """Wait for what the copy of an array would wait for, in the thread that may look at the control channel."""
    if not (open_links or broken_links) or arrays.kind_of(array).name != "cupy":
        return
    _check_links()
    if threading.current_thread() is threading.main_thread():
        with array.device:
            wait_for(recorded())


def _check_links() -> None:
    """Raise TransportError where what is on the device may be a result of work that was broken off."""
    if broken_links:
        raise TransportError(
            f"work of {broken_links[0]} was broken off by the error before this one, so arrays on the GPU may have "
            "wrong values, and are not read. End the job, and start it from its last checkpoint"
        )


arrays.before_copies.append(_before_copy)
