"""Puts a trace around what a communicator does: its methods are wrapped when one is asked for, and untouched otherwise.

The clocks of the nodes are compared when the trace begins, and again in calls 64, 128, 256, ...: so the last comparison
is never further from the end than from the beginning, though no rank waits for another at its end.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpidist.collectives.bucket_reduction import BucketReduction, Fill, Piped, Pipeline, Take
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.direct_sum import DirectSum, Stripe
from mpidist.collectives.messages import Replay
from mpidist.collectives.pieces import Transform
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.collectives.two_level import TwoLevel
from mpidist.runtime import trace as kinds
from mpidist.runtime.control import Watch
from mpidist.runtime.trace import About, Trace
from mpidist.runtime.turnstile import Turnstile
from mpidist.tracing.clock import clock_offset

#: The first call, after the one that begins a trace, in which clocks are compared again.
_FIRST_COMPARISON = 64


def attach(communicator: Communicator, folder: str) -> Trace:
    """Begin a trace of a communicator, in a file of its own for each rank.

    Collective: every rank calls it in the same order, before anything else is done with the communicator.

    Parameters
    ----------
    communicator : Communicator
    folder : str
        Made if it is not there.  A world that is not the whole job has a folder of its own in it.
    """
    control, rank = communicator.control, communicator.rank
    job = communicator.exchange(uuid.uuid4().hex.encode(), "start of a trace")[0].decode()
    host = communicator.topology.hosts[rank]
    # other worlds of the job write there too, and their ranks have the same numbers
    place = Path(folder, f"world-{job[:8]}") if control.job_ranks else Path(folder)
    trace = Trace(place, About(job, rank, communicator.size, host), warn=control.warn)
    _Tracer(communicator, trace)
    return trace


class _Tracer:
    """Holds what was wrapped, and the number of the call that is under way."""

    def __init__(self, communicator: Communicator, trace: Trace) -> None:
        self._communicator, self._trace = communicator, trace
        self._control = communicator.control
        self._next_comparison = _FIRST_COMPARISON
        self._begin, self._reduction, self._small = communicator.begin, communicator.reduction, communicator.small
        self._bind, self._wait = communicator.bind, communicator.transport.wait
        with self._control.turnstile:
            self._compare_clocks(self._begin(communicator.call("clocks of a trace")))
        communicator.begin = self.begin
        communicator.reduction = self.reduction  # type: ignore[method-assign]
        communicator.small = self.small  # type: ignore[method-assign]
        communicator.bind = self.bind  # type: ignore[method-assign]
        communicator.observed = self.observed  # type: ignore[method-assign]
        communicator.transport.wait = self.wait  # type: ignore[method-assign]
        self._control.turnstile = _TracedTurnstile(self._control, trace)
        self._close_when_leaving()

    def _close_when_leaving(self) -> None:
        """Write the trace whenever this rank says that it ends, however it does: `leave`, `fail` or `end`."""
        for name in ("leave", "fail", "end"):
            setattr(self._control, name, _after(self._trace.close, getattr(self._control, name)))

    def begin(self, call: Any, timeout_seconds: float | None = None) -> Watch:
        """Begin a call, and note when this rank came and when all had come."""
        start = time.monotonic_ns()
        watch = self._begin(call, timeout_seconds)
        trace, number = self._trace, self._control.call
        trace.last_call = trace.kind(call.what)
        trace.add(kinds.ARRIVE, start, number, trace.last_call)
        if number >= self._next_comparison:
            self._compare_clocks(watch)
        return watch

    def _compare_clocks(self, watch: Watch) -> None:
        while self._next_comparison <= watch.call:
            self._next_comparison *= 2
        if self._communicator.topology.node_count > 1:
            offset = clock_offset(self._communicator, watch)
            self._trace.about.offsets.append((time.monotonic_ns(), offset))

    def reduction(self, *args: Any, **kwargs: Any) -> BucketReduction | None:
        """Return the reduction of a bucket, traced."""
        found = self._reduction(*args, **kwargs)
        if isinstance(found, Piped):
            found._pipeline = _TracedPipeline(found._pipeline, self._trace)
        if isinstance(found, DirectSum):
            self._note_copies(found)
        return None if found is None else _TracedReduction(found, self._trace)

    def _note_copies(self, reduction: DirectSum) -> None:
        """Note when each stripe was copied in, and its sums out."""
        fill, take, add, control = reduction.fill, reduction.take, self._trace.add, self._communicator.control

        def traced_fill(stripe: Stripe, sources: Sequence[Any]) -> None:
            begin = time.monotonic_ns()
            fill(stripe, sources)
            add(kinds.PACK, begin, control.call, stripe.start)

        def traced_take(stripe: Stripe, targets: Sequence[Any]) -> None:
            begin = time.monotonic_ns()
            take(stripe, targets)
            add(kinds.UNPACK, begin, control.call, stripe.start)

        reduction.fill, reduction.take = traced_fill, traced_take  # type: ignore[method-assign]

    def observed(self, reduction: BucketReduction) -> BucketReduction:
        """Return a reduction that the communicator did not make itself, traced."""
        return _TracedReduction(reduction, self._trace)

    def small(self, *args: Any, **kwargs: Any) -> SegmentAllReduce | None:
        """Return the all-reduce of a short buffer in one step, traced."""
        found = self._small(*args, **kwargs)
        if found is not None:
            found.combine = self._noted(found.combine)  # type: ignore[method-assign]
        return found

    def bind(self, *args: Any, **kwargs: Any) -> Replay:
        """Return what reduces a buffer, traced."""
        return self._noted(self._bind(*args, **kwargs))

    def _noted(self, run: Callable[..., None]) -> Callable[..., None]:
        """Return what reduces a buffer in a call, with an event around it."""
        add = self._trace.add

        def traced(watch: Watch, *buffers: Any) -> None:
            start = time.monotonic_ns()
            run(watch, *buffers)
            add(kinds.REDUCE, start, watch.call)

        return traced

    def wait(self, pendings: Sequence[Any], watch: Watch) -> None:
        """Wait for messages, and note how long they were waited for."""
        start = time.monotonic_ns()
        self._wait(pendings, watch)
        self._trace.add(kinds.SEND, start, watch.call)


class _TracedTurnstile(Turnstile):
    """Notes how long each call takes as a whole, what is done before it is begun included."""

    __slots__ = ("_trace", "_start", "_release")

    def __init__(self, control: Any, trace: Trace) -> None:
        super().__init__(control)
        self._trace = trace
        self._start = 0
        self._release, self.leave = self.leave, self._leave

    def enter(self) -> None:
        start = time.monotonic_ns()
        super().enter()
        self._start = start

    def _leave(self) -> None:
        self._note()
        self._release()

    def leave_by(self, error: BaseException) -> None:
        self._note()
        super().leave_by(error)

    def _note(self) -> None:
        if self._control.call != self._call:  # a list unlike the last one is looked at, and no call made
            self._trace.add(kinds.CALL, self._start, self._control.call, self._trace.last_call)


class _TracedReduction:
    """A reduction of a bucket, and when it ran."""

    def __init__(self, reduction: BucketReduction, trace: Trace) -> None:
        self.owned = reduction.owned
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
    """A pipeline, and when each segment was packed and handed out, and each wave was between the nodes."""

    def __init__(self, pipeline: Pipeline, trace: Trace) -> None:
        self.bounds, self.owned = pipeline.bounds, pipeline.owned
        self._pipeline, self._trace = pipeline, trace
        self._call = 0
        if isinstance(pipeline, TwoLevel):
            self._note_waves(pipeline)

    def _note_waves(self, pipeline: TwoLevel) -> None:
        """Note when a wave was sent until it had come back; waves count from 1, since waits for messages have 0."""
        send, publish, begun = pipeline.send, pipeline.publish, {}

        def traced_send(index: int) -> None:
            begun[index] = time.monotonic_ns()
            send(index)

        def traced_publish(index: int) -> None:
            self._trace.add(kinds.SEND, begun.pop(index), self._call, index + 1)
            publish(index)

        pipeline.send, pipeline.publish = traced_send, traced_publish  # type: ignore[method-assign]

    def run(self, watch: Watch, fill: Fill, take: Take, transform: Transform | None = None) -> None:
        """As `Pipeline.run`."""
        add, call = self._trace.add, watch.call
        self._call = call

        def traced_fill(index: int, place: Any) -> None:
            start = time.monotonic_ns()
            fill(index, place)
            add(kinds.PACK, start, call, index)

        def traced_take(first: int, values: Any) -> None:
            start = time.monotonic_ns()
            take(first, values)
            add(kinds.UNPACK, start, call, first)

        self._pipeline.run(watch, traced_fill, traced_take, transform)


def _after(close: Callable[[], object], do: Callable[..., Any]) -> Callable[..., Any]:
    def closed(*args: Any, **kwargs: Any) -> Any:
        close()
        return do(*args, **kwargs)

    return closed
