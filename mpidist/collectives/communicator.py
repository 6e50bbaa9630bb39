"""Collectives by name over the ranks of a world: every call numbered and checked, on whichever algorithm is chosen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy

from mpidist import transports
from mpidist.arrays import is_device, plain, wire_dtype
from mpidist.collectives import selection, tracing, tuning
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.call import Call
from mpidist.collectives.chooser import Chooser
from mpidist.collectives.contest import Calls, Contest
from mpidist.collectives.messages import Replay
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.plain import not_contiguous
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.collectives.ways import Way
from mpidist.runtime.control import Watch
from mpidist.runtime.trace import Trace
from mpidist.transports import World

#: Arrays of so many bytes at most are looked at for the quickest way; for longer ones it saves nothing.
_SHORT_BYTES = 1 << 14

#: How many calls of `Communicator.all_reduce` are kept ready, by shape: shapes may be new every time.
_KEPT_CALLS = 256

_communicators: WeakKeyDictionary[World, Communicator] = WeakKeyDictionary()


class Communicator(Chooser):
    """The collectives of one world, for one of its ranks.

    Parameters
    ----------
    world : World

    Attributes
    ----------
    rank, size, topology, control, transport, segments, choices, modes
        As of `Caller` and `Chooser`.
    trace : Trace or None
        Where events are noted, if ``MPIDIST_TRACE`` asks for it.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.trace: Trace | None = None
        self.in_shared_memory: dict[int, Any] = {}
        self._calls: dict[Any, _BufferReduction] = {}
        self._short: dict[Any, tuple[Call, SegmentAllReduce | None, float | None]] = {}

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
            with self.control.deadline(timeout_seconds):
                self.choices = tuning.choices_for(self)
            self._calls.clear()  # what was planned before by the fixed table
            self._short.clear()

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
        buffer = plain(buffer)
        key = (type(buffer), buffer.shape, buffer.dtype, op, algorithm)
        planned = self._calls.get(key)
        if not buffer.flags.c_contiguous:
            raise not_contiguous("all_reduce", buffer)
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
                planned.segment.combine(self.begin(planned.calls[0,], timeout_seconds), flat)
            else:
                planned.run(self, flat, timeout_seconds)

    def _plan(self, buffer: Any, op: str, algorithm: str | None, timeout_seconds: float | None) -> _BufferReduction:
        self._plain(buffer, op)
        wire, on_host = wire_dtype(buffer.dtype), not is_device(buffer)
        name, tensors, nbytes = f"all_reduce({op})", [("", buffer.dtype, buffer.shape)], buffer.size * wire.itemsize
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
        out, control = array.copy(), self.control  # a copy is quicker to be had than an empty array
        with control.turnstile:
            segment.slot(control.call + 1)[...] = out
            segment.combine(self.begin(call), out)
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
        segment = SegmentAllReduce(self.segments, self.control.board_index, array.shape, array.dtype, "sum")
        return call, segment, 1.0 / self.size if op == "mean" else None


class _BufferReduction:
    """The all-reduce of buffers of one shape: the ways that are tried, each with its call."""

    __slots__ = ("op", "contest", "calls", "reductions", "segment", "_replays")

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
        self._replays: dict[Way, Replay] = {}

    def run(self, communicator: Communicator, flat: Any, timeout_seconds: float | None) -> None:
        """Reduce the flat buffer by the way whose turn it is."""
        watch = communicator.begin(self.calls[self.contest.turns], timeout_seconds)
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
        replay = self._replays.get(way)
        if replay is None:
            replay = self._replays[way] = communicator.bind(work, self.op, way.algorithm, is_example=True)
        replay(watch, work)
        if work is not flat:
            flat[...] = work
