"""Moving bytes between ranks: the interface in `base`, one transport a file, and the world this process belongs to."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mpidist.cluster.launchers import detect_launcher
from mpidist.cluster.topology import Topology
from mpidist.options import settings
from mpidist.runtime.control import ControlChannel
from mpidist.transports.membership import World

__all__ = ["World", "alone", "enter", "forget", "installed", "joined", "world"]


class _ThreadWorld(threading.local):
    world: World | None = None


_of_thread = _ThreadWorld()
#: The world that this process joined, and the world that it entered instead: lists of one world or none.
_of_process: list[World] = []
_entered: list[World] = []
_joining = threading.Lock()


def world() -> World:
    """Return the world of this process, joining it on first use; in `mpidist.testing.run_ranks`, of this thread.

    A process that no launcher started, or for which ``MPIDIST_NO_MPI=1`` is set, is a world of one rank, and MPI is not
    started.  Else this starts MPI.  Collective on first use, then Local.

    Raises
    ------
    LaunchError
        A launcher started several ranks, but they did not find each other.
    """
    if _of_thread.world is not None:
        return _of_thread.world
    return _entered[0] if _entered else _joined()


def joined() -> World | None:
    """Return the world that this process joined by itself; None where it was given a world.

    Errors, and when it is collective, as for `world`.
    """
    is_given = _of_thread.world is not None or (_entered and not _of_process)
    return None if is_given else _joined()


def _joined() -> World:
    with _joining:
        if not _of_process:
            _of_process.append(_join())
        return _of_process[0]


def _join() -> World:
    if settings().no_mpi or detect_launcher() is None:
        return alone()
    from mpidist.transports.mpi import connect

    return connect()


def alone() -> World:
    """Return a world of one rank, without MPI.  Local."""
    from mpidist.transports.single import SingleTransport

    control = ControlChannel.alone()
    return World(SingleTransport(control), Topology([platform.node() or "localhost"]), control, "python")


@contextmanager
def installed(world: World) -> Iterator[World]:
    """Make `world` the one that this thread belongs to, inside the block."""
    before = _of_thread.world
    _of_thread.world = world
    try:
        yield world
    finally:
        _of_thread.world = before


def enter(world: World) -> None:
    """Make `world` the world of this process from here on; of this thread, where threads are ranks.  Local.

    For jobs that part into groups of ranks, which have nothing to do with each other's collectives any more.
    """
    if _of_thread.world is not None:
        _of_thread.world = world
    else:
        _entered[:] = [world]


def forget() -> None:
    """Forget the process's world, so that the next `world` joins anew; for tests, and for children after a fork."""
    _of_process.clear()
    _entered.clear()
