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


def has_links() -> bool:
    """Return whether a wait for a device may be one for other ranks, or what it gives is not read.  Local."""
    return bool(open_links or broken_links)


def wait_for(arrived: Arrived, watch: Watch | None = None) -> None:
    """Return when a device has come so far.  Local.

    `watch`: of the call that waits; outside of calls None, for the links' own.

    TransportTimeoutError or RankFailedError: as `Watch.tick`.  TransportError: a link has failed.
    """
    check_links()
    wait_to_end(arrived, watch)


def wait_to_end(arrived: Arrived, watch: Watch | None = None) -> None:
    """Do as `wait_for`, also where links were broken off: the values do not matter.  Local."""
    if arrived():
        return
    looked = 0.0
    busy: list[Link] = []  # what is waited for may be behind the work of these
    watches: dict[str, Watch] = {}
    while not arrived():
        if time.monotonic() - looked > _LOOK_SECONDS:
            busy = [link for link in tuple(open_links) if not link.is_done()]
            for link in busy:
                link.look()
            looked = time.monotonic()
        if watch is not None:
            watch.tick()
            continue
        if busy and threading.current_thread() is threading.main_thread():  # as all calls: MPI may be one thread's
            for link in busy:
                if link.name not in watches:
                    watches[link.name] = link.control.watch("a wait for the device")
                watches[link.name].tick()
        else:
            time.sleep(0)


def _before_copy(array: Any) -> None:
    """Wait for what the copy of an array would wait for."""
    if has_links() and arrays.kind_of(array).name == "cupy":
        with array.device:
            wait_for(recorded())


def check_links() -> None:
    """Raise TransportError where what is on the device may be a result of work that was broken off."""
    if broken_links:
        raise TransportError(
            f"work of {broken_links[0]} was broken off by the error before this one, so arrays on the GPU may have "
            "wrong values, and are not read. End the job, and start it from its last checkpoint"
        )


arrays.before_copies.append(_before_copy)
