"""Collectives that move whole arrays by one schedule each, within a begun call."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy

from mpidist import arrays
from mpidist.arrays import wire_dtype
from mpidist.collectives.executor import Executor
from mpidist.runtime.control import Watch
from mpidist.schedules.table import algorithm as schedule_of
from mpidist.transports.base import Transport


def reduce_scatter(transport: Transport, buffer: Any, op: str, watch: Watch) -> Any:
    """Return this rank's share of the reduced array."""
    work, size = buffer.reshape(-1).astype(wire_dtype(buffer.dtype)), transport.size
    if size > 1:
        Executor(schedule_of("reduce_scatter", "ring"), transport, work, op).run(watch)
    first, last = (share * work.size // size for share in (transport.rank, transport.rank + 1))
    return work[first:last].astype(buffer.dtype)


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


def broadcast(transport: Transport, array: Any, root: int, watch: Watch) -> None:
    """Give all ranks the array of rank `root`, in place."""
    if transport.size > 1 and array.size:
        Executor(schedule_of("broadcast", "binomial"), transport, array.reshape(-1), root=root).run(watch)


def checked_axis(array: Any, axis: int) -> int:
    """Return the axis to join along, counted from the first; ValueError unless there is such an axis.  Local."""
    if array.ndim == 0:
        raise ValueError("all_gather needs an array of at least one dimension, got a scalar")
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
        shape = [length if index == axis else size for index, size in enumerate(others)]
        pieces.append(joined[bounds[rank] : bounds[rank + 1]].reshape(shape))
    return arrays.namespace(joined).concatenate(pieces, axis=axis)
