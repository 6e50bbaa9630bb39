"""The composition root: worlds of a program's own ranks, and their communicators, with tuning and tracing handed in."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from mpidist import transports
from mpidist.cluster.allocation import Allocation, given_allocation, het_group_option
from mpidist.cluster.launchers import detect_launcher
from mpidist.cluster.slurm_plugins import srun_cure
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.observer import NOBODY
from mpidist.errors import ClusterResolutionError
from mpidist.options import settings
from mpidist.tracing import tracer
from mpidist.transports import World
from mpidist.tuning import store

_communicators: WeakKeyDictionary[World, Communicator] = WeakKeyDictionary()

_log = logging.getLogger("mpidist")
_warned = threading.Lock()

#: Printed by a child process: this one must not load an MPI that it will not use.
_LIBRARY = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"


def init(comm: Any = None) -> World:
    """Make the ranks of a communicator the world of this process: all that mpidist does is among them from here on.

    Nobody needs to call it: without it the world is all ranks of the job.  It is for a part of a simulation's ranks,
    or the ranks of one member of an ensemble.

    Collective: every rank of `comm` calls it, in the same order as its other collectives on `comm`; ranks that are not
    in `comm` do not.  Local where the world is made already.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Its ranks, in its order.  It stays the caller's: mpidist works on copies, and it may be freed afterwards.  None
        stands for the ranks that the process would join by itself.

    Returns
    -------
    World
        The same one every time.

    Raises
    ------
    TypeError
        `comm` is no communicator of mpi4py.
    ValueError
        `comm` is COMM_NULL, freed, or an inter-communicator.
    RuntimeError
        The process has a world of other ranks already; MPI has been finalized; or ``MPIDIST_NO_MPI=1`` is set.
    LaunchError
        The program has started MPI with a thread level that is too low.
    TransportTimeoutError
        A rank of `comm` did not call it in time.
    """
    return transports.init(comm)


def new_world(comm: Any) -> World:
    """Return a world of the ranks of a communicator, beside the world of this process and others.

    It is in force inside ``with world:``, in the thread that enters it.  What is made there (strategies and their
    variables, checkpoints, trainers) belongs to its ranks for good, and may be used outside.

    Worlds may have ranks in common.  Such ranks must use these worlds in one order: where each of several ranks waits
    in another world for the next, the calls that wait raise TransportError.

    It lasts until the process ends, or until all its ranks call `World.close`.

    Collective: every rank of `comm` calls it, in the same order as its other collectives on `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        As for `init`.  Two calls with one communicator make two worlds.

    Raises
    ------
    TypeError, ValueError, RuntimeError, LaunchError, TransportTimeoutError
        As for `init`; the process may have other worlds.
    """
    world = transports.new_world(comm)
    assert world.closing_fn is not None
    return replace(world, closing_fn=partial(_close, world.closing_fn))


def world_communicator() -> Communicator:
    """Return the communicator of the world in force, the same object every time.

    That is the world of ``with world:``, else that of `init`, else all ranks of the job.  Collective at the first call,
    which may start MPI; local later.
    """
    return _communicator_of(transports.world())


def launched_communicator() -> Communicator:
    """Return `world_communicator()` for work on all ranks of the job; warn where a launcher was forgotten."""
    communicator = world_communicator()
    if communicator.size == 1 and transports.joined() is not None:
        _warn_of_missing_launcher()
    return communicator


def _close(release_fn: Callable[[World], None], world: World) -> None:
    """Give back what a world holds, once all its ranks have come here."""
    if not world.transport.closed:
        communicator = _communicator_of(world)
        communicator.barrier("close of a world")
        communicator.devices.close()
        release_fn(world)


def _communicator_of(world: World) -> Communicator:
    if world not in _communicators:
        _communicators[world] = _composed(world)
    return _communicators[world]


def _composed(world: World) -> Communicator:
    """Return a new communicator of a world; collective where a trace is asked for."""
    folder = world.control.settings.trace
    traced = tracer.Tracer(world) if folder else None
    communicator = Communicator(world, observer=traced or NOBODY)
    if communicator.size > 1 and communicator.transport.library:  # threads have none, and nothing stored
        communicator.load_choices = partial(store.load_choices, communicator)
    if traced is not None:
        traced.start(communicator, folder)
    return communicator


# -- a process in a job of several ranks that no launcher started: it works alone, and is told so ------------------


def _warn_of_missing_launcher() -> None:
    """Warn once when this process is to work on all ranks of a job of several, and was started without a launcher."""
    if settings().no_mpi or detect_launcher() is not None:
        return
    try:
        allocation = given_allocation()
    except ClusterResolutionError:  # who starts ranks there is told
        return
    if allocation is not None and allocation.ranks > 1 and _warned.acquire(blocking=False):
        _log.warning("%s", _warning(allocation))


def _warning(allocation: Allocation) -> str:
    option, ranks = het_group_option(allocation.components), f"{allocation.ranks} ranks"
    start = srun_cure(_library(), option=option) if allocation.scheduler == "Slurm" else "Start it with a launcher"
    if option:  # mpirun sees the first component only
        ranks += f" in {allocation.components} components"
    else:
        start += f", or with `mpidist run -n {allocation.ranks} SCRIPT`"
    return (
        f"{allocation.title} was given {ranks}, but no launcher started this process: it works alone, as rank 0 of 1. "
        f"{start}; where one rank is meant, set MPIDIST_NO_MPI=1"
    )


def _library() -> str:
    """Return the text by which the MPI that mpi4py loads tells its version; empty where there is none."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", _LIBRARY], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return child.stdout
