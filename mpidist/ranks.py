"""This process among the ranks, without a strategy: its place, a barrier, and exchanges of objects.

All of it is about the world in force: that of ``with world:``, else the world of the process (`mpidist.init`).  On a
worker of a `ParameterServerStrategy` that is the ranks of the worker.  A process that no launcher started is rank 0 of
1, and MPI is not started for it.
"""

from __future__ import annotations

from typing import Any

from mpidist import transports
from mpidist.collectives.exchange import objects
from mpidist.world import world_communicator


def rank() -> int:
    """Return the number of this rank, from 0.

    Collective where it is the first use of the ranks, which joins them; Local later.  The same holds for `size`,
    `local_rank`, `local_size` and `node`.

    Raises
    ------
    LaunchError
        A launcher started several ranks, but they did not find each other.
    """
    return transports.world().rank


def size() -> int:
    """Return the number of ranks.  Errors, and when it is collective, as for `rank`."""
    return transports.world().size


def local_rank() -> int:
    """Return the number of this rank among those of its node.  Errors, and when it is collective, as for `rank`."""
    return transports.world().local_rank


def local_size() -> int:
    """Return the number of ranks on this rank's node.  Errors, and when it is collective, as for `rank`."""
    return transports.world().local_size


def node() -> int:
    """Return the number of this rank's node, from 0; nodes count by first appearance in rank order.

    Errors, and when it is collective, as for `rank`.
    """
    return transports.world().node


def barrier(timeout_seconds: float | None = None) -> None:
    """Return when all ranks have come here.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    timeout_seconds : float, optional
        None means ``MPIDIST_TIMEOUT_SECONDS``, 0 never.

    Raises
    ------
    CollectiveMismatchError
        On all ranks: some of them make another call here; names both.
    TransportTimeoutError, RankFailedError
        A rank did not come; names it.
    """
    world_communicator().barrier(timeout_seconds=timeout_seconds)


def broadcast_object(obj: Any, root_rank: int = 0, *, timeout_seconds: float | None = None) -> Any:
    """Return the object of one rank on all ranks.

    Collective: every rank calls it in the same order, with the same `root_rank`.

    Parameters
    ----------
    obj : object
        Anything that can be pickled; counts on `root_rank` only.
    root_rank : int
    timeout_seconds : float, optional
        As for `barrier`.

    Returns
    -------
    On `root_rank` `obj` itself; elsewhere a copy of it, the caller's own.

    Raises
    ------
    ObjectError
        The object cannot be pickled: on all ranks.  It cannot be unpickled: on the rank that cannot.
    ValueError
        There is no rank `root_rank`; raised before anything is sent.
    CollectiveMismatchError, TransportTimeoutError, RankFailedError
        As for `barrier`; ranks that give another `root_rank` make another call.
    """
    return objects.broadcast_object(world_communicator(), obj, root_rank, timeout_seconds)


def all_gather_object(obj: Any, *, timeout_seconds: float | None = None) -> list[Any]:
    """Return the objects of all ranks, in rank order.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    obj : object
        Anything that can be pickled; ranks may give objects of different types and sizes.
    timeout_seconds : float, optional
        As for `barrier`.

    Returns
    -------
    list of object
        Copies, of this rank's own object too.

    Raises
    ------
    ObjectError
        An object cannot be pickled: on all ranks.  It cannot be unpickled: on the rank that cannot.
    CollectiveMismatchError, TransportTimeoutError, RankFailedError
        As for `barrier`.
    """
    return objects.all_gather_object(world_communicator(), obj, timeout_seconds)
