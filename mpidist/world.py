"""The composition root: the communicator of all ranks, to which tuning and tracing are handed in."""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

from mpidist import transports
from mpidist.collectives.communicator import Communicator
from mpidist.tracing import tracer
from mpidist.transports import World
from mpidist.tuning import store

_communicators: WeakKeyDictionary[World, Communicator] = WeakKeyDictionary()


def world_communicator() -> Communicator:
    """Return the communicator of all ranks of the job, the same object every time.

    Collective at the first call, which may start MPI; local later.
    """
    world = transports.world()
    if world not in _communicators:
        _communicators[world] = _composed(world)
    return _communicators[world]


def _composed(world: World) -> Communicator:
    """Return a new communicator of a world; collective where a trace is asked for."""
    communicator = Communicator(world)
    if communicator.size > 1 and communicator.transport.library:  # threads have none, and nothing stored
        communicator.load_choices = partial(store.load_choices, communicator)
    folder = communicator.control.settings.trace
    if folder:
        communicator.trace = tracer.attach(communicator, folder)
    return communicator
