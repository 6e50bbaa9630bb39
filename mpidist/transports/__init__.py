"""Moving bytes between ranks: the interface in `base`, one transport a file, and the world this process belongs to."""

from __future__ import annotations

import platform
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mpidist.cluster.launchers import detect_launcher
from mpidist.cluster.resolvers import mpi as mpi_resolver
from mpidist.cluster.topology import Topology
from mpidist.options import settings
from mpidist.runtime.control import ControlChannel
from mpidist.transports.membership import World, WorldKept, in_kept_world, innermost

__all__ = [
    "World",
    "WorldKept",
    "alone",
    "enter",
    "forget",
    "in_kept_world",
    "init",
    "innermost",
    "installed",
    "joined",
    "new_world",
    "world",
]


class _ThreadWorld(threading.local):
    world: World | None = None


_of_thread = _ThreadWorld()
#: The world that this process joined, or was given by `init`, and the world that it entered instead: lists of one world
#: or none.
_of_process: list[World] = []
_given: list[World] = []
_entered: list[World] = []
_joining = threading.Lock()


def world() -> World:
    """Return the world in force: that of ``with world:``, else that of this process, joining it on first use.

    In `mpidist.testing.run_ranks` it is that of this thread.

    A process that no launcher started, or for which ``MPIDIST_NO_MPI=1`` is set, is a world of one rank, and MPI is not
    started.  Else this starts MPI.  Collective on first use, then Local.

    Raises
    ------
    LaunchError
        A launcher started several ranks, but they did not find each other.
    """
    return innermost() or _own()


def _own() -> World:
    """Return the world of this process, or of this thread."""
    if _of_thread.world is not None:
        return _of_thread.world
    return _entered[0] if _entered else _joined()


def joined() -> World | None:
    """Return the world that this process joined by itself; None where it was given a world.

    Errors, and when it is collective, as for `world`.
    """
    is_given = innermost() is not None or _of_thread.world is not None or (_entered and not _of_process) or _given
    return None if is_given else _joined()


def init(comm: Any = None) -> World:
    """Make the ranks of a communicator the world of this process, and return it; see `mpidist.init`."""
    if comm is None:
        return _own()
    if _of_thread.world is not None:
        raise RuntimeError("mpidist.init: the ranks are threads here (run_ranks), which no communicator has")
    if innermost() is not None:
        raise RuntimeError("mpidist.init: a world is in force here; leave the `with world:` block first")
    _check_given(comm, "mpidist.init")
    from mpidist.transports import mpi_world

    with _joining:
        if not _of_process:
            _of_process.append(mpi_world.connect_members(comm, "mpidist.init", is_only=True))
            _given.append(_of_process[0])
        elif not mpi_world.is_of(_of_process[0], comm):
            raise RuntimeError(
                f"mpidist.init: this process is {_of_process[0].control.own_name} already, in a world of other ranks "
                f"than these {comm.Get_size()}. Call mpidist.init(comm) before a strategy is made or a function of "
                "mpidist asks for the ranks; or make a second world, `with mpidist.new_world(comm):`"
            )
        return _of_process[0]


def new_world(comm: Any) -> World:
    """Return a world of the ranks of a communicator, beside the world of this process; see `mpidist.new_world`."""
    if _of_thread.world is not None:
        raise RuntimeError("mpidist.new_world: the ranks are threads here (run_ranks), which no communicator has")
    _check_given(comm, "mpidist.new_world")
    from mpidist.transports import mpi_world

    with _joining:
        return mpi_world.connect_members(comm, "mpidist.new_world", is_only=False)


def _check_given(comm: Any, what: str) -> None:
    """Raise unless a world can be made of `comm`; errors as for `mpidist.init`."""
    from mpidist.transports import mpi_world

    mpi_world.check_communicator(comm, what)
    if settings().no_mpi:
        raise RuntimeError(f"{what}: got a communicator, and MPIDIST_NO_MPI=1 keeps every process alone; unset it")


def _place() -> tuple[int, Sequence[str]] | None:
    """Return rank and hosts of the world that the program has chosen, None where it has chosen none."""
    chosen = innermost() or (_given[0] if _given else None)
    return None if chosen is None or _of_thread.world is not None else (chosen.rank, chosen.topology.hosts)


mpi_resolver.place_fns.append(_place)


def _joined() -> World:
    if _of_process:  # a program may ask for its rank in every step
        return _of_process[0]
    with _joining:
        if not _of_process:
            _of_process.append(_join())
        return _of_process[0]


def _join() -> World:
    if settings().no_mpi or detect_launcher() is None:
        return alone()
    from mpidist.transports.mpi_world import connect

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
    _given.clear()
    _entered.clear()
