"""The buckets whose sums are begun early: where they lie, and how their sums are made."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from mpidist.arrays import empty
from mpidist.collectives.reductions.plan import Plan
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.executor import MESSAGE_BYTES, Executor
from mpidist.collectives.ways.pieces import Pieces
from mpidist.device.answers import Answer
from mpidist.device.memory import DeviceMemory, Link
from mpidist.errors import MpidistError
from mpidist.runtime.watch import Watch
from mpidist.schedules.table import hierarchical

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: So many messages of a bucket are under way at most: a rank that computes comes by every few milliseconds only.  They
#: are received into memory besides the bucket.
_AHEAD = 127


class StartedSum(Protocol):
    """A sum that was begun.  `done`: nothing is left to do on this rank."""

    @property
    def done(self) -> bool: ...

    def poll(self) -> bool:
        """Do what can be done now, and return whether that was all."""
        ...

    def abandon(self) -> None:
        """Give up after an error."""


class Buckets(Protocol):
    """The buckets of one plan, of which each is filled, summed and taken again and again.

    `are_connected`: sums can be begun.  `go_alone`: they go on without the host.
    """

    go_alone: bool

    @property
    def are_connected(self) -> bool: ...

    def connect(self, watch: Watch) -> None:
        """Connect the ranks, if they are not yet.  Collective: every rank calls it, within a begun call."""

    def enter(self) -> None:
        """Have later work come behind what the current stream was given.  Local."""

    def fill(self, index: int, arrays: Sequence[Any]) -> None:
        """Copy the C-contiguous arrays of a bucket into it.  Local."""

    def start(self, index: int) -> StartedSum:
        """Begin the sum of a bucket.  Local."""
        ...

    def end(self) -> None:
        """Have what was begun be complete for who comes later.  Local."""

    def take(self, index: int, arrays: Sequence[Any], scale: float | None) -> None:
        """Copy what is in a bucket into arrays, multiplied; None stands for one that is left out.  Local."""

    def close(self) -> None:
        """Give back what it holds.  Collective: every rank calls it in the same order."""


def buckets_of(ranks: Communicator, plan: Plan, channels: Sequence[int], kind: Any) -> Buckets:
    """Return the buckets of a plan, each of which has a channel, for arrays of a kind.  Local."""
    memory = None if kind is None else ranks.devices.memory(kind)
    if memory is None:
        return HostBuckets(ranks, plan, channels)
    return DeviceBuckets(ranks, plan, channels[0], memory, kind)


class HostBuckets:
    """Buckets in host memory, whose sums are made by messages; see `Buckets`."""

    are_connected, go_alone = True, False

    def __init__(self, ranks: Communicator, plan: Plan, channels: Sequence[int]) -> None:
        schedule = hierarchical(ranks.topology, selection.between_carriers(ranks.topology))
        transports = [ranks.transport.among(range(ranks.size), each) for each in channels]
        self._pieces = [Pieces(bucket.offsets) for bucket in plan.buckets]
        self.buffers = [numpy.empty(bucket.elements, bucket.dtype) for bucket in plan.buckets]
        self._executors = [
            Executor(schedule, transport, buffer, segment_bytes=MESSAGE_BYTES, ahead=_AHEAD)
            for transport, buffer in zip(transports, self.buffers, strict=True)
        ]

    def connect(self, watch: Watch) -> None:
        """Do nothing: messages need no more."""

    def enter(self) -> None:
        """Do nothing: the host has no streams."""

    def fill(self, index: int, arrays: Sequence[Any]) -> None:
        """Copy arrays into a bucket."""
        self._pieces[index].gather(0, self._pieces[index].elements, arrays, self.buffers[index])

    def start(self, index: int) -> StartedSum:
        """Begin the sum of a bucket."""
        return self._executors[index].start()

    def end(self) -> None:
        """Do nothing: what is done is there."""

    def take(self, index: int, arrays: Sequence[Any], scale: float | None) -> None:
        """Copy what is in a bucket into arrays, whatever the order of their axes, multiplied."""
        for (start, stop), array in zip(pairwise(self._pieces[index].offsets), arrays, strict=True):
            if array is None:
                continue
            values = self.buffers[index][start:stop].reshape(array.shape)
            if scale is None:
                array[...] = values
            else:
                numpy.multiply(values, scale, out=array)

    def close(self) -> None:
        """Do nothing: memory is given back when nobody has it."""


class DeviceBuckets:
    """Buckets in device memory, whose sums a link makes beside the current stream; see `Buckets`."""

    go_alone = True

    def __init__(self, ranks: Communicator, plan: Plan, channel: int, memory: DeviceMemory, kind: Any) -> None:
        self._ranks, self._channel, self._memory, self._op = ranks, channel, memory, plan.reduction
        self._packings = [memory.packing(bucket.offsets) for bucket in plan.buckets]
        self._buffers = [memory.kept(empty(bucket.elements, bucket.dtype, kind)) for bucket in plan.buckets]
        self._marks = memory.kept(empty((2, len(self._buffers)), numpy.dtype(numpy.uint64), kind))
        self._stream = memory.own_stream()
        self._watch = Watch(ranks.control, "sums that were begun early", None, 0)
        self._link: Link | None = None

    @property
    def are_connected(self) -> bool:
        """Whether there is a link."""
        return self._link is not None

    def connect(self, watch: Watch) -> None:
        """Make a link of their own: other calls come in another order on each rank."""
        if self._link is None:
            self._link = self._ranks.devices.link_at(self._memory, self._channel, watch)

    def enter(self) -> None:
        """Have later work come behind what the current stream was given: arrays may come in several streams."""
        self._memory.enter(())

    def fill(self, index: int, arrays: Sequence[Any]) -> None:
        """Copy arrays into a bucket."""
        self._memory.enter(arrays)
        self._packings[index].pack(arrays, self._buffers[index])

    def mark(self, index: int, arrays: Sequence[Any], is_first: bool) -> None:
        """Have the device make a number of the bytes of a bucket's arrays, the first or the second time."""
        self._memory.enter(arrays)
        row = 0 if is_first else 1
        self._packings[index].mark(arrays, self._marks[row, index : index + 1])

    def have_changed(self, count: int) -> Answer:
        """Return whether the arrays of one of the first `count` buckets were others the second time."""
        first, second = self._marks[0, :count], self._marks[1, :count]
        changed = (first != second).astype(numpy.uint8)
        found = self._memory.host_buffer(count, changed.dtype)
        return Answer(self._memory.read(changed, found), found)

    def start(self, index: int) -> StartedSum:
        """Begin the sum of a bucket behind the current stream's work."""
        assert self._link is not None
        if self._link.left is None:
            self._link.left = self._stream.arrival()
        self._stream.begin(partial(self._link.reduce, self._buffers[index], self._op, self._watch))
        return _ByDevice(self._link, self._buffers[index])

    def end(self) -> None:
        """Order the current stream behind the sums."""
        self._stream.end()
        if self._link is not None:
            self._link.left = None

    def take(self, index: int, arrays: Sequence[Any], scale: float | None) -> None:
        """Copy what is in a bucket into arrays, none of which is left out, multiplied."""
        self._memory.enter(arrays)
        self._packings[index].unpack(self._buffers[index], arrays, scale)

    def close(self) -> None:
        """Close the link, and give back the memory."""
        self._buffers.clear()
        self._ranks.devices.close_at(self._memory, self._channel)
        self._link = None
        self._memory.trim()


#: What a device may still write to, as it was begun and never taken.
_left: list[Any] = []


class _ByDevice:
    """A sum that a device makes by itself; see `StartedSum`."""

    done = True

    def __init__(self, link: Link, buffer: Any) -> None:
        self._link, self._buffer = link, buffer

    def poll(self) -> bool:
        """Return True."""
        return True

    def abandon(self) -> None:
        """Break the sum off, which others may never begin, when those before it are done."""
        _left.append(self._buffer)
        with suppress(MpidistError):  # which every later call raises
            self._link.close(in_order=True)
