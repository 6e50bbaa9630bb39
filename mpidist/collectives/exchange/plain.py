"""Collectives that move whole arrays by one schedule each, within a begun call."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.reductions.plan import Bucket
from mpidist.collectives.ways.executor import Executor
from mpidist.runtime.control import Watch
from mpidist.schedules.table import algorithm as schedule_of
from mpidist.transports.base import Transport


def cuts_of(rows: int, size: int) -> list[int]:
    """Return where the share of each rank begins, and where the last one ends.  Local."""
    return [rank * rows // size for rank in range(size + 1)]


def reduce_scatter(transport: Transport, array: Any, watch: Watch, op: str, bucket: Bucket) -> Any:
    """Return this rank's rows of the reduced array; `bucket` has the dtypes in which it is reduced and given back."""
    size, rank = transport.size, transport.rank
    work, row = arrays.empty(array.shape, bucket.dtype, array), prod(array.shape[1:])
    work[...] = array
    cuts = cuts_of(array.shape[0], size)
    if size > 1 and array.size:
        bounds = [cut * row for cut in cuts]
        ring = schedule_of("reduce_scatter", "ring")
        Executor(ring, transport, work.reshape(-1), "sum" if op == "mean" else op, bounds=bounds).run(watch)
    share = work[cuts[rank] : cuts[rank + 1]]
    if op == "mean":
        share = arrays.namespace(work).multiply(share, 1.0 / size, dtype=bucket.dtype)
    return share.astype(bucket.result)


def all_gather(transport: Transport, array: Any, axis: int, watch: Watch) -> Any:
    """Return the arrays of all ranks, joined along `axis`, in which they may differ."""
    if transport.size == 1:
        return array.copy()
    lengths = _lengths(transport, array.shape[axis], watch)
    others = list(array.shape)
    row = prod(length for index, length in enumerate(others) if index != axis)
    bounds = numpy.concatenate(([0], numpy.cumsum(lengths))) * row
    joined = arrays.empty(int(bounds[-1]), array.dtype, array)
    joined[bounds[transport.rank] : bounds[transport.rank + 1]] = array.reshape(-1)
    ring = schedule_of("all_gather", "ring")
    Executor(ring, transport, joined, bounds=[int(bound) for bound in bounds]).run(watch)
    return _unflattened(joined, bounds, others, axis, lengths)


def gather(transport: Transport, array: Any, watch: Watch, axis: int, root: int | None) -> Any:
    """Return the arrays of all ranks, joined along `axis`, on `root`; None on the others.  A root of None is all."""
    if root is None:
        return all_gather(transport, array, axis, watch)
    if transport.size == 1:
        return array.copy()
    own = arrays.namespace(array).ascontiguousarray(array)
    lengths = _lengths(transport, array.shape[axis], watch)
    if transport.rank != root:
        transport.wait([transport.send(own, root)], watch)
        return None
    shapes = [_with_length(array.shape, axis, length) for length in lengths]
    parts = [own if rank == root else arrays.empty(shape, array.dtype, array) for rank, shape in enumerate(shapes)]
    transport.wait([transport.receive(part, rank) for rank, part in enumerate(parts) if rank != root], watch)
    return arrays.namespace(array).concatenate(parts, axis=axis).astype(array.dtype, copy=False)


def all_to_all(transport: Transport, given: Any, watch: Watch) -> tuple[Any, list[int]]:
    """Return the rows that all ranks have for this one, in rank order, and how many each of them gave.

    `given` is an array, or an array and its splits as a tuple.
    """
    size, rank = transport.size, transport.rank
    array, splits = given if type(given) is tuple else (given, None)
    splits = checked_splits(len(array), splits, size)
    others = [each for each in range(size) if each != rank]
    counts = numpy.array(splits, numpy.int64).reshape(size, 1)
    received = counts.copy()
    receives = [transport.receive(received[each], each) for each in others]
    transport.wait(receives + [transport.send(counts[each], each) for each in others], watch)
    lengths = received[:, 0].tolist()
    own, bounds = arrays.namespace(array).ascontiguousarray(array), bounds_of(splits)
    result, places = arrays.empty((sum(lengths), *array.shape[1:]), array.dtype, array), bounds_of(lengths)
    receives = [transport.receive(result[places[each] : places[each + 1]], each) for each in others]
    sends = [transport.send(own[bounds[each] : bounds[each + 1]], each) for each in others]
    transport.wait(receives + sends, watch)
    result[places[rank] : places[rank + 1]] = own[bounds[rank] : bounds[rank + 1]]
    return result, lengths


def exchange(
    transport: Transport,
    gives: Mapping[int, Any],
    places: Mapping[int, Any],
    watch: Watch,
    meanwhile: Callable[[], object] | None = None,
) -> None:
    """Send other ranks what they are given, and receive into `places` what they give this one, by rank.

    `meanwhile` is called while messages are under way.
    """
    pending = [transport.receive(place, rank) for rank, place in places.items() if len(place)]
    pending += [transport.send(given, rank) for rank, given in gives.items() if len(given)]
    if meanwhile is not None:
        meanwhile()
    transport.wait(pending, watch)


def bounds_of(lengths: Sequence[int]) -> list[int]:
    """Return where parts of these lengths begin, and where the last one ends.  Local."""
    return [0, *accumulate(lengths)]


def broadcast(transport: Transport, array: Any, root: int, watch: Watch) -> None:
    """Give all ranks the array of rank `root`, in place."""
    if transport.size > 1 and array.size:
        Executor(schedule_of("broadcast", "binomial"), transport, array.reshape(-1), root=root).run(watch)


def checked_splits(rows: int, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return how many rows each rank gets; equal parts by default.  Local.

    Raises
    ------
    ValueError
        There is not one split a rank, one is negative, or they do not add up to `rows`; without splits, `rows` is no
        multiple of `size`.
    TypeError
        A split is no whole number.
    """
    if splits is None:
        if rows % size:
            raise ValueError(
                f"all_to_all of {rows} rows on {size} ranks: they cannot be dealt out evenly; pass splits, the number "
                "of rows for each rank"
            )
        return [rows // size] * size
    found = [operator.index(each) for each in splits]
    if len(found) != size:
        raise ValueError(f"all_to_all on {size} ranks got {len(found)} splits; give the number of rows for each rank")
    if min(found) < 0:
        raise ValueError(f"all_to_all got the splits {found}; the number of rows for a rank cannot be negative")
    if sum(found) != rows:
        raise ValueError(f"all_to_all got splits of {sum(found)} rows, {found}, for an array of {rows} rows")
    return found


def checked_axis(array: Any, axis: int, name: str = "all_gather") -> int:
    """Return the axis to join along, counted from the first; ValueError unless there is such an axis.  Local."""
    if array.ndim == 0:
        raise ValueError(f"{name} needs an array of at least one dimension, got a scalar")
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(f"axis {axis} is out of range for an array of {array.ndim} dimensions")
    return axis % array.ndim


def check_contiguous(name: str, array: Any) -> None:
    """Raise ValueError for an array that cannot be worked on in place.  Local."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name} works in place on C-contiguous arrays, got shape {array.shape} with strides {array.strides}; "
            "pass numpy.ascontiguousarray(array) and copy the result back"
        )


def _lengths(transport: Transport, length: int, watch: Watch) -> list[int]:
    lengths = numpy.zeros(transport.size, dtype=numpy.int64)
    lengths[transport.rank] = length
    ring = schedule_of("all_gather", "ring")
    Executor(ring, transport, lengths, bounds=range(transport.size + 1)).run(watch)
    return lengths.tolist()


def _unflattened(joined: Any, bounds: Any, others: Sequence[int], axis: int, lengths: list[int]) -> Any:
    """Return flat pieces, one a rank, as one array joined along `axis`."""
    if axis == 0:
        return joined.reshape([sum(lengths), *others[1:]])
    pieces = []
    for rank, length in enumerate(lengths):
        pieces.append(joined[bounds[rank] : bounds[rank + 1]].reshape(_with_length(others, axis, length)))
    joined_pieces = arrays.namespace(joined).concatenate(pieces, axis=axis)
    return joined_pieces.astype(joined.dtype, copy=False)  # of another byte order


def _with_length(shape: Sequence[int], axis: int, length: int) -> list[int]:
    """Return a shape with another length of one axis."""
    return [length if index == axis else size for index, size in enumerate(shape)]
