"""Collectives that move whole arrays by one schedule each: reduce-scatter, all-gather, broadcast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist import arrays
from mpidist.arrays import wire_dtype
from mpidist.collectives.caller import Caller
from mpidist.collectives.executor import Executor
from mpidist.runtime.control import Watch
from mpidist.schedules.table import algorithm as schedule_of


class PlainCollectives(Caller):
    """The collectives of which there is one way each; parameters and attributes as for `Caller`."""

    def reduce_scatter(self, buffer: Any, op: str = "sum", timeout_seconds: float | None = None) -> Any:
        """Return this rank's share of the reduced array: of n elements those from r * n // size to (r + 1) * n // size.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        buffer : array, C-contiguous, any shape, unchanged
        op : str
        """
        buffer = self._plain(buffer, op)
        call = self.call(f"reduce_scatter({op})", [("", buffer.dtype, buffer.shape)])
        work = buffer.reshape(-1).astype(wire_dtype(buffer.dtype))
        with self.control.turnstile:
            watch = self.begin(call, timeout_seconds)
            if self.size > 1:
                Executor(schedule_of("reduce_scatter", "ring"), self.transport, work, op).run(watch)
        first, last = (share * work.size // self.size for share in (self.rank, self.rank + 1))
        return work[first:last].astype(buffer.dtype)

    def all_gather(self, array: Any, axis: int = 0, timeout_seconds: float | None = None) -> Any:
        """Return the arrays of all ranks, joined along `axis` in rank order.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        array : array, at least one dimension
            Ranks may differ in the length of `axis`, and in nothing else.
        axis : int
        """
        array = self._plain(array)
        if array.ndim == 0:
            raise ValueError("all_gather needs an array of at least one dimension, got a scalar")
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(f"axis {axis} is out of range for an array of {array.ndim} dimensions")
        axis %= array.ndim
        others = [-1 if index == axis else length for index, length in enumerate(array.shape)]
        call = self.call(f"all_gather(axis={axis})", [("", array.dtype, others)])
        with self.control.turnstile:
            watch = self.begin(call, timeout_seconds)
            return array.copy() if self.size == 1 else self._joined(array, axis, others, watch)

    def _joined(self, array: Any, axis: int, others: list[int], watch: Watch) -> Any:
        """Return the arrays of all ranks joined along `axis`; `others` is the shape they have in common."""
        lengths = self._lengths(array.shape[axis], watch)
        row = array.size // array.shape[axis] if array.shape[axis] else _product(others, axis)
        bounds = numpy.concatenate(([0], numpy.cumsum(lengths))) * row
        joined = arrays.empty(int(bounds[-1]), array.dtype, array)
        joined[bounds[self.rank] : bounds[self.rank + 1]] = array.reshape(-1)
        ring = schedule_of("all_gather", "ring")
        Executor(ring, self.transport, joined, bounds=[int(bound) for bound in bounds]).run(watch)
        return _unflatten(joined, bounds, others, axis, lengths)

    def _lengths(self, length: int, watch: Watch) -> list[int]:
        lengths = numpy.zeros(self.size, dtype=numpy.int64)
        lengths[self.rank] = length
        ring = schedule_of("all_gather", "ring")
        Executor(ring, self.transport, lengths, bounds=range(self.size + 1)).run(watch)
        return lengths.tolist()

    def broadcast(self, array: Any, root: int = 0, timeout_seconds: float | None = None) -> None:
        """Give all ranks the array of rank `root`, in place.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        array : array, C-contiguous, any dtype, modified in place on all ranks but `root`
        root : int
        """
        if not 0 <= root < self.size:
            raise ValueError(f"root {root} is no rank of a world of {self.size}")
        array = self._plain(array)
        if not array.flags.c_contiguous:
            raise not_contiguous("broadcast", array)
        call = self.call(f"broadcast(root={root})", [("", array.dtype, array.shape)])
        with self.control.turnstile:
            watch = self.begin(call, timeout_seconds)
            if self.size > 1 and array.size:
                schedule = schedule_of("broadcast", "binomial")
                Executor(schedule, self.transport, array.reshape(-1), root=root).run(watch)


def not_contiguous(name: str, array: Any) -> ValueError:
    """Return the error for an array that cannot be worked on in place."""
    return ValueError(
        f"{name} works in place on C-contiguous arrays, got shape {array.shape} with strides {array.strides}; "
        "pass numpy.ascontiguousarray(array) and copy the result back"
    )


def _product(lengths: Sequence[int], skip: int) -> int:
    product = 1
    for index, length in enumerate(lengths):
        product *= 1 if index == skip else length
    return product


def _unflatten(joined: Any, bounds: Any, others: list[int], axis: int, lengths: list[int]) -> Any:
    """Return flat pieces, one a rank, as one array joined along `axis`."""
    if axis == 0:
        return joined.reshape([sum(lengths), *others[1:]])
    pieces = []
    for rank, length in enumerate(lengths):
        shape = [length if index == axis else size for index, size in enumerate(others)]
        pieces.append(joined[bounds[rank] : bounds[rank + 1]].reshape(shape))
    return arrays.namespace(joined).concatenate(pieces, axis=axis)
