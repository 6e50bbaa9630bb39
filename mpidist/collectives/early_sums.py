"""Sums that are begun before the call that takes them: they are under way while the ranks still compute.

A rank fills the buckets of a list in their order, and begins the all-reduce of each when it likes: outside of any call,
and waiting for nobody.  What is under way moves on whenever the rank comes by.  Then comes one call of all ranks, in
which each says whether what it has begun counts.  If all say so, the rest is begun and all is finished.  Else every
rank begins what any has begun, finishes that, and drops it.  So behind each call every rank has begun every bucket as
often as the others, whatever happened before, and messages of two steps never mix.

Each bucket has a channel of its own.  Those of one list are its *berth*, which all ranks number alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy

from mpidist.collectives.call import Call
from mpidist.collectives.early_buckets import DeviceBuckets, EarlyPlan, StartedSum, buckets_of
from mpidist.collectives.persistent import Bound
from mpidist.collectives.reductions.plan import Plan, Signature, build
from mpidist.collectives.ways.pieces import Pieces
from mpidist.device.memory import DeviceMemory
from mpidist.errors import TransportError
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: The first channel of the berths, how many of these there are, and how many buckets each has room for.
_FIRST_CHANNEL, _BERTHS, _MOST_BUCKETS = 1024, 64, 16

#: Of how many berths the buckets may lie on a device: each has a link of its own, which takes memory there.
_DEVICE_BERTHS = 2

#: Into about how many buckets a list is cut, and how many bytes a bucket has at least.
_BUCKETS, _LEAST_BUCKET_BYTES = 12, 1 << 20

#: Under which name the berths in use are kept with a communicator.
_KEPT = "berths of early sums"


def early_plan(ranks: Communicator, signatures: Sequence[Signature], op: str, kind: Any = None) -> EarlyPlan | None:
    """Return the buckets of a list; None where they cannot be begun early on this rank.  Local.

    They can where they travel between nodes, or by the link of a device, and the list is long.  `kind` is an array of
    the kind that will be summed, by default NumPy's.
    """
    nbytes = build(signatures, op, 1).nbytes
    plan = build(signatures, op, max(_LEAST_BUCKET_BYTES, -(-nbytes // _BUCKETS)))
    has_room = nbytes >= 2 * _LEAST_BUCKET_BYTES and 1 < len(plan.buckets) <= _MOST_BUCKETS
    memory = None if kind is None else ranks.devices.memory(kind)
    can_begin = ranks.transport.has_channels and has_room and _travels(ranks, plan, memory)
    return EarlyPlan(plan, memory, kind) if can_begin else None


def is_free(ranks: Communicator, number: int, memory: DeviceMemory | None = None) -> bool:
    """Return whether the berth of a list is free on this rank.  Local."""
    return _berth(number, memory) not in ranks.adapters.get(_KEPT, ())


def _travels(ranks: Communicator, plan: Plan, memory: DeviceMemory | None) -> bool:
    """Return whether the buckets go a long way, on which the ranks need not wait for them."""
    if memory is None:
        return ranks.topology.node_count > 1
    link = ranks.devices.known_link(memory)
    return (
        link is not None
        and memory.has_streams
        and all(link.can_reduce(each.dtype, plan.reduction) for each in plan.buckets)
    )


def _berth(number: int, memory: DeviceMemory | None) -> int:
    """Return the berth of a list, by its number."""
    return number % _BERTHS if memory is None else _BERTHS + number % _DEVICE_BERTHS


class EarlySums(Bound):
    """The sums of the buckets of one plan, to be begun again and again.

    `number`, the list's, is the same on all ranks, and so is whether the plan is for a device.  `call` takes the sums,
    and adds up `flags` numbers besides.  A rank fills the `buckets` before their sums are begun, and takes the sums
    from them behind a call.  The attribute `flags` is set before a call; behind it are sums over all ranks.
    """

    def __init__(self, ranks: Communicator, early: EarlyPlan, number: int, call: Call, flags: int) -> None:
        super().__init__(ranks, call)
        self.plan, self._memory = early.plan, early.memory
        berth = _berth(number, early.memory)
        channels = [_FIRST_CHANNEL + berth * _MOST_BUCKETS + index for index in range(len(self.plan.buckets))]
        self.buckets = buckets_of(ranks, early, channels)
        self._told = numpy.zeros(1 + len(channels) + flags, numpy.float32)
        self._begun, self.flags = self._told[1 : 1 + len(channels)], self._told[1 + len(channels) :]
        everything = Pieces((0, self._told.size))
        way = ranks.way(self._told.nbytes, None)
        self._telling = ranks.reduction(way, everything, everything, (self._told.dtype,) * 3, "sum")
        self._under_way: list[StartedSum] = []
        self._error: BaseException | None = None
        taken = ranks.adapters.setdefault(_KEPT, set())
        taken.add(berth)
        self.close = finalize(self, _closed, self._under_way, taken, berth)

    def enter(self, arrays: Any) -> None:
        """Have later work come behind what the current stream was given: arrays may come in several streams.  Local."""
        if self._memory is not None:
            self._memory.enter(())

    def move_on(self, filled: int) -> None:
        """Begin the first `filled` buckets, and move on what is under way, unless a call is being made.  Local."""
        control = self.caller.control
        if self._error is not None or control.broken is not None or not control.turnstile.try_acquire():
            return
        try:
            self._try(filled)
        finally:
            control.turnstile.release()

    def fill(self, arrays: Any) -> bool:
        """Begin all on a device, before the call is.

        Hosts of others may be waiting for their devices, and these for this one.
        """
        if self._memory is not None and self._error is None:
            self._try(len(self._begun))
        return True

    def _try(self, count: int) -> None:
        """Begin the first buckets, and move on what is under way; the call tells the others of an error."""
        try:
            self._begin(count)
            self._poll()
        except BaseException as error:  # what was broken off cannot go on
            self._error = error
            if not isinstance(error, Exception):
                raise

    def _begin(self, count: int) -> None:
        """Begin the first buckets, as far as the ranks are connected."""
        while len(self._under_way) < count and (started := self.buckets.start(len(self._under_way))) is not None:
            self._under_way.append(started)

    def _poll(self) -> bool:
        """Move on, and return whether all that is under way has come back."""
        return all([each.poll() for each in self._under_way])

    def move(self, watch: Watch, arrays: Any) -> bool:
        """Finish the sums; `arrays` is whether those of this rank count, and what is returned whether all do."""
        if self._error is not None:
            raise TransportError(f"{self.call.what} was broken off by {self._error!r}") from self._error
        self._told[0] = not arrays
        self._begun[:] = 0
        try:
            with self.buckets.connected(watch):
                self._begun[: len(self._under_way)] = 1
                self._telling.run(watch, (self._told,), (self._told,))
                counts = not self._told[0]
                self._begin(len(self._begun) if counts else int(numpy.count_nonzero(self._begun)))
                while not self._poll():
                    watch.tick()
        except BaseException as error:
            self._error = error
            raise
        self._under_way.clear()
        return counts

    def end(self) -> None:
        """Give back what it holds.  Collective: every rank calls it in the same order, behind a call."""
        if isinstance(self.buckets, DeviceBuckets):  # the host's memory is given back when nobody has it
            self.buckets.close()
        self.close()


def _closed(under_way: list[StartedSum], taken: set[int], berth: int) -> None:
    """Give a berth back, unless something is under way in it: that is still written into, or read from."""
    if under_way:
        for each in under_way:
            each.abandon()
    else:
        taken.discard(berth)
