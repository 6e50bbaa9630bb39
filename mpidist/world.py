"""The composition root: worlds of a program's own ranks, and their communicators, with tuning and tracing handed in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from mpidist import transports
from mpidist.cluster.missing_launcher import warn_of_missing_launcher
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.observer import NOBODY
from mpidist.tracing import tracer
from mpidist.transports import World
from mpidist.tuning import store

_communicators: WeakKeyDictionary[World, Communicator] = WeakKeyDictionary()


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
        warn_of_missing_launcher()
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
