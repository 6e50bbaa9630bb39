"""Collectives that move whole arrays by one schedule each, within a begun call.

Ranks tell each other lengths over their transport.  Values go by a `Link` if there is one, else over the transport.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import TYPE_CHECKING, Any

import numpy

from mpidist import arrays
from mpidist.collectives.exchange.message_link import MessageLink
from mpidist.collectives.reductions.plan import Bucket
from mpidist.collectives.ways.pieces import shares
from mpidist.runtime.control import ControlChannel, Watch
from mpidist.transports.base import Transport

if TYPE_CHECKING:
    from mpidist.device.memory import Link


def reduce_scatter(
    transport: Transport, array: Any, watch: Watch, op: str, bucket: Bucket, link: Link | None = None
) -> Any:
    """Return this rank's rows of the reduced array; `bucket` has the dtypes in which it is reduced and given back."""
    size, rank = transport.size, transport.rank
    work, row = arrays.empty(array.shape, bucket.dtype, array), prod(array.shape[1:])
    work[...] = array
    cuts = shares(array.shape[0], size)
    if size > 1 and array.size:
        bounds = [cut * row for cut in cuts]
        values = link or MessageLink(transport)
        values.reduce_parts(work.reshape(-1), "sum" if op == "mean" else op, bounds, watch)
    share = work[cuts[rank] : cuts[rank + 1]]
    if op == "mean":
        share = arrays.namespace(work).multiply(share, 1.0 / size, dtype=bucket.dtype)
    return share.astype(bucket.result)


def gather(
    transport: Transport, array: Any, watch: Watch, axis: int, root: int | None = None, link: Link | None = None
) -> Any:
    """Return the arrays of all ranks, joined along `axis`, in which they may differ; only on `root`, if there is one.

    The others get None then.
    """
    return counted_gather(transport, array, watch, axis, root, link)[0]


def counted_gather(
    transport: Transport,
    array: Any,
    watch: Watch,
    axis: int = 0,
    root: int | None = None,
    link: Link | None = None,
) -> tuple[Any, list[int]]:
    """Return the same, and the length of each rank's."""
    size, rank = transport.size, transport.rank
    if size == 1:
        return array.copy(), [array.shape[axis]]
    messages, shown = MessageLink(transport), numpy.zeros(size, numpy.int64)
    shown[rank] = array.shape[axis]
    messages.gather(shown, range(size + 1), watch)
    values = link or messages
    lengths = shown.tolist()
    if root not in (None, rank):
        values.exchange({root: arrays.namespace(array).ascontiguousarray(array).reshape(-1)}, {}, watch)
        return None, lengths
    row = prod(length for index, length in enumerate(array.shape) if index != axis)
    bounds = [bound * row for bound in bounds_of(lengths)]
    joined = arrays.empty(bounds[-1], array.dtype, array)
    parts = [joined[start:stop] for start, stop in pairwise(bounds)]
    parts[rank][...] = array.reshape(-1)
    if root is None:
        values.gather(joined, bounds, watch)
    else:
        values.exchange({}, {giver: part for giver, part in enumerate(parts) if giver != rank}, watch)
    if axis == 0:
        return joined.reshape([sum(lengths), *array.shape[1:]]), lengths
    shaped = [
        part.reshape([*array.shape[:axis], length, *array.shape[axis + 1 :]])
        for part, length in zip(parts, lengths, strict=True)
    ]
    found = arrays.namespace(joined).concatenate(shaped, axis=axis)
    return found.astype(joined.dtype, copy=False), lengths  # concatenate gives the machine's byte order


def all_to_all(
    transport: Transport, given: tuple[Any, Sequence[int]], watch: Watch, link: Link | None = None
) -> tuple[Any, list[int]]:
    """Return the rows that all ranks have for this one, in rank order, and how many each of them gave.

    `given` are an array and its splits.
    """
    (array, splits), size, rank = given, transport.size, transport.rank
    others = [each for each in range(size) if each != rank]
    counts = numpy.array(splits, numpy.int64).reshape(size, 1)
    received = counts.copy()
    messages = MessageLink(transport)
    messages.exchange({each: counts[each] for each in others}, {each: received[each] for each in others}, watch)
    lengths = received[:, 0].tolist()
    own, bounds = arrays.namespace(array).ascontiguousarray(array), bounds_of(splits)
    result, places = arrays.empty((sum(lengths), *array.shape[1:]), array.dtype, array), bounds_of(lengths)
    gives, parts = (
        [joined[start:stop] for start, stop in pairwise(cuts)] for joined, cuts in ((own, bounds), (result, places))
    )
    values = link or messages
    values.exchange({each: gives[each] for each in others}, {each: parts[each] for each in others}, watch)
    parts[rank][...] = gives[rank]
    return result, lengths


def bounds_of(lengths: Sequence[int]) -> list[int]:
    """Return where parts of these lengths begin, and where the last one ends.  Local."""
    return [0, *accumulate(lengths)]


def from_root(transport: Transport, array: Any, root: int, watch: Watch, link: Link | None = None) -> None:
    """Give all ranks the array of rank `root`, in place."""
    if transport.size > 1 and array.size:
        (link or MessageLink(transport)).from_root(array.reshape(-1), root, watch)


def checked_splits(rows: int, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return how many rows each rank gets; equal parts by default.  Local.

    ValueError unless there is one split a rank, none negative, and they add up to `rows`; without splits, where `rows`
    is no multiple of `size`.  TypeError for a split that is no whole number.
    """
    if splits is None:
        if rows % size:
            raise ValueError(
                f"all_to_all of {rows} rows on {size} ranks: they cannot be dealt out evenly; pass splits, the number "
                "of rows for each rank"
            )
        return [rows // size] * size
    counts = whole_splits(splits)
    if len(counts) != size:
        raise ValueError(f"all_to_all on {size} ranks got {len(counts)} splits; give the number of rows for each rank")
    if min(counts) < 0:
        raise ValueError(f"all_to_all got the splits {counts}; the number of rows for a rank cannot be negative")
    if sum(counts) != rows:
        raise ValueError(f"all_to_all got splits of {sum(counts)} rows, {counts}, for an array of {rows} rows")
    return counts


def whole_splits(splits: Sequence[int]) -> list[int]:
    """Return splits as ints; TypeError for one that is no whole number, and for what is no sequence.  Local."""
    if not isinstance(splits, Iterable):
        raise TypeError(
            f"all_to_all: splits must be a sequence, got {splits!r} ({type(splits).__name__}); give the number of "
            "rows for each rank"
        )
    return [whole(each, "all_to_all: each of the splits") for each in splits]


def checked_axis(array: Any, axis: int, name: str = "all_gather") -> int:
    """Return the axis to join along, counted from the first; ValueError unless there is such an axis.  Local."""
    axis = whole(axis, f"{name}: axis")
    if array.ndim == 0:
        raise ValueError(f"{name} needs an array of at least one dimension, got a scalar")
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis {axis} is out of range for an array of {array.ndim} dimensions")
    return axis % array.ndim


def checked_rank(rank: int, size: int, what: str) -> int:
    """Return the number of a rank as `whole` does; ValueError unless there is such a rank.  Local."""
    rank = whole(rank, what)
    if not 0 <= rank < size:
        raise ValueError(f"{what} {rank} is no rank of a world of {size}")
    return rank


def whole(number: Any, what: str) -> int:
    """Return a whole number of any type as an int; TypeError for a truth value, and for what is no number.  Local."""
    if type(number) is int:
        return number
    try:
        if not isinstance(number, bool):
            return int(operator.index(number))
    except TypeError:
        pass
    raise TypeError(f"{what} must be a whole number, got {number!r} ({type(number).__name__}); pass an int")


def check_in_place(control: ControlChannel, verb: str, array: Any, is_written: bool = True) -> None:
    """Raise ValueError for an array that cannot be worked on in place.  Local."""
    flags = array.flags
    if flags.c_contiguous and not (is_written and not getattr(flags, "writeable", True)):  # devices' have no such flag
        return
    name = f"{control.own_name}: {verb}"
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} works in place on C-contiguous arrays, got shape {array.shape} with strides {array.strides}; "
            "pass numpy.ascontiguousarray(array) and copy the result back"
        )
    raise ValueError(f"{name} writes its result in place, got a read-only array; pass a copy of it")
