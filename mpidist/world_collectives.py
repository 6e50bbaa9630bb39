"""Collectives over all ranks of the job, without a strategy: `mpidist.all_reduce`, `mpidist.all_gather` and so on.

They work on `world_communicator`, on one rank as on many.  Every rank of the job calls them in the same order, but for
`send` and `receive`.  A loop that calls one every step may bind it: each has a form that ends in ``_init``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist import arrays
from mpidist.collectives.exchange.point_to_point import BoundReceive, BoundSend
from mpidist.collectives.persistent import Bound
from mpidist.collectives.persistent_all_reduce import PersistentAllReduce
from mpidist.collectives.persistent_collective import PersistentCollective
from mpidist.collectives.reductions.adjustment import Adjustment
from mpidist.collectives.structures import Paths, leaf_by_leaf, of_leaves
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

    def collective(given: list[Any], paths: Paths) -> list[Any]:
        ranks, verb = launched_communicator(), ReduceOp.parse(op).verb
        return ranks.all_reduce_list(given, verb, adjustment, timeout_seconds, paths)

    return of_leaves(value, _array_or_none if none_as_zeros else _array, collective)


def all_gather(value: Any, axis: int = 0, *, timeout_seconds: float | None = None) -> Any:
    """Return the arrays of all ranks joined along `axis`, in rank order.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    value : array of at least one dimension
        Ranks may differ in the length of `axis`, text in its width, and in nothing else.
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
    ranks = world_communicator()

    def from_root(leaf: Any, paths: tuple[str, ...]) -> Any:
        return ranks.broadcast_copy(leaf, root, timeout_seconds, paths)

    return of_leaves(value, _array, leaf_by_leaf(ranks, "broadcast", timeout_seconds, from_root))


def all_to_all(
    value: Any, splits: Sequence[int] | None = None, *, timeout_seconds: float | None = None
) -> tuple[Any, list[int]]:
    """Send rows to every rank; return those that every rank has sent to this one, and how many each gave.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    value : array of at least one dimension
        Its first rows are for rank 0, the next ones for rank 1, and so on.  Ranks may differ in the number of rows;
        text has one width on all of them.
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
        What is expected: another dtype or shape is a CollectiveMismatchError, on this rank only.  What comes is put
        into memory of its kind; without it, into the host's.
    timeout_seconds : float, optional

    Raises
    ------
    ValueError, TransportTimeoutError, RankFailedError, RemoteReplicaError
        As for `send`.
    """
    return world_communicator().receive(source, _array_or_none(like), timeout_seconds)


# -- bound to the ranks of the world in force, and to shapes and dtypes ------------------------------------------------


def all_reduce_init(
    like: Any,
    op: ReduceOp | str = "sum",
    *,
    prescale: float | None = None,
    postscale: float | None = None,
    none_as_zeros: bool = False,
    timeout_seconds: float | None = None,
) -> PersistentAllReduce:
    """Bind an `all_reduce` to the shapes and dtypes of a value, to be called, or started, with values like it.

    Collective: every rank calls it in the same order; nothing is reduced.

    Parameters
    ----------
    like : array or number, or nested tuples, lists and dicts of them
        No reference to it is kept.
    op, prescale, postscale, timeout_seconds
        As for `all_reduce`, for all calls.
    none_as_zeros : bool
        Whether an array may be None in a call.

    Raises
    ------
    UnsupportedDtypeError, ValueError, TypeError
        What cannot be reduced so; before any communication.
    """
    communicator, verb = launched_communicator(), ReduceOp.parse(op).verb
    adjustment = Adjustment(prescale, postscale, none_as_zeros)

    def bind(examples: list[Any], paths: Paths) -> Bound:
        return communicator.engine().bind(examples, verb, timeout_seconds, adjustment, paths)

    return PersistentAllReduce(bind, like, _array, none_as_zeros)


def all_gather_init(like: Any, axis: int = 0, *, timeout_seconds: float | None = None) -> PersistentCollective:
    """Return the `all_gather` of values like this one, of any length of `axis`.  Local.

    Text has one width on all ranks.
    """
    return PersistentCollective(world_communicator(), "all_gather", (axis,), like, _array, timeout_seconds)


def gather_init(
    like: Any, root: int = 0, axis: int = 0, *, timeout_seconds: float | None = None
) -> PersistentCollective:
    """Return the `gather` of values like this one, of any length of `axis`.  Local.

    Text has one width on all ranks.
    """
    return PersistentCollective(world_communicator(), "gather", (root, axis), like, _array, timeout_seconds)


def reduce_scatter_init(
    like: Any, op: ReduceOp | str = "sum", *, timeout_seconds: float | None = None
) -> PersistentCollective:
    """Return the `reduce_scatter` of values like this one.  Local."""
    arguments = (ReduceOp.parse(op).verb,)
    return PersistentCollective(world_communicator(), "reduce_scatter", arguments, like, _array, timeout_seconds)


def broadcast_init(like: Any, root: int = 0, *, timeout_seconds: float | None = None) -> PersistentCollective:
    """Return the `broadcast` of values like this one.  Local."""
    return PersistentCollective(world_communicator(), "broadcast", (root,), like, _array, timeout_seconds)


def all_to_all_init(like: Any, splits: Sequence[int] | None = None, *, timeout_seconds: float | None = None) -> Bound:
    """Return the `all_to_all` of arrays like this one, of any number of rows.  Local.

    It is called, or started, with an array, or with an array and its splits as a tuple; `splits` are for calls that
    give none.
    """
    bound = world_communicator().all_to_all_init(_array(like), splits)
    bound.timeout_seconds = timeout_seconds
    return bound


def send_init(like: Any, to: int) -> BoundSend:
    """Return the `send` of arrays like this one: its ``start`` sends, and returns what is waited for.  Local."""
    return world_communicator().send_init(_array(like), to)


def receive_init(like: Any, source: int) -> BoundReceive:
    """Return the `receive` of arrays like this one, which may be started before they are sent.  Local."""
    return world_communicator().receive_init(_array(like), source)


def _array(value: Any) -> Any:
    if value is None:
        raise TypeError("got None in place of an array; pass zeros, or ask all_reduce for none_as_zeros")
    return arrays.to_array(value)


def _array_or_none(value: Any) -> Any:
    return None if value is None else _array(value)
