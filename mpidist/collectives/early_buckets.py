"""The buckets whose sums are begun early: where they lie, and how their sums are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy

from mpidist.arrays import empty
from mpidist.collectives.reductions.plan import Plan
from mpidist.collectives.ways import selection
from mpidist.collectives.ways.executor import MESSAGE_BYTES, Executor
from mpidist.collectives.ways.pieces import Pieces
from mpidist.device.answers import Answer
from mpidist.device.memory import Arrived, DeviceMemory, Link
from mpidist.errors import MpidistError
from mpidist.runtime.watch import Watch
from mpidist.schedules.table import hierarchical

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: So many messages of a bucket are under way at most: a rank that computes comes by every few milliseconds only.  They
#: are received into memory besides the bucket.
_AHEAD = 127


class EarlyPlan(NamedTuple):
    """The buckets of a list.  On a device they lie in `memory`, of which `kind` is an array; on the host it is None."""

    plan: Plan
    memory: DeviceMemory | None
    kind: Any


class StartedSum(Protocol):
    """A sum that was begun."""

    def poll(self) -> bool:
        """Do what can be done now, and return whether that was all."""
        ...

    def abandon(self) -> None:
        """Give up: after an error, or where nobody takes the sum."""


class Buckets(Protocol):
    """The buckets of one plan, of which each is filled, summed and taken again and again."""

    def connected(self, watch: Watch, /) -> AbstractContextManager[None]:
        """Connect the ranks, if they are not yet; behind the block is complete what was begun.

        Collective: every rank calls it, within a begun call.
        """
        ...

    def fill(self, index: int, arrays: Sequence[Any]) -> None:
        """Copy the C-contiguous arrays of a bucket into it.  Local."""

    def start(self, index: int) -> StartedSum | None:
        """Begin the sum of a bucket; None where the ranks are not connected.  Local."""
        ...

    def take(self, index: int, arrays: Sequence[Any], scale: float | None) -> None:
        """Copy what is in a bucket into arrays, multiplied; None stands for one that is left out.  Local."""


def buckets_of(ranks: Communicator, early: EarlyPlan, channels: Sequence[int]) -> Buckets:
    """Return the buckets of a plan, each of which has a channel.  Local."""
    if early.memory is None:
        return HostBuckets(ranks, early.plan, channels)
    return DeviceBuckets(ranks, early.plan, channels[0], early.memory, early.kind)


class HostBuckets:
    """Buckets in host memory, whose sums are made by messages; see `Buckets`."""

    connected: Callable[..., AbstractContextManager[Any]] = nullcontext  # messages need no more

    def __init__(self, ranks: Communicator, plan: Plan, channels: Sequence[int]) -> None:
        schedule = hierarchical(ranks.topology, selection.between_carriers(ranks.topology))
        transports = [ranks.transport.among(range(ranks.size), each) for each in channels]
        self._pieces = [Pieces(bucket.offsets) for bucket in plan.buckets]
        self.buffers = [numpy.empty(bucket.elements, bucket.dtype) for bucket in plan.buckets]
        self._executors = [
            Executor(schedule, transport, buffer, segment_bytes=MESSAGE_BYTES, ahead=_AHEAD)
            for transport, buffer in zip(transports, self.buffers, strict=True)
        ]

    def fill(self, index: int, arrays: Sequence[Any]) -> None:
        """Copy arrays into a bucket."""
        self._pieces[index].gather(0, self._pieces[index].elements, arrays, self.buffers[index])

    def start(self, index: int) -> StartedSum:
        """Begin the sum of a bucket."""
        return self._executors[index].start()

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


class DeviceBuckets:
    """Buckets in device memory, whose sums a link makes beside the current stream; see `Buckets`."""

    def __init__(self, ranks: Communicator, plan: Plan, channel: int, memory: DeviceMemory, kind: Any) -> None:
        _forget_left()
        self._memory, self._op = memory, plan.reduction
        self._connect = partial(ranks.devices.link_at, memory, channel)
        self._disconnect = partial(ranks.devices.close_at, memory, channel)
        self._packings = [memory.packing(bucket.offsets) for bucket in plan.buckets]
        self._buffers = [memory.kept(empty(bucket.elements, bucket.dtype, kind)) for bucket in plan.buckets]
        self._marks = memory.kept(empty((2, len(self._buffers)), numpy.dtype(numpy.uint64), kind))
        self._stream = memory.own_stream()
        self._watch = Watch(ranks.control, "sums that were begun early", None, 0)
        self._link: Link | None = None

    @contextmanager
    def connected(self, watch: Watch, /) -> Iterator[None]:
        """Make a link, if there is none; behind the block, order the current stream behind the sums."""
        if self._link is None:  # of their own: other calls come in another order on each rank
            self._link = self._connect(watch)
        yield
        self._stream.end()
        self._link.left = None

    def fill(self, index: int, arrays: Sequence[Any]) -> None:
        """Copy arrays into a bucket, and mark them."""
        self._memory.enter(arrays)
        self._packings[index].pack(arrays, self._buffers[index])
        self.mark(index, arrays, is_again=False)

    def mark(self, index: int, arrays: Sequence[Any], is_again: bool = True) -> None:
        """Have the device make a number of the bytes of a bucket's arrays; `have_changed` compares two."""
        self._memory.enter(arrays)
        self._packings[index].mark(arrays, self._marks[int(is_again), index : index + 1])

    def have_changed(self, count: int) -> Answer:
        """Return whether one of the first `count` buckets was filled with other bytes than were marked again."""
        first, second = self._marks[0, :count], self._marks[1, :count]
        changed = (first != second).astype(numpy.uint8)
        found = self._memory.host_buffer(count, changed.dtype)
        return Answer(self._memory.read(changed, found), found)

    def start(self, index: int) -> StartedSum | None:
        """Begin the sum of a bucket behind the current stream's work."""
        if self._link is None:
            return None
        self._stream.begin(partial(self._reduce, self._link, self._buffers[index]))
        return _ByDevice(self._buffers[index], self._stream.arrival(), self._disconnect)

    def _reduce(self, link: Link, buffer: Any) -> None:
        """Begin a sum in the stream.  All ranks have begun what is before the first of a list, also of another list."""
        if link.left is None:
            link.left = self._stream.arrival()
        link.reduce(buffer, self._op, self._watch)

    def take(self, index: int, arrays: Sequence[Any], scale: float | None) -> None:
        """Copy what is in a bucket into arrays, none of which is left out, multiplied."""
        self._memory.enter(arrays)
        self._packings[index].unpack(self._buffers[index], arrays, scale)

    def close(self) -> None:
        """Close the link, and give back the memory.  Collective: every rank calls it in the same order."""
        self._buffers.clear()
        self._disconnect()
        self._link = None
        self._memory.trim()


class _ByDevice(NamedTuple):
    """A sum that a device makes by itself in a buffer; see `StartedSum`."""

    buffer: Any
    has_ended: Arrived
    disconnect: Callable[[], None]

    def poll(self) -> bool:
        """Return True: the host has nothing to do."""
        return True

    def abandon(self) -> None:
        """Break the sum off when those before it are done: other ranks may never begin it."""
        _left[self.has_ended] = self.buffer
        with suppress(MpidistError):  # which every later call raises
            self.disconnect()


#: The buffers of sums that were broken off, by what tells when the device has ended them: it may use them until then.
_left: dict[Arrived, Any] = {}


def _forget_left() -> None:
    """Give back the buffers that no device reads or writes any more."""
    for has_ended in list(_left):
        if has_ended():
            _left.pop(has_ended, None)
