"""Collectives by name over the ranks of a world: every call numbered and checked, on whichever algorithm is chosen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy

from mpidist import arrays, transports
from mpidist.arrays import check_reducible, is_device, wire_dtype
from mpidist.collectives import selection, tracing, tuning
from mpidist.collectives.algorithms import algorithm as schedule_of
from mpidist.collectives.algorithms import hierarchical
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.call import Call
from mpidist.collectives.executor import Executor
from mpidist.collectives.header import Header
from mpidist.collectives.lanes import Lanes
from mpidist.collectives.mismatch import mismatch_error
from mpidist.collectives.nearness import FAR, Nearness
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.rounds import Schedule
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.collectives.ways import SEGMENTED, Calls, Contest, NodeMemory, Way, Ways
from mpidist.errors import RankFailedError
from mpidist.runtime.control import Watch
from mpidist.runtime.missed_calls import MISSED, summary
from mpidist.runtime.trace import Trace
from mpidist.transports import World

#: Runs the data movement of one call, bound to its buffer.
Replay = Callable[[Watch], None]

#: In one step through shared memory every rank reads the values of all ranks; from so many bytes on each reads a share.
_MOST_BYTES_READ = 1 << 21

#: Sizes in bytes from which on a pack is closed: never where segments are the unit of work; as a message otherwise.
ONE_PACK, _MESSAGE_PACK = 1 << 62, 1 << 22

#: Arrays of so many bytes at most are looked at for the quickest way; for longer ones it saves nothing.
_SHORT_BYTES = 1 << 14

#: How many calls of `Communicator.all_reduce` are kept ready, by shape: shapes may be new every time.
_KEPT_CALLS = 256

_communicators: WeakKeyDictionary[World, Communicator] = WeakKeyDictionary()


class Communicator:
    """The collectives of one world, for one of its ranks.

    Parameters
    ----------
    world : World

    Attributes
    ----------
    rank, size : int
    topology : Topology
    control : ControlChannel
    transport : Transport
    trace : Trace or None
        Where events are noted, if ``MPIDIST_TRACE`` asks for it.
    choices : Choices or None
        What follows from measurements, once there are any: what was chosen before may be chosen otherwise now.
    modes : int
        In how many modes the cores are in turn, as far as it can be told; the same on all ranks.
    """

    def __init__(self, world: World) -> None:
        self.trace: Trace | None = None
        self.transport = world.transport
        self.topology = world.topology
        self.control = world.control
        self.rank = world.transport.rank
        self.size = world.transport.size
        # Small all-reduces through segments are for whole worlds only: their flag barrier is the call's own.
        shares = self.topology.node_count == 1 and self.size > 1
        self.segments = world.segments if shares else None
        self._ways = Ways(self.size)
        self.in_shared_memory: dict[int, Any] = {}
        self._lanes = self._make_lanes(world)
        remote = world.remote if shares else None
        self._memory = NodeMemory(self.control.line, self.size, self.segments, remote, self._lanes)
        self._between: Header | None = None
        if self._lanes is not None and self.control.arbiter is not None:
            self._between = Header(self._lanes.segments, self.control, self.transport, self.topology)
        self._forced = self.control.settings.algorithm
        if self._forced == selection.AUTO and self.control.settings.deterministic:
            self._forced = selection.PINNED
        self._nearness = self._make_nearness()
        self.modes = 1 if self._nearness is None else FAR + 1
        self.choices: selection.Choices | None = None
        self._is_tuned = self.size == 1 or not self.transport.library
        self._header = numpy.zeros(2, dtype=numpy.uint64)
        self._calls: dict[Any, _BufferReduction] = {}
        self._short: dict[Any, tuple[Call, SegmentAllReduce | None, float | None]] = {}
        self._comparisons: dict[int, tuple[Call, SegmentAllReduce | None]] = {}
        self._schedules: dict[str, Schedule] = {}

    @classmethod
    def world(cls) -> Communicator:
        """Return the communicator of all ranks of the job, the same object every time.

        Collective at the first call, which may start MPI; local later.
        """
        world = transports.world()
        if world not in _communicators:
            communicator = _communicators[world] = cls(world)
            if communicator.control.settings.trace:
                communicator.trace = tracing.attach(communicator, communicator.control.settings.trace)
        return _communicators[world]

    def _make_lanes(self, world: World) -> Lanes | None:
        """Return who carries what between nodes, where the ranks of each node share memory."""
        if world.segments is None or self.topology.node_count == 1 or not self.transport.has_channels:
            return None
        across = schedule_of("all_reduce", selection.between_carriers(self.topology))
        return Lanes(world.segments, self.transport, self.topology, across)

    def _make_nearness(self) -> Nearness | None:
        """Return what looks how near two ranks are, each of which has a core for itself and is free to choose."""
        if self.segments is None or self.size != 2 or self.control.pause is not None or self._forced != selection.AUTO:
            return None
        return Nearness(self.segments, self.control.line)

    # -- what every call begins with ----------------------------------------------------------------------------------

    def check(self, call: Call, timeout_seconds: float | None = None) -> None:
        """Make sure that all ranks are at the same place and describe it alike.

        Collective: every rank calls it in the same order.  Errors as for `begin`.
        """
        with self.control.turnstile:
            self.begin(call, timeout_seconds)

    def begin(self, call: Call, timeout_seconds: float | None = None) -> Watch:
        """Number a call, and make sure that all ranks make the same one.

        Collective: every rank calls it in the same order, inside the turnstile of the control channel.

        Raises
        ------
        CollectiveMismatchError
            On all ranks: names the ranks that differ, the tensor, and both shapes.
        RemoteReplicaError
            The function given to `run` raised on another rank, which therefore does not make this call.
        TransportTimeoutError, RankFailedError
            A rank did not come, and why as far as it is known.
        """
        watch = self.control.begin(call.what, call.digest, timeout_seconds)
        same = self.control.meet(watch) if self.control.arbiter is None else self._same_header(call.digest, watch)
        if not same:
            if self.control.arbiter is not None and int(self._header[0]) == MISSED:
                raise self.control.missed.await_error(watch)
            self._raise_mismatch(call, watch)
        return watch

    def miss(self, error: BaseException) -> None:
        """Make no call of the next number, because the function given to `run` raised `error` on this rank.

        Local: this rank goes on.  The others raise RemoteReplicaError in that call.
        """
        if self.size > 1 and self.control.broken is None:
            self.control.missed.miss(summary(error), lambda watch: self._same_header(MISSED, watch))

    def _same_header(self, digest: int, watch: Watch) -> bool:
        """Compare digests by one small all-reduce: the least d and the least of all ~d are complements if all agree."""
        header = self._header
        if self._between is not None:
            header[:] = self._between.least(watch)
        else:
            header[:] = digest, digest ^ 0xFFFFFFFFFFFFFFFF
            self.transport.wait([self.transport.native["all_reduce"](header, "min")], watch)
        return int(header[0]) ^ int(header[1]) == 0xFFFFFFFFFFFFFFFF

    def _raise_mismatch(self, call: Call, watch: Watch) -> None:
        answers = self.transport.exchange(json.dumps(call.description).encode(), watch)
        with suppress(RankFailedError):  # who has raised already has also come here
            self.transport.exchange(b"", watch)  # nobody raises, and so fails, while others wait for the answers
        raise mismatch_error([json.loads(raw) for raw in answers], watch.call, self.rank)

    def call(
        self,
        name: str,
        tensors: Sequence[tuple[str, Any, Sequence[int]]] = (),
        packs: Sequence[tuple[str, int]] = (),
    ) -> Call:
        """Return what stands for a call of that name; parameters as for `Call`.  Local."""
        return Call(name, tensors, packs)

    # -- what is chosen -----------------------------------------------------------------------------------------------

    def facts(self, has_segments: bool = True) -> selection.Facts:
        """Return what the choice of an algorithm depends on; Local."""
        shared = has_segments and (self.segments is not None or self._lanes is not None)
        remote = shared and self._memory.remote is not None
        return selection.Facts(self.topology, tuple(self.transport.native), shared, self.choices, remote)

    def prepare(
        self,
        nbytes: int,
        call: Call,
        algorithm: str | None = None,
        on_host: bool = True,
        timeout_seconds: float | None = None,
    ) -> None:
        """Get what was measured of these ranks, or measure it, before the first `call` that is long enough to matter.

        Collective: every rank calls it in the same order, before it plans an all-reduce of `nbytes`.  It does something
        once in a launch at most.  Errors as for `begin`.
        """
        if self._is_tuned or not on_host or self._asked(algorithm) != selection.AUTO:
            return
        if nbytes >= selection.least_bytes(self.facts()):
            self.check(call, timeout_seconds)
            self._is_tuned = True
            self.choices = tuning.choices_for(self)
            self._calls.clear()  # what was planned before by the fixed table
            self._short.clear()

    def _asked(self, algorithm: str | None) -> str:
        """Return what is asked for: by a call, else by the settings; those win over a pinned choice, or pin it."""
        forced, free = self._forced, (selection.AUTO, selection.PINNED)
        pins = algorithm in free and forced != selection.AUTO and selection.PINNED in (algorithm, forced)
        return forced if algorithm is None or pins else algorithm

    # -- collectives --------------------------------------------------------------------------------------------------

    def all_reduce(
        self, buffer: Any, op: str = "sum", algorithm: str | None = None, timeout_seconds: float | None = None
    ) -> None:
        """Reduce an array over all ranks, in place; all ranks end with the same bits.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        buffer : array, C-contiguous, any shape, modified in place
            16-bit floats are summed in float32 and rounded once.
        op : str
            ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.
        algorithm : str, optional
            One of ``names("all_reduce")``, ``"native"``, ``"hierarchical"``, ``"shared_memory"`` (on one node),
            ``"two_level"`` (on several); None or ``"auto"`` leaves it to `selection`.
        timeout_seconds : float, optional

        Raises
        ------
        CollectiveMismatchError, TransportTimeoutError, RankFailedError, UnsupportedDtypeError
        ValueError
            The array is not C-contiguous, or there is no such reduction or algorithm.
        """
        key = (type(buffer), buffer.shape, buffer.dtype, op, algorithm)
        planned = self._calls.get(key)
        if not buffer.flags.c_contiguous:
            raise _not_contiguous("all_reduce", buffer)
        if planned is None:
            if len(self._calls) >= _KEPT_CALLS:
                del self._calls[next(iter(self._calls))]
            planned = self._calls[key] = self._plan(buffer, op, algorithm, timeout_seconds)
        if planned.contest.is_due:
            self.settle(planned.contest, timeout_seconds)
        flat = buffer.reshape(-1)
        with self.control.turnstile:
            if planned.segment is not None:
                numpy.copyto(planned.segment.slot(self.control.call + 1), flat)
                planned.segment.combine(self.begin(planned.calls[0,], timeout_seconds).call, flat)
            else:
                planned.run(self, flat, timeout_seconds)

    def _plan(self, buffer: Any, op: str, algorithm: str | None, timeout_seconds: float | None) -> _BufferReduction:
        check_reducible(buffer.dtype, op)
        wire, on_host = wire_dtype(buffer.dtype), not is_device(buffer)
        name, tensors, nbytes = f"all_reduce({op})", [("", buffer.dtype, buffer.shape)], buffer.size * wire.itemsize
        self._check_memory(buffer)
        self.prepare(nbytes, Call(name, tensors), algorithm, on_host, timeout_seconds)
        ways = self.ways(nbytes, algorithm, on_host)
        contest = self.contest(ways, nbytes)
        calls = Calls(contest, lambda label: Call(name, tensors, [(label, nbytes)]))
        small = ways[0].algorithm == "shared_memory" and wire == buffer.dtype
        segment = self.small(buffer.size, wire, op) if small else None
        pieces, dtypes = Pieces((0, buffer.size)), (buffer.dtype, wire, buffer.dtype)
        reductions = [self.reduction(way, pieces, pieces, dtypes, op) for way in ways if segment is None]
        return _BufferReduction(op, contest, calls, reductions, segment)

    def reduced(self, array: Any, op: str) -> Any | None:
        """Return a short array reduced over all ranks, as a new one; None where that is not the way, and nothing done.

        The quickest way for a single number.  Collective, as `all_reduce`, and the same call as a fused one of one
        tensor.

        Parameters
        ----------
        array : numpy.ndarray, unchanged
        op : str
            ``"sum"`` or ``"mean"``.
        """
        key = (op, array.shape, array.dtype)
        planned = self._short.get(key)
        if planned is None:
            planned = self._short[key] = self._short_plan(array, op)
        call, segment, scale = planned
        if segment is None:
            return None
        out = numpy.empty_like(array)
        with self.control.turnstile:
            numpy.copyto(segment.slot(self.control.call + 1), array)
            segment.combine(self.begin(call).call, out)
        return out if scale is None else numpy.multiply(out, scale, out=out)

    def _short_plan(self, array: Any, op: str) -> tuple[Call, SegmentAllReduce | None, float | None]:
        if len(self._short) >= _KEPT_CALLS:
            self._short.clear()
        name, nbytes = f"all_reduce({op})", array.nbytes
        kinds = "f" if op == "mean" else "fiu"
        if self.segments is None or nbytes > _SHORT_BYTES or array.dtype.kind not in kinds or array.itemsize < 4:
            return Call(name), None, None
        (way, *_) = self.ways(nbytes, None)
        if way.algorithm != "shared_memory":
            return Call(name), None, None
        call = Call(name, [("", array.dtype, array.shape)], [(way.label, nbytes)])
        segment = SegmentAllReduce(self.segments, self.control.line, array.shape, array.dtype, "sum")
        return call, segment, 1.0 / self.size if op == "mean" else None

    def small(self, elements: int, dtype: Any, op: str) -> SegmentAllReduce | None:
        """Return the all-reduce in one step through shared memory, if it is the one for so many elements; Local."""
        nbytes, segments = elements * dtype.itemsize, self.segments
        if segments is None or nbytes > segments.segment_bytes or nbytes * self.size > _MOST_BYTES_READ:
            return None
        return SegmentAllReduce(segments, self.control.line, (elements,), dtype, op)

    def reduction(
        self,
        way: Way,
        sources: Pieces,
        targets: Pieces,
        dtypes: Sequence[Any],
        op: str,
        scale: float | None = None,
        first: int = 0,
        in_shares: bool = False,
        contiguous: bool = True,
    ) -> BucketReduction | None:
        """Return the reduction of tensors where they lie, None for a way that needs them packed and `bind`; Local.

        Parameters as for `NodeMemory.reduction`.
        """
        return self._memory.reduction(way, sources, targets, dtypes, op, scale, first, in_shares, contiguous)

    def ways(self, nbytes: int, algorithm: str | None, on_host: bool = True) -> list[Way]:
        """Return the ways worth trying for a unit of `nbytes`; an explicit choice is the only one.  Local.

        Raises
        ------
        ValueError
            There is no such algorithm here.
        """
        asked = self._asked(algorithm)
        if self.size == 1:
            selection.check_name(asked)
            return [Way("none")]
        return self._ways.worth_trying(nbytes, asked, self.facts(on_host))

    def settle(self, contest: Contest, timeout_seconds: float | None = None) -> None:
        """Compare the times that ranks took, and choose among ways by them, where that is due.

        Collective, and numbered like any call: all ranks come to it at the same step, before the call that is tried.
        """
        if not contest.is_due:
            return
        times = contest.times()
        call, segment = self._comparison(times)
        with self.control.turnstile:  # who is interrupted before it has settled would be out of step for ever
            if segment is not None:
                numpy.copyto(segment.slot(self.control.call + 1), times)
                segment.combine(self.begin(call, timeout_seconds).call, times)
            else:
                watch = self.begin(call, timeout_seconds)
                self.bind(times, "max", selection.PINNED)(watch)
            contest.settle(times)

    def _comparison(self, times: Any) -> tuple[Call, SegmentAllReduce | None]:
        if times.size not in self._comparisons:
            call = Call("comparison of times before an all-reduce", [("", times.dtype, times.shape)])
            self._comparisons[times.size] = call, self.small(times.size, times.dtype, "max")
        return self._comparisons[times.size]

    def contest(self, ways: Sequence[Way], nbytes: int) -> Contest:
        """Return the contest of some ways for a unit of `nbytes`; Local."""
        return self._ways.contest(ways, nbytes, self.modes)

    def choose(self, contest: Contest, watch: Watch) -> int:
        """Return which way of a contest to take, one of its `turns`, in a call that has begun.

        Collective: every rank calls it in the same order, within the call.  Errors as for `Watch.tick`.
        """
        if contest.modes > 1 and self._nearness is not None:
            contest.mode = self._nearness.look(watch)
        return contest.at

    def bytes_per_pack(self, algorithm: str | None) -> int:
        """Return from what size in bytes on a pack is closed when the user leaves it to us; Local."""
        facts, asked = self.facts(), self._asked(algorithm)
        if facts.has_segments and asked in (selection.AUTO, selection.PINNED, *SEGMENTED):
            return ONE_PACK
        return facts.choices.bucket_bytes if facts.choices is not None and asked == selection.AUTO else _MESSAGE_PACK

    def _check_memory(self, array: Any) -> None:
        """Raise UnsupportedDtypeError, before any communication, if the transport cannot move this array."""
        if self.size > 1:
            arrays.check_memory(array, self.transport.memory, self.transport.name)

    def bind(self, buffer: Any, op: str, algorithm: str | None = None) -> Replay:
        """Return what reduces `buffer` in place every time it is called with the watch of a begun call; Local.

        Parameters
        ----------
        buffer : array, shape (n,), contiguous, in a dtype that is added as such
        """
        if self.size == 1 or buffer.size == 0:
            return _nothing
        chosen = self._chosen(buffer.nbytes, algorithm, has_segments=False)
        if chosen == "native":
            native, wait = self.transport.native["all_reduce"], self.transport.wait
            # MPI has no least and greatest of truth values; of the bytes that hold them it does.
            operand = buffer.view(numpy.uint8) if buffer.dtype.kind == "b" else buffer
            return lambda watch: wait([native(operand, op)], watch)
        return Executor(self._schedule(chosen), self.transport, buffer, op).run

    def _chosen(self, nbytes: int, algorithm: str | None, has_segments: bool = True) -> str:
        asked = self._asked(algorithm)
        if self.size == 1:
            selection.check_name(asked)
            return "none"
        return selection.asked_for(nbytes, asked, self.facts(has_segments))

    def _schedule(self, name: str) -> Schedule:
        if name not in self._schedules:
            if name == "hierarchical":
                schedule = hierarchical(self.topology, selection.between_nodes(self.topology))
            else:
                schedule = schedule_of("all_reduce", name)
            self._schedules[name] = schedule
        return self._schedules[name]

    def reduce_scatter(self, buffer: Any, op: str = "sum", timeout_seconds: float | None = None) -> Any:
        """Return this rank's share of the reduced array: of n elements those from r * n // size to (r + 1) * n // size.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        buffer : array, C-contiguous, any shape, unchanged
        op : str
        """
        check_reducible(buffer.dtype, op)
        self._check_memory(buffer)
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
        if array.ndim == 0:
            raise ValueError("all_gather needs an array of at least one dimension, got a scalar")
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(f"axis {axis} is out of range for an array of {array.ndim} dimensions")
        axis %= array.ndim
        others = [-1 if index == axis else length for index, length in enumerate(array.shape)]
        self._check_memory(array)
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
        if not array.flags.c_contiguous:
            raise _not_contiguous("broadcast", array)
        self._check_memory(array)
        call = self.call(f"broadcast(root={root})", [("", array.dtype, array.shape)])
        with self.control.turnstile:
            watch = self.begin(call, timeout_seconds)
            if self.size > 1 and array.size:
                schedule = schedule_of("broadcast", "binomial")
                Executor(schedule, self.transport, array.reshape(-1), root=root).run(watch)

    def barrier(self, what: str = "barrier", timeout_seconds: float | None = None) -> None:
        """Return when all ranks have come here.

        Collective: every rank calls it in the same order.
        """
        self.check(self.call(what), timeout_seconds)

    def exchange(self, payload: bytes, what: str = "exchange", timeout_seconds: float | None = None) -> list[bytes]:
        """Return the small byte string that every rank gave, in rank order; for agreement, not for data.

        Collective: every rank calls it in the same order.
        """
        with self.control.turnstile:
            watch = self.begin(self.call(what), timeout_seconds)
            return [payload] if self.size == 1 else self.transport.exchange(payload, watch)


class _BufferReduction:
    """The all-reduce of buffers of one shape: the ways that are tried, each with its call."""

    __slots__ = ("op", "contest", "calls", "reductions", "segment")

    def __init__(
        self,
        op: str,
        contest: Contest,
        calls: Calls,
        reductions: Sequence[BucketReduction | None],
        segment: SegmentAllReduce | None,
    ) -> None:
        self.op = op
        self.contest = contest
        self.calls = calls
        self.reductions = reductions
        self.segment = segment

    def run(self, communicator: Communicator, flat: Any, timeout_seconds: float | None) -> None:
        """Reduce the flat buffer by the way whose turn it is."""
        turns = self.contest.turns
        for reduction in map(self.reductions.__getitem__, turns):
            if reduction is not None:
                reduction.prepare(communicator.control.call + 1, (flat,), (flat,))
        watch = communicator.begin(self.calls[turns], timeout_seconds)
        at = communicator.choose(self.contest, watch)
        reduction = self.reductions[at]
        start = time.perf_counter()
        if reduction is not None:
            reduction.run(watch, (flat,), (flat,))
        else:
            self._send(communicator, flat, self.contest.ways[at], watch)
        self.contest.record(time.perf_counter() - start, flat.nbytes)

    def _send(self, communicator: Communicator, flat: Any, way: Way, watch: Watch) -> None:
        wire = wire_dtype(flat.dtype)
        work = flat if wire == flat.dtype else flat.astype(wire)
        communicator.bind(work, self.op, way.algorithm)(watch)
        if work is not flat:
            flat[...] = work


def _not_contiguous(name: str, array: Any) -> ValueError:
    """Return the error for an array that cannot be worked on in place."""
    return ValueError(
        f"{name} works in place on C-contiguous arrays, got shape {array.shape} with strides {array.strides}; "
        "pass numpy.ascontiguousarray(array) and copy the result back"
    )


def _nothing(watch: Watch) -> None:
    """One rank alone, or nothing to reduce."""


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
