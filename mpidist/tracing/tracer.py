"""`Tracer`: an observer that notes when a communicator does what.

The clocks of the nodes are compared when the trace begins, and again in calls 64, 128, 256, ...: so the last comparison
is never further from the end than from the beginning, though no rank waits for another at its end.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from mpidist.collectives.communicator import Communicator
from mpidist.collectives.observer import Observer
from mpidist.collectives.ways.bucket_reduction import BucketReduction, Fill, Pipeline, Take
from mpidist.collectives.ways.pieces import Transform
from mpidist.runtime import trace_kinds as kinds
from mpidist.runtime.control import ControlChannel, Watch
from mpidist.runtime.trace import Trace
from mpidist.runtime.trace_file import About
from mpidist.runtime.turnstile import BaseTurnstile
from mpidist.tracing.clock import clock_offset
from mpidist.transports import World
from mpidist.transports.base import Transport

#: The first call, after the one that begins a trace, in which clocks are compared again.
_FIRST_COMPARISON = 64


class Tracer(Observer):
    """Notes what one rank does when."""

    def __init__(self, world: World) -> None:
        self._world, self._control, rank = world, world.control, world.transport.rank
        about = About("", rank, world.transport.size, world.topology.hosts[rank])
        self._trace = Trace(None, about, warn=self._control.warn)
        self._next_comparison = _FIRST_COMPARISON
        self._sent: dict[int, int] = {}  # by wave of the call that is under way: when it was sent

    def start(self, communicator: Communicator, folder: str) -> None:
        """Begin the trace of a communicator that this observes, in a file of its own for each rank.

        Collective: every rank calls it in the same order, before anything else is done with the communicator.  The
        `folder` is made if it is not there; a world that is not the whole job has a folder of its own in it.
        """
        control, about = self._control, self._trace.about
        job = communicator.exchange(uuid.uuid4().hex.encode(), "start of a trace")[0].decode()
        about.job = job
        # other worlds of the job write there too, and their ranks have the same numbers
        self._trace.open(Path(folder, f"world-{job[:8]}") if control.job_ranks else Path(folder))
        with communicator.turnstile:
            self._compare_clocks(communicator.begin(communicator.call("clocks of a trace")))
        self._trace.clear()  # when ranks start says nothing of what they do
        control.at_end.append(self._trace.close)

    @property
    def trace(self) -> Trace:
        """Where this rank's events are.  Local."""
        return self._trace

    # -- what is observed ---------------------------------------------------------------------------------------------

    def transport(self, transport: Transport) -> Transport:
        """Return a transport whose waits are noted.  Local."""
        return cast(Transport, _TracedTransport(transport, self._trace))

    def turnstile(self, turnstile: BaseTurnstile) -> BaseTurnstile:
        """Return what notes how long each call takes as a whole.  Local."""
        return _TracedTurnstile(turnstile, self._control, self._trace)

    def begin(self, begin: Callable[..., Watch]) -> Callable[..., Watch]:
        """Return what begins a call, and notes when this rank came and when all had come.  Local."""
        trace = self._trace

        def traced(call: Any, timeout_seconds: float | None = None) -> Watch:
            start = time.monotonic_ns()
            watch = begin(call, timeout_seconds)
            number = self._control.call
            trace.last_call = trace.kind(call.what)
            trace.add(kinds.ARRIVE, start, number, trace.last_call)
            if number >= self._next_comparison:
                self._compare_clocks(watch)
            return watch

        return traced

    def function(self, kind: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function with an event around each of its calls.  Local."""
        return self._trace.wrapped(kind, fn)

    def stripe(self, kind: int, fn: Callable[[Any, Sequence[Any]], None]) -> Callable[[Any, Sequence[Any]], None]:
        """Return what packs or hands out a stripe, with an event that says where the stripe begins.  Local."""
        add, control = self._trace.add, self._control

        def traced(stripe: Any, tensors: Sequence[Any]) -> None:
            start = time.monotonic_ns()
            fn(stripe, tensors)
            add(kind, start, control.call, stripe.start)

        return traced

    def reduction(self, reduction: BucketReduction) -> BucketReduction:
        """Return a reduction that notes when it ran.  Local."""
        return _TracedReduction(reduction, self._trace)

    def pipeline(self, pipeline: Pipeline) -> Pipeline:
        """Return a pipeline that notes when each segment was packed and handed out.  Local."""
        return _TracedPipeline(pipeline, self._trace)

    def wave(self, index: int, is_back: bool) -> None:
        """Note when a wave was sent until it had come back; waves count from 1, since waits for messages have 0."""
        if is_back:
            self._trace.add(kinds.SEND, self._sent.pop(index), self._control.call, index + 1)
        else:
            self._sent[index] = time.monotonic_ns()

    def _compare_clocks(self, watch: Watch) -> None:
        while self._next_comparison <= watch.call:
            self._next_comparison *= 2
        if self._world.topology.node_count > 1:
            start = time.monotonic_ns()
            offset = clock_offset(self._world, watch)
            self._trace.about.offsets.append((time.monotonic_ns(), offset))
            self._trace.add(kinds.SEND, start, watch.call)


class _TracedTransport:
    """A transport, and how long was waited for its messages."""

    def __init__(self, transport: Transport, trace: Trace) -> None:
        self._transport, self._add = transport, trace.add

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def wait(self, pendings: Sequence[Any], watch: Watch) -> None:
        """Wait for messages."""
        start = time.monotonic_ns()
        self._transport.wait(pendings, watch)
        self._add(kinds.SEND, start, watch.call)

    def exchange(self, payload: bytes, watch: Watch) -> list[bytes]:
        """Exchange bytes, which is to wait for messages."""
        start = time.monotonic_ns()
        found = self._transport.exchange(payload, watch)
        self._add(kinds.SEND, start, watch.call)
        return found


class _TracedTurnstile(BaseTurnstile):
    """Notes how long each call takes as a whole, what is done before it is begun included."""

    __slots__ = ("_turnstile", "_control", "_trace", "_start", "_call")

    def __init__(self, turnstile: BaseTurnstile, control: ControlChannel, trace: Trace) -> None:
        self._turnstile, self._control, self._trace = turnstile, control, trace
        self._start = self._call = 0

    def enter(self) -> None:
        """Pass before a call."""
        start = time.monotonic_ns()
        self._turnstile.enter()
        self._start, self._call = start, self._control.call

    def leave(self) -> None:
        """Leave after a call that raised nothing, also when a signal handler raises meanwhile."""
        try:
            self._note()
        finally:
            self._turnstile.leave()

    def leave_by(self, error: BaseException) -> None:
        """Leave after a call that raised `error`."""
        try:
            self._note()
        finally:
            self._turnstile.leave_by(error)

    def _note(self) -> None:
        if self._control.call != self._call:  # a list unlike the last one is looked at, and no call made
            self._trace.add(kinds.CALL, self._start, self._control.call, self._trace.last_call)


class _TracedReduction:
    """A reduction of a bucket, and when it ran."""

    def __init__(self, reduction: BucketReduction, trace: Trace) -> None:
        self.owned, self.slot = reduction.owned, reduction.slot
        self._reduction, self._trace = reduction, trace

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """Run it, with the update of what is reduced, if there is one, as an event of its own."""
        start = time.monotonic_ns()
        if transform is not None:
            transform = self._trace.wrapped(kinds.APPLY, transform)
        self._reduction.run(watch, sources, targets, transform)
        self._trace.add(kinds.REDUCE, start, watch.call)


class _TracedPipeline:
    """A pipeline, and when each segment was packed and handed out."""

    def __init__(self, pipeline: Pipeline, trace: Trace) -> None:
        self.bounds, self.owned = pipeline.bounds, pipeline.owned
        self._pipeline, self._trace = pipeline, trace

    def run(self, watch: Watch, fill: Fill, take: Take, transform: Transform | None = None) -> None:
        """As `Pipeline.run`."""
        add, call = self._trace.add, watch.call

        def traced_fill(index: int, place: Any) -> None:
            start = time.monotonic_ns()
            fill(index, place)
            add(kinds.PACK, start, call, index)

        def traced_take(first: int, values: Any) -> None:
            start = time.monotonic_ns()
            take(first, values)
            add(kinds.UNPACK, start, call, first)

        self._pipeline.run(watch, traced_fill, traced_take, transform)
