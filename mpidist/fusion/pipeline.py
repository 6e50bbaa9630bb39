"""Pack, reduce, hand out: a list of tensors reduced over all ranks by a cached plan.

The result lives where it was packed: a bucket's buffer is reduced in place, and the tensors that the caller gets are
views of it.  The caller owns them.  A set of buffers is used again only when nobody refers to any of its views any
more, so that a training loop, which drops its gradients every step, allocates nothing after the first.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.communicator import Call, Communicator, Replay
from mpidist.collectives.segment_pipeline import SegmentPipeline
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.errors import UnsupportedDtypeError
from mpidist.fusion.plan import Bucket, Plan, build
from mpidist.fusion.trial import Trial
from mpidist.runtime.control import Watch

#: How many sets of buffers a plan keeps for another turn; who holds on to more results gets new memory for each.
_KEPT_SETS = 3

#: How many lists of shapes are planned for at a time: shapes that are new every step must not fill the memory.
_KEPT_PLANS = 64

_signature = attrgetter("dtype", "shape")


class FusedAllReduce:
    """All-reduce of lists of tensors, fused.

    Parameters
    ----------
    communicator : Communicator
    bytes_per_pack : int
        Size in bytes of a fused unit, 0 for the default.
    algorithm : str, optional
        As in `Communicator.all_reduce`.
    """

    def __init__(self, communicator: Communicator, bytes_per_pack: int = 0, algorithm: str | None = None) -> None:
        self._communicator = communicator
        self._bytes_per_pack = bytes_per_pack
        self._algorithm = algorithm
        self._planned: dict[Any, _PlannedReduction] = {}

    def __call__(
        self,
        tensors: Sequence[Any],
        op: str = "sum",
        names: Sequence[str] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Return the tensors reduced over all ranks, as new arrays that are the caller's.

        Collective: every rank calls it in the same order, with tensors of the same shapes and dtypes.

        Parameters
        ----------
        tensors : sequence of arrays
            Of any shapes and dtypes, contiguous or not; unchanged.
        op : str
            ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        names : sequence of str, optional
            For messages; must be the same on all ranks.
        timeout_seconds : float, optional

        Returns
        -------
        list of arrays
            The mean of integers is float64; other dtypes are kept.

        Raises
        ------
        CollectiveMismatchError, TransportTimeoutError, RankFailedError, UnsupportedDtypeError
        """
        kinds = frozenset(map(type, tensors))
        key = (op, tuple(names) if names is not None else None, kinds, *map(_signature, tensors))
        planned = self._planned.get(key)
        if planned is not None:
            planned.settle()
        else:
            if len(self._planned) >= _KEPT_PLANS:
                del self._planned[next(iter(self._planned))]
            planned = self._planned[key] = self._plan(tensors, op, names, timeout_seconds)
        with self._communicator.control.turnstile:
            return planned(tensors, timeout_seconds)

    def _plan(
        self, tensors: Sequence[Any], op: str, names: Sequence[str] | None, timeout_seconds: float | None
    ) -> _PlannedReduction:
        if names is not None and len(names) != len(tensors):
            raise ValueError(f"got {len(tensors)} tensors and {len(names)} names; give each tensor a name, or none")
        communicator = self._communicator
        _check_kinds(tensors, communicator)
        labels = names if names is not None else [""] * len(tensors)
        signatures = [(name, array.dtype, tuple(array.shape)) for name, array in zip(labels, tensors, strict=True)]
        call = communicator.call(f"all_reduce({op})", signatures)
        on_host = not (tensors and arrays.is_device(tensors[0]))
        nbytes = sum(array.nbytes for array in tensors)
        communicator.prepare(nbytes, call, self._algorithm, on_host, timeout_seconds)
        plan = build(signatures, op, self._bytes_per_pack or communicator.bytes_per_pack(self._algorithm))
        return _PlannedReduction(plan, communicator, self._algorithm, tensors)


class _PlannedReduction:
    """A plan with what it needs to run: the ways to reduce its buckets, and sets of buffers."""

    def __init__(self, plan: Plan, communicator: Communicator, algorithm: str | None, tensors: Sequence[Any]) -> None:
        self._plan = plan
        self._communicator = communicator
        on_host = not (tensors and arrays.is_device(tensors[0]))
        # An empty array of the tensors' kind: no reference to a user's array is kept.
        self._kind = numpy.empty(0) if on_host else arrays.empty(0, tensors[0].dtype, tensors[0])
        self._scale = 1.0 / communicator.size if plan.op == "mean" and communicator.size > 1 else None
        self._sets: list[_ResultSet] = []
        largest = max((bucket.nbytes for bucket in plan.buckets), default=0)
        ways = communicator.ways(largest, algorithm, on_host)
        self._ways = [_Way(plan, communicator, way, self._scale, on_host) for way in ways]
        self._trial = Trial(len(ways)) if len(ways) > 1 else None

    def settle(self) -> None:
        """Choose among the ways once all were tried.

        Collective, and numbered like any call: all ranks come to it at the same step.
        """
        if self._trial is not None and self._trial.is_over:
            times = self._trial.best_seconds
            self._communicator.all_reduce(times, "max")
            self._ways, self._trial = [self._ways[int(times.argmin())]], None
            for results in self._sets:
                results.forget_replays()

    def __call__(self, tensors: Sequence[Any], timeout_seconds: float | None) -> list[Any]:
        way = self._ways[0] if self._trial is None else self._ways[self._trial.way]
        results = self._free_set()
        if way.call.segment is not None:
            self._run_small(way.call, way.call.segment, tensors, results, timeout_seconds)
            return list(results.views)
        watch = self._communicator.begin(way.call, timeout_seconds)
        start = time.perf_counter()
        for index, bucket in enumerate(self._plan.buckets):
            members = [tensors[position] for position in bucket.tensors]
            in_segments = way.in_segments[index]
            if in_segments is not None:
                in_segments.run(members, results.results[index], watch)
            else:
                _pack(members, results.buffers[index])
                results.replay(index, self._communicator, self._plan.reduction, way.algorithm)(watch)
                results.finish(index, self._scale)
        if self._trial is not None:
            self._trial.record(time.perf_counter() - start)
        return list(results.views)

    def _run_small(
        self,
        call: Call,
        segment: SegmentAllReduce,
        tensors: Sequence[Any],
        results: _ResultSet,
        timeout_seconds: float | None,
    ) -> None:
        """Reduce the only bucket in one step; its values lie in shared memory before the call is begun."""
        members = [tensors[position] for position in self._plan.buckets[0].tensors]
        _pack(members, segment.slot(self._communicator.control.call + 1))
        segment.combine(self._communicator.begin(call, timeout_seconds).call, results.buffers[0])
        results.finish(0, self._scale)

    def _free_set(self) -> _ResultSet:
        for results in self._sets:
            if results.is_free():
                return results
        results = _ResultSet(self._plan, self._kind)
        results.settle()
        if len(self._sets) < _KEPT_SETS:
            self._sets.append(results)
        return results


class _Way:
    """One way to reduce a plan's buckets: the call that all ranks must make alike, and what goes through segments."""

    def __init__(
        self, plan: Plan, communicator: Communicator, way: tuple[str, int], scale: float | None, on_host: bool
    ) -> None:
        self.algorithm, segment_bytes = way
        packs = [communicator.pack(bucket.nbytes, self.algorithm, on_host) for bucket in plan.buckets]
        if segment_bytes:  # ranks that cut differently would read what is not there
            packs = [(f"{name} in segments of {segment_bytes >> 10} KiB", nbytes) for name, nbytes in packs]
        self.call = communicator.call(f"all_reduce({plan.op})", plan.signatures, packs)
        self.in_segments: list[_InSegments | None] = [None] * len(plan.buckets)
        if not segment_bytes:
            return
        if len(plan.buckets) == 1:
            only = plan.buckets[0]
            self.call.segment = communicator.small(only.elements, only.dtype, plan.reduction)
        if self.call.segment is None:
            for index, bucket in enumerate(plan.buckets):
                shape = (bucket.elements, bucket.dtype, plan.reduction)
                pipeline = communicator.pipeline(*shape, scale=scale, segment_bytes=segment_bytes)
                self.in_segments[index] = None if pipeline is None else _InSegments(pipeline, bucket)


class _InSegments:
    """A bucket that goes through shared segments, and which parts of its tensors lie in which segment."""

    def __init__(self, pipeline: SegmentPipeline, bucket: Bucket) -> None:
        self._pipeline = pipeline
        self._parts = [_parts(start, stop, bucket.offsets) for start, stop in pipeline.bounds]

    def run(self, tensors: Sequence[Any], out: Any, watch: Watch) -> None:
        """Reduce the bucket's tensors into the flat `out`."""
        flat, parts = [tensor.reshape(-1) for tensor in tensors], self._parts

        def fill(index: int, place: Any) -> None:
            pieces = [flat[member][start:stop] for member, start, stop in parts[index]]
            if len(pieces) == 1:
                place[...] = pieces[0]
            else:
                numpy.concatenate(pieces, out=place)

        def take(start: int, values: Any) -> None:
            out[start : start + len(values)] = values

        self._pipeline.run(watch, fill, take)


def _parts(start: int, stop: int, offsets: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (member, first, end) of the parts of a bucket's tensors that lie in its elements `start` to `stop`."""
    found = []
    for member in range(bisect_right(offsets, start) - 1, len(offsets) - 1):
        first, end = max(start, offsets[member]), min(stop, offsets[member + 1])
        if offsets[member] >= stop:
            break
        if first < end:
            found.append((member, first - offsets[member], end - offsets[member]))
    return found


class _ResultSet:
    """The buffers in which buckets are reduced, the results made of them, and the views that callers get.

    A buffer is the result itself where both have one dtype.
    """

    def __init__(self, plan: Plan, kind: Any) -> None:
        self.buffers = [arrays.empty(bucket.elements, bucket.dtype, kind) for bucket in plan.buckets]
        self.results = [
            buffer if bucket.result == bucket.dtype else arrays.empty(bucket.elements, bucket.result, kind)
            for bucket, buffer in zip(plan.buckets, self.buffers, strict=True)
        ]
        self._replays: list[Replay | None] = [None] * len(plan.buckets)
        self.views: list[Any] = [None] * len(plan.signatures)
        for bucket, result in zip(plan.buckets, self.results, strict=True):
            self._cut(bucket, result, plan)
        self._idle: list[int] = []

    def forget_replays(self) -> None:
        """Drop what was bound to the buffers, and with it their references to them."""
        was_free = self.is_free()
        self._replays = [None] * len(self._replays)
        if was_free:
            self.settle()

    def replay(self, index: int, communicator: Communicator, op: str, algorithm: str | None) -> Replay:
        """Return what reduces buffer `index` over messages; it is bound to the buffer once."""
        bound = self._replays[index]
        if bound is None:
            bound = self._replays[index] = communicator.bind(self.buffers[index], op, algorithm)
            self.settle()  # what is bound refers to the buffer
        return bound

    def _cut(self, bucket: Bucket, result: Any, plan: Plan) -> None:
        for position, start, end in zip(bucket.tensors, bucket.offsets[:-1], bucket.offsets[1:], strict=True):
            self.views[position] = result[start:end].reshape(plan.signatures[position][2])

    def finish(self, index: int, scale: float | None) -> None:
        """Multiply bucket `index` by `scale` if it is a mean, and round it to the caller's dtype."""
        buffer, result = self.buffers[index], self.results[index]
        if scale is not None:
            arrays.namespace(buffer).multiply(buffer, scale, out=buffer)
        if result is not buffer:
            result[...] = buffer

    def settle(self) -> None:
        """Count the references there are while nobody else has any: after construction, whose locals hold some."""
        self._idle = self._references()

    def is_free(self) -> bool:
        """Whether nobody else refers to a view, or to a view of one (which refers to the buffer behind it)."""
        return self._references() == self._idle

    def _references(self) -> list[int]:
        return [sys.getrefcount(array) for array in chain(self.views, self.results, self.buffers)]


def _check_kinds(tensors: Sequence[Any], communicator: Communicator) -> None:
    """Raise, before any communication, unless all tensors are of one kind that the transport can move."""
    kinds = {arrays.kind_of(tensor).name for tensor in tensors}
    if len(kinds) > 1:
        raise UnsupportedDtypeError(
            f"a list to be reduced together must be of one kind of arrays, got {', '.join(sorted(kinds))}; "
            "reduce each kind in a call of its own"
        )
    if communicator.size > 1 and tensors:
        arrays.check_memory(tensors[0], communicator.transport.memory, communicator.transport.name)


def _pack(tensors: Sequence[Any], out: Any) -> None:
    """Copy tensors, one after the other in C order, into the flat `out`, converting to its dtype."""
    if len(tensors) == 1:
        out[...] = tensors[0].reshape(-1)
    elif tensors:
        arrays.namespace(out).concatenate(tensors, axis=None, out=out)
