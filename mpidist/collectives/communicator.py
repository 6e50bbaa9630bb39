"""Collectives by name over the ranks of a world: every call numbered and checked, on whichever algorithm is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from mpidist.arrays import is_device, plain, wire_dtype
from mpidist.collectives import selection
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.call import Call
from mpidist.collectives.chooser import Chooser
from mpidist.collectives.messages import Replay
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.plain import not_contiguous
from mpidist.collectives.selection import Way
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.runtime.control import Watch
from mpidist.runtime.trace import Trace
from mpidist.transports import World

#: Arrays of so many bytes at most are looked at for the quickest way; for longer ones it saves nothing.
_SHORT_BYTES = 1 << 14

#: How many calls of `Communicator.all_reduce` are kept ready, by shape: shapes may be new every time.
_KEPT_CALLS = 256


class Communicator(Chooser):
    """The collectives of one world, for one of its ranks.

    Parameters
    ----------
    world : World

    Attributes
    ----------
    rank, size, topology, control, transport, segments, choices
        As of `Caller` and `Chooser`.
    trace : Trace or None
        Where events are noted; set by `mpidist.world` if ``MPIDIST_TRACE`` asks for it.
    load_choices : callable or None
        Returns what `mpidist tune` stored of these ranks; set by `mpidist.world`, called once.  Collective.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.trace: Trace | None = None
        self.load_choices: Callable[[], selection.Choices | None] | None = None
        self.in_shared_memory: dict[int, Any] = {}
        self._calls: dict[Any, _BufferReduction] = {}
        self._short: dict[Any, tuple[Call, SegmentAllReduce | None, float | None]] = {}

    def prepare(
        self,
        call: Call,
        algorithm: str | None = None,
        on_host: bool = True,
        timeout_seconds: float | None = None,
    ) -> None:
        """Load what `mpidist tune` stored, before the first `call` that may be chosen by it.

        Collective: every rank calls it in the same order, before it plans an all-reduce.  Errors as for `begin`.
        """
        load = self.load_choices
        if load is None or not on_host or self._asked(algorithm) != selection.AUTO:
            return
        self.check(call, timeout_seconds)
        self.load_choices = None
        with self.control.deadline(timeout_seconds):
            self.choices = load()
        self._calls.clear()  # what was planned before by the fixed table
        self._short.clear()

    def traced(self, kind: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn`, with an event around each of its calls if there is a trace; Local."""
        return fn if self.trace is None else self.trace.wrapped(kind, fn)

    def observed(self, reduction: BucketReduction) -> BucketReduction:
        """Return a reduction that was made elsewhere; a trace puts another method in this one's place.  Local."""
        return reduction

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
        flat = buffer.reshape(-1)
        with self.control.turnstile:
            if planned.segment is not None:
                numpy.copyto(planned.segment.slot(self.control.call + 1), flat)
                planned.segment.combine(self.begin(planned.call, timeout_seconds), flat)
            else:
                planned.run(self, flat, timeout_seconds)

    def _plan(self, buffer: Any, op: str, algorithm: str | None, timeout_seconds: float | None) -> _BufferReduction:
        self._plain(buffer, op)
        wire, on_host = wire_dtype(buffer.dtype), not is_device(buffer)
        name, tensors, nbytes = f"all_reduce({op})", [("", buffer.dtype, buffer.shape)], buffer.size * wire.itemsize
        self.prepare(Call(name, tensors), algorithm, on_host, timeout_seconds)
        way = self.way(nbytes, algorithm, on_host)
        call = Call(name, tensors, [(way.label, nbytes)])
        small = way.algorithm == "shared_memory" and wire == buffer.dtype
        segment = self.small(buffer.size, wire, op) if small else None
        pieces, dtypes = Pieces((0, buffer.size)), (buffer.dtype, wire, buffer.dtype)
        reduction = None if segment is not None else self.reduction(way, pieces, pieces, dtypes, op)
        return _BufferReduction(op, call, way, reduction, segment)

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
        self.prepare(Call(name, [("", array.dtype, array.shape)]))
        kinds = "f" if op == "mean" else "fiu"
        if self.segments is None or nbytes > _SHORT_BYTES or array.dtype.kind not in kinds or array.itemsize < 4:
            return Call(name), None, None
        way = self.way(nbytes, None)
        if way.algorithm != "shared_memory":
            return Call(name), None, None
        call = Call(name, [("", array.dtype, array.shape)], [(way.label, nbytes)])
        segment = SegmentAllReduce(self.segments, self.control.line, array.shape, array.dtype, "sum")
        return call, segment, 1.0 / self.size if op == "mean" else None


class _BufferReduction:
    """The all-reduce of buffers of one shape, with its call."""

    __slots__ = ("op", "call", "way", "reduction", "segment", "_replay")

    def __init__(
        self, op: str, call: Call, way: Way, reduction: BucketReduction | None, segment: SegmentAllReduce | None
    ) -> None:
        self.op = op
        self.call = call
        self.way = way
        self.reduction = reduction
        self.segment = segment
        self._replay: Replay | None = None

    def run(self, communicator: Communicator, flat: Any, timeout_seconds: float | None) -> None:
        """Reduce the flat buffer."""
        watch = communicator.begin(self.call, timeout_seconds)
        if self.reduction is not None:
            self.reduction.run(watch, (flat,), (flat,))
        else:
            self._send(communicator, flat, watch)

    def _send(self, communicator: Communicator, flat: Any, watch: Watch) -> None:
        wire = wire_dtype(flat.dtype)
        work = flat if wire == flat.dtype else flat.astype(wire)
        if self._replay is None:
            self._replay = communicator.bind(work, self.op, self.way.algorithm, is_example=True)
        self._replay(watch, work)
        if work is not flat:
            flat[...] = work
