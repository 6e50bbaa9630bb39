"""Collectives over all ranks of the job, without a strategy: `mpidist.all_reduce`, `mpidist.all_gather` and so on.

They work on `world_communicator`, on one rank as on many.  Every rank of the job calls them in the same order, but for
`send` and `receive`.  A loop that calls one every step may bind it: the communicator has them as ``..._init``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist import arrays
from mpidist.collectives.reductions.adjustment import Adjustment
from mpidist.collectives.structures import of_leaves
from mpidist.options import ReduceOp
from mpidist.world import launched_communicator, world_communicator


def all_reduce(
    value: Any,
    op: ReduceOp | str = "sum",
    *,
    prescale: float | None = None,
    postscale: float | None = None,
    none_as_zeros: bool = False,
    timeout_seconds: float | None = None,
) -> Any:
    """Return a value reduced over all ranks; all arrays of a nested structure go in one fused call.

    Collective: every rank calls it in the same order, with the same structure, shapes and dtypes.

    Parameters
    ----------
    value : array or number, or nested tuples, lists and dicts of them
        Unchanged.
    op : ReduceOp or str
        SUM, MEAN, MIN, MAX or PRODUCT, also by name in any case.
    prescale, postscale : float, optional
        What values are multiplied by before they are reduced, and what results are multiplied by.
    none_as_zeros : bool
        Whether an array may be None on some ranks: it counts as zeros in a sum or a mean.  One that is None on all
        ranks is None in the result.  Ranks tell each other the shapes first; `all_reduce_init` of the communicator
        knows them.
    timeout_seconds : float, optional
        None for the default of 30 minutes, 0 for never.

    Returns
    -------
    array or nested structure
        As `value`, with new arrays that are the caller's; the same bits on every rank.  Means of integers are float64.

    Raises
    ------
    CollectiveMismatchError
        On all ranks, when they passed different arrays; names ranks, array and both shapes.
    TransportTimeoutError, RankFailedError
        A rank did not come, and why as far as it is known.
    UnsupportedDtypeError, ValueError, TypeError
        What cannot be reduced so; before any communication.
    """
    adjustment = Adjustment(prescale, postscale, none_as_zeros)

    def collective(given: list[Any]) -> list[Any]:
        return launched_communicator().all_reduce_list(given, ReduceOp.parse(op).verb, adjustment, timeout_seconds)

    return of_leaves(value, _array_or_none if none_as_zeros else _array, collective)


def all_gather(value: Any, axis: int = 0, *, timeout_seconds: float | None = None) -> Any:
    """Return the arrays of all ranks joined along `axis`, in rank order.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    value : array of at least one dimension
        Ranks may differ in the length of `axis`, and in nothing else.
    axis : int
    timeout_seconds : float, optional

    Raises
    ------
    ValueError
        A scalar, or `axis` out of range.
    CollectiveMismatchError, TransportTimeoutError, RankFailedError
        As for `all_reduce`.
    """
    return world_communicator().all_gather(_array(value), axis, timeout_seconds)


def gather(value: Any, root: int = 0, axis: int = 0, *, timeout_seconds: float | None = None) -> Any:
    """Return the arrays of all ranks joined along `axis`, in rank order, on rank `root`; None on the others.

    Collective: every rank calls it in the same order.  Parameters and errors as for `all_gather`.
    """
    return world_communicator().gather(_array(value), root, axis, timeout_seconds)


def reduce_scatter(value: Any, op: ReduceOp | str = "sum", *, timeout_seconds: float | None = None) -> Any:
    """Return this rank's rows of the reduced array: of n rows, those from r * n // size to (r + 1) * n // size.

    Collective: every rank calls it in the same order, with arrays of the same shape and dtype.

    Parameters
    ----------
    value : array of at least one dimension
    op : ReduceOp or str
        SUM, MEAN, MIN, MAX or PRODUCT, also by name in any case.
    timeout_seconds : float, optional

    Raises
    ------
    ValueError
        A scalar.
    CollectiveMismatchError, TransportTimeoutError, RankFailedError, UnsupportedDtypeError
        As for `all_reduce`.
    """
    return world_communicator().reduce_scatter(_array(value), ReduceOp.parse(op).verb, timeout_seconds)


def broadcast(value: Any, root: int = 0, *, timeout_seconds: float | None = None) -> Any:
    """Return the value of rank `root` on every rank, as new arrays.

    Collective: every rank calls it in the same order, with the same structure, shapes and dtypes.

    Parameters
    ----------
    value : array or number, or nested tuples, lists and dicts of them
    root : int
    timeout_seconds : float, optional

    Raises
    ------
    ValueError
        There is no rank `root`.
    CollectiveMismatchError, TransportTimeoutError, RankFailedError
        As for `all_reduce`.
    """
    communicator = world_communicator()

    def collective(given: list[Any]) -> list[Any]:
        return [communicator.broadcast_copy(each, root, timeout_seconds) for each in given]

    return of_leaves(value, _array, collective)


def all_to_all(
    value: Any, splits: Sequence[int] | None = None, *, timeout_seconds: float | None = None
) -> tuple[Any, list[int]]:
    """Send rows to every rank; return those that every rank has sent to this one, and how many each gave.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    value : array of at least one dimension
        Its first rows are for rank 0, the next ones for rank 1, and so on.  Ranks may differ in the number of rows.
    splits : sequence of int, optional
        How many rows each rank gets, 0 included; by default all get as many.
    timeout_seconds : float, optional

    Raises
    ------
    ValueError
        A scalar; splits that are negative, too many or too few, or that do not add up; before any communication.
    CollectiveMismatchError, TransportTimeoutError, RankFailedError
        As for `all_reduce`.
    """
    return world_communicator().all_to_all(_array(value), splits, timeout_seconds)


def send(value: Any, to: int, *, timeout_seconds: float | None = None) -> None:
    """Send an array to rank `to`, which receives it.  Local, but for that rank.

    It returns when the other rank has received the array, or when a short one is on its way.

    Raises
    ------
    ValueError
        There is no such rank, or it is this one.
    TransportTimeoutError, RankFailedError, RemoteReplicaError
        The other rank did not come, and why as far as it is known.
    """
    world_communicator().send(_array(value), to, timeout_seconds)


def receive(source: int, like: Any = None, *, timeout_seconds: float | None = None) -> Any:
    """Return the next array that rank `source` sends to this one.  Local, but for that rank.

    Parameters
    ----------
    source : int
    like : array, optional
        What is expected: another dtype or shape is a CollectiveMismatchError, on this rank only.
    timeout_seconds : float, optional

    Raises
    ------
    ValueError, TransportTimeoutError, RankFailedError, RemoteReplicaError
        As for `send`.
    """
    return world_communicator().receive(source, _array_or_none(like), timeout_seconds)


def _array(value: Any) -> Any:
    if value is None:
        raise TypeError("got None in place of an array; pass zeros, or ask all_reduce for none_as_zeros")
    return arrays.to_array(value)


def _array_or_none(value: Any) -> Any:
    return None if value is None else _array(value)
