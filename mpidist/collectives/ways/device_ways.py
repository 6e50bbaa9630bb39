"""Arrays in device memory: moved by the device's own library where these ranks can use it, else through the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.exchange.array_bound import SentCollective
from mpidist.collectives.mismatch import fact
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.pieces import Pieces, segments
from mpidist.collectives.ways.selection import NCCL, STAGED
from mpidist.device.memory import Arrived, DeviceMemory, Link, OwnStream, memory_of
from mpidist.device.waiting import wait_for
from mpidist.errors import MissingDependencyError, RankFailedError, TransportError
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: What is staged at a time, in bytes: one piece is on its way from the device while the one before it is reduced.
_PIECE_BYTES = 1 << 23


def memory_facts(array: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return what a call says of the memory of its arrays: ranks of which some call a link must not differ.  Local."""
    return [fact("device memory", arrays.kind_of(array).name)] if arrays.is_device(array) else []


class DeviceWays:
    """How some ranks move arrays in device memory; `whole` is that of the world of which they are a group."""

    def __init__(self, ranks: Communicator, whole: DeviceWays | None = None) -> None:
        self._ranks = ranks
        self._links: dict[DeviceMemory, Link | str] = {}
        self._further: dict[tuple[DeviceMemory, int], Link] = {}
        # Of the whole world and of its groups, in the order in which they were made, which is alike on all their ranks.
        self._open: dict[Link, None] = {} if whole is None else whole._open
        self._host = numpy.empty(0, numpy.uint8)
        #: ``reads(memory)``: the stream of copies to the host; each call waits for those that it has begun.
        self.reads: Callable[[Any], OwnStream] = cache(lambda memory: memory.own_stream())
        #: Whether the copies from the host memory have left it.
        self.written: Arrived = lambda: True  # nothing was begun

    def memory(self, array: Any) -> DeviceMemory | None:
        """Return the memory of an array that the transport does not move by itself; None for any other.  Local."""
        if isinstance(array, numpy.ndarray) or arrays.kind_of(array).memory in self._ranks.transport.memory:
            return None
        return memory_of(array)

    def link(self, memory: DeviceMemory, asked: str, watch: Watch) -> Link | None:
        """Return the device's own collectives between these ranks; None where arrays are staged.

        Collective: every rank calls it, within a begun call; local later.  `asked`: `NCCL`, `STAGED`, or something else
        that leaves the choice to what these ranks have.

        MissingDependencyError, on all ranks: `NCCL` was asked for, and cannot be used.
        """
        if asked == STAGED:
            return None
        if memory not in self._links:
            made = self._links[memory] = memory.link(self._ranks.transport, watch)
            if not isinstance(made, str):
                self._open[made] = None
        answer = self._links[memory]
        if not isinstance(answer, str):
            return answer
        if asked == NCCL:
            with suppress(RankFailedError):  # nobody raises, and so fails, while others are on their way here
                self._ranks.transport.exchange(b"", watch)
            raise MissingDependencyError(f"{self._ranks.control.own_name}: NCCL was asked for, and {answer}")
        return None

    def known_link(self, memory: DeviceMemory) -> Link | None:
        """Return the device's own collectives, where these ranks have used them.  Local."""
        answer = self._links.get(memory)
        return None if isinstance(answer, str) else answer

    def link_at(self, memory: DeviceMemory, channel: int, watch: Watch) -> Link:
        """Return the link of a channel, beside the one of all calls; there are such links.

        Collective: every rank calls it, within a begun call; local later.
        """
        if (memory, channel) not in self._further:
            try:
                link = memory.link(self._ranks.transport.among(range(self._ranks.size), channel), watch)
            except TransportError as error:
                raise TransportError(f"{error}; or do with one link: PyTorch's overlap='none'") from error
            if isinstance(link, str):
                raise TransportError(f"{self._ranks.control.own_name}: a second link could not be made: {link}")
            self._further[memory, channel] = link
            self._open[link] = None
        return self._further[memory, channel]

    def close_at(self, memory: DeviceMemory, channel: int) -> None:
        """Give back the link of a channel, if there is one; what all ranks have begun is awaited.

        Collective: every rank calls it in the same order; a rank that abandons its work calls it alone.
        """
        link = self._further.pop((memory, channel), None)
        if link is not None:
            link.close(in_order=True)
            self._open.pop(link, None)  # unless the world has been closed

    def links(self) -> list[Link | str]:
        """Return what is known of the devices' own collectives, or why there are none.  Local."""
        return list(self._links.values())

    def close(self) -> None:
        """Give back what the devices' own collectives of a world and its groups hold, on all ranks.  Local."""
        while self._open:
            self._open.popitem()[0].close(in_order=True)
        self._links.clear()
        self._further.clear()

    # -- through the host ---------------------------------------------------------------------------------------------

    def host_buffer(self, memory: DeviceMemory, elements: int, dtype: Any, watch: Watch) -> numpy.ndarray:
        """Return host memory for one call, when the copies of the call before have left it."""
        wait_for(self.written, watch)
        nbytes = elements * dtype.itemsize
        if self._host.nbytes < nbytes:
            self._host = memory.host_buffer(nbytes, numpy.dtype(numpy.uint8))
        return self._host[:nbytes].view(dtype)

    def on_host(self, array: Any, watch: Watch) -> Any:
        """Return an array in host memory, as it is if it is there already; waits as `to_host`.  Local."""
        memory = self.memory(array)
        if memory is None:
            return arrays.on_host(array)
        memory.enter((array,))
        return self.to_host(memory, array, watch)

    def to_host(self, memory: DeviceMemory, array: Any, watch: Watch) -> numpy.ndarray:
        """Return a copy of an array in host memory; waits with an eye on the other ranks.  Local."""
        flat = array.reshape(-1) if array.flags.c_contiguous else array.copy().reshape(-1)
        host = self.host_buffer(memory, flat.size, array.dtype, watch)
        wait_for(memory.read(flat, host), watch)
        return host.reshape(array.shape).copy()

    def to_device(self, memory: DeviceMemory, values: numpy.ndarray, target: Any, watch: Watch) -> None:
        """Copy values of the host into a contiguous array, in the order of the current stream.  Local."""
        if not values.size:
            return
        host = self.host_buffer(memory, values.size, values.dtype, watch)
        host[...] = values.reshape(-1)
        self.written = memory.write(host, target.reshape(-1))


class DeviceReplay:
    """The all-reduce of flat buffers of one dtype in device memory, in place; a `Replay`.

    `algorithm` is as in `selection.asked_for`.
    """

    def __init__(
        self, ways: DeviceWays, ranks: Communicator, memory: DeviceMemory, dtype: numpy.dtype, op: str, algorithm: str
    ) -> None:
        self._ways, self._ranks, self._memory = ways, ranks, memory
        self._op, self._dtype = op, dtype
        self._way, _, self._host_algorithm = algorithm.partition(":")
        self._host_reductions: dict[int, BucketReduction] = {}

    def __call__(self, watch: Watch, buffer: Any) -> None:
        """Reduce into the buffer, within the begun call of `watch`."""
        link = self._ways.link(self._memory, self._way, watch)
        if link is None or not link.can_reduce(self._dtype, self._op):
            self._stage(watch, buffer)
        else:
            link.reduce(buffer, self._op, watch)

    def _stage(self, watch: Watch, flat: Any) -> None:
        """Reduce piece by piece through the host; reads have a stream of their own, or each write waited for all."""
        memory, ways = self._memory, self._ways
        host = ways.host_buffer(memory, flat.size, self._dtype, watch)
        spans = segments(flat.size, _PIECE_BYTES // self._dtype.itemsize)
        arrivals: list[Arrived] = []
        ways.reads(memory).begin(
            lambda: arrivals.extend(memory.read(flat[start:stop], host[start:stop]) for start, stop in spans)
        )
        for (start, stop), arrived in zip(spans, arrivals, strict=True):
            wait_for(arrived, watch)
            self._reduce_on_host(watch, host[start:stop])
            ways.written = memory.write(host[start:stop], flat[start:stop])

    def _reduce_on_host(self, watch: Watch, piece: numpy.ndarray) -> None:
        """Reduce a piece in place by the host's own ways."""
        length = piece.size
        if length not in self._host_reductions:
            pieces = Pieces((0, length))
            way = self._ranks.way(piece.nbytes, self._host_algorithm or None)
            bound = self._ranks.reduction(way, pieces, pieces, (self._dtype,) * 3, self._op)
            self._host_reductions[length] = bound
        self._host_reductions[length].run(watch, (piece,), (piece,))


class DeviceCollective(SentCollective):
    """A collective of one array in device memory: by the device's own, else over messages on a copy in host memory.

    ``move(transport, array, watch, link=link)`` returns the result by a link; if it reduces, then as `reduces`, a dtype
    and an operation.  Without a link it returns that of a host array, which is the same array if it works in place.
    """

    def __init__(
        self,
        ranks: Communicator,
        memory: DeviceMemory,
        call: Call,
        like: Any,
        axis: int | None,
        move: Callable[..., Any],
        is_dealt: bool = False,
        reduces: tuple[numpy.dtype, str] | None = None,
    ) -> None:
        super().__init__(ranks, call.with_facts(memory_facts(like)), like, axis, move, is_dealt)
        self._ways, self._memory, self._reduces = ranks.devices, memory, reduces
        self._asked = ranks.control.settings.algorithm

    def enter(self, given: Any) -> None:
        """Begin work on the array.  Local."""
        self._memory.enter((given[0] if isinstance(given, tuple) else given,))

    def fill(self, given: Any) -> bool:
        """Return True; ValueError for another kind of array.  Local."""
        self.check(given)
        self.enter(given)
        return True

    def move(self, watch: Watch, given: Any) -> Any:
        """Move the values, and bring the results to the device."""
        link = self._ways.link(self._memory, self._asked, watch)
        if link is not None and (self._reduces is None or link.can_reduce(*self._reduces)):
            return self._move(self._transport, self.with_splits(given), watch, link=link)
        array = given[0] if isinstance(given, tuple) else given
        host = self._ways.to_host(self._memory, array, watch)
        result = self._move(self._transport, self.with_splits(host), watch)
        if result is host:
            self._ways.to_device(self._memory, host, array, watch)
            return array
        return self._back(result, array, watch)

    def _back(self, result: Any, like: Any, watch: Watch) -> Any:
        if isinstance(result, tuple):
            return (self._back(result[0], like, watch), *result[1:])
        if result is None:
            return None
        target = arrays.empty(result.shape, result.dtype, like)
        self._ways.to_device(self._memory, result, target, watch)
        return target
