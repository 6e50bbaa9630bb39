"""The all-reduce of a list of arrays in place, bound: the reduced values lie where this rank's own values lay.

Who holds the arrays sees the results; no memory is handed out.  That is what adapters of frameworks need, whose
gradients lie in the framework's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy

from mpidist import arrays as arrays_of
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.call import Call
from mpidist.collectives.messages import Replay
from mpidist.collectives.persistent import Bound
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.plan import Bucket, Plan, Signature, build
from mpidist.collectives.ranks import Ranks
from mpidist.collectives.scratch import Scratch
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.device.memory import DeviceMemory, memory_of
from mpidist.errors import UnsupportedDtypeError
from mpidist.runtime.control import Watch

_shape, _dtype = attrgetter("shape"), attrgetter("dtype")
_is_contiguous = attrgetter("flags.c_contiguous")


def bind_in_place(
    ranks: Ranks,
    signatures: Sequence[Signature],
    op: str = "sum",
    algorithm: str | None = None,
    timeout_seconds: float | None = None,
    kind: Any = None,
) -> Bound:
    """Return what reduces lists of such arrays in place, to be called any number of times.

    Collective: every rank calls it in the same order.  Calls compare names, dtypes and shapes.

    Parameters
    ----------
    ranks : Ranks
    signatures : sequence of (name, dtype, shape)
    op : str
        ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
    algorithm : str, optional
        As in `Communicator.all_reduce`.
    timeout_seconds : float, optional
        Of the calls, too.
    kind : array, optional
        An array of the kind that will be reduced; by default they are NumPy's.

    Raises
    ------
    UnsupportedDtypeError
        There is no such reduction of a dtype into arrays of that dtype.
    """
    memory = None if kind is None else memory_of(kind)
    plan = build(signatures, op, ranks.bytes_per_pack(algorithm, memory is None))
    for bucket in plan.buckets:
        dtype = plan.signatures[bucket.tensors[0]][1]
        if bucket.result != dtype:
            raise UnsupportedDtypeError(f"the {op} of {dtype} arrays is {bucket.result}, and cannot be put in place")
    name = f"all_reduce({op}) in place"
    ranks.prepare(Call(name, signatures), algorithm, timeout_seconds)
    way = ranks.way(max((bucket.nbytes for bucket in plan.buckets), default=0), algorithm, memory is None)
    call = Call(name, signatures, [(way.label, bucket.nbytes) for bucket in plan.buckets])
    segment = None
    if way.algorithm == "shared_memory" and len(plan.buckets) == 1:
        segment = ranks.small((plan.buckets[0].elements,), plan.buckets[0].dtype, plan.reduction)
    if ranks.size == 1:
        bound: Bound = _InPlace(ranks, call, plan)
    elif memory is not None:
        bound = _DeviceInPlace(ranks, call, plan, way.algorithm, memory, kind)
    elif segment is not None:
        bound = _ShortInPlace(ranks, call, plan, segment)
    else:
        parts = [_reduction(ranks, plan, bucket, way) for bucket in plan.buckets]
        bound = _LongInPlace(ranks, call, plan, way.algorithm, parts)
    bound.timeout_seconds = timeout_seconds
    return bound


def _reduction(ranks: Ranks, plan: Plan, bucket: Bucket, way: Any) -> BucketReduction | None:
    """Return the reduction of a bucket where it lies, None where it is sent."""
    pieces, dtypes = Pieces(bucket.offsets), (bucket.result, bucket.dtype, bucket.result)
    return ranks.reduction(way, pieces, pieces, dtypes, plan.reduction, _scale(ranks, plan))


def _scale(ranks: Ranks, plan: Plan) -> float | None:
    return 1.0 / ranks.size if plan.op == "mean" and ranks.size > 1 else None


class _InPlace(Bound):
    """The all-reduce of lists of arrays over one rank, which have their results."""

    def __init__(self, ranks: Ranks, call: Call, plan: Plan) -> None:
        super().__init__(ranks, call)
        self._plan = plan
        self._scale = _scale(ranks, plan)
        self._shapes = [shape for _, _, shape in plan.signatures]
        self._dtypes = [dtype for _, dtype, _ in plan.signatures]

    def fill(self, arrays: Sequence[Any]) -> bool:
        """Return True; ValueError unless these are arrays that this was bound for."""
        if list(map(_shape, arrays)) != self._shapes or list(map(_dtype, arrays)) != self._dtypes:
            found = [(str(each.dtype), each.shape) for each in arrays]
            raise ValueError(f"{self.call.what} was bound to other arrays, got {found}; bind another one")
        if not all(map(_is_contiguous, arrays)):
            raise ValueError(f"{self.call.what} is for C-contiguous arrays; pass copies of those that are not")
        if not all(getattr(each.flags, "writeable", True) for each in arrays):  # those on devices have no such flag
            raise ValueError(f"{self.call.what} writes results in place of values; got an array that is read-only")
        return True

    def move(self, watch: Watch, arrays: Sequence[Any]) -> Sequence[Any]:
        return arrays

    def _check_apart(self, spans: Iterable[tuple[int, int]]) -> None:
        """Raise ValueError where arrays with these addresses and bytes share memory, which would be reduced twice."""
        places = sorted(span for span in spans if span[1])
        if any(start + nbytes > after for (start, nbytes), (after, _) in pairwise(places)):
            raise ValueError(f"{self.call.what} got arrays that share memory; pass each of them once, or copies")

    def _finish(self, flat: Any, bucket: Bucket, arrays: Sequence[Any]) -> None:
        """Put the reduced values of a bucket where they belong."""
        if self._scale is not None:
            numpy.multiply(flat, self._scale, out=flat)
        for each, start, stop in zip(bucket.tensors, bucket.offsets[:-1], bucket.offsets[1:], strict=True):
            arrays[each].reshape(-1)[...] = flat[start:stop]


class _ShortInPlace(_InPlace):
    """The same for a short list in one step; its values lie in shared memory before the call is begun."""

    def __init__(self, ranks: Ranks, call: Call, plan: Plan, segment: SegmentAllReduce) -> None:
        super().__init__(ranks, call, plan)
        self._segment, self._control = segment, ranks.control
        self._flat = numpy.empty(plan.buckets[0].elements, plan.buckets[0].dtype)

    def fill(self, arrays: Sequence[Any]) -> bool:
        super().fill(arrays)
        numpy.concatenate(arrays, axis=None, out=self._segment.slot(self._control.call + 1))
        return True

    def move(self, watch: Watch, arrays: Sequence[Any]) -> Sequence[Any]:
        self._segment.combine(watch, self._flat)
        self._finish(self._flat, self._plan.buckets[0], arrays)
        return arrays


class _LongInPlace(_InPlace):
    """The same for other lists: bucket by bucket where the arrays lie, or packed and sent."""

    def __init__(
        self, ranks: Ranks, call: Call, plan: Plan, algorithm: str, reductions: Sequence[BucketReduction | None]
    ) -> None:
        super().__init__(ranks, call, plan)
        self._ranks, self._algorithm, self._reductions = ranks, algorithm, reductions
        self._scratch = Scratch()
        self._replays: dict[int, Replay] = {}

    def fill(self, arrays: Sequence[Any]) -> bool:
        """Return True; ValueError unless these are such arrays, in memory of their own: others were reduced twice."""
        super().fill(arrays)
        self._check_apart((each.__array_interface__["data"][0], each.nbytes) for each in arrays)
        return True

    def move(self, watch: Watch, arrays: Sequence[Any]) -> Sequence[Any]:
        for index, (bucket, reduction) in enumerate(zip(self._plan.buckets, self._reductions, strict=True)):
            members = [arrays[each] for each in bucket.tensors]
            if reduction is not None:
                reduction.run(watch, members, members)
            else:
                self._send(index, bucket, members, arrays, watch)
        return arrays

    def _send(self, index: int, bucket: Bucket, members: list[Any], arrays: Sequence[Any], watch: Watch) -> None:
        """Reduce a bucket over messages."""
        flat = self._scratch.array((bucket.elements,), bucket.dtype)
        numpy.concatenate(members, axis=None, out=flat)
        replay = self._replays.get(index)
        if replay is None:
            replay = self._ranks.bind(flat, self._plan.reduction, self._algorithm, is_example=True)
            self._replays[index] = replay
        replay(watch, flat)
        self._finish(flat, bucket, arrays)


class _DeviceInPlace(_InPlace):
    """The same for arrays in device memory: bucket by bucket, packed there."""

    def __init__(self, ranks: Ranks, call: Call, plan: Plan, algorithm: str, memory: DeviceMemory, kind: Any) -> None:
        super().__init__(ranks, call, plan)
        self._memory = memory
        self._packings = [memory.packing(bucket.offsets) for bucket in plan.buckets]
        self._flats = [arrays_of.empty(bucket.elements, bucket.dtype, kind) for bucket in plan.buckets]
        self._replays = [ranks.bind(flat, plan.reduction, algorithm) for flat in self._flats]

    def fill(self, arrays: Sequence[Any]) -> bool:
        """Return True; ValueError unless these are such arrays, in memory of their own: others were reduced twice."""
        super().fill(arrays)
        self._check_apart(self._memory.spans(arrays))
        self.enter(arrays)
        return True

    def enter(self, arrays: Sequence[Any]) -> None:
        """Begin work on the arrays.  Local."""
        self._memory.enter(arrays)

    def move(self, watch: Watch, arrays: Sequence[Any]) -> Sequence[Any]:
        parts = zip(self._plan.buckets, self._packings, self._flats, self._replays, strict=True)
        for bucket, packing, flat, replay in parts:
            members = [arrays[each] for each in bucket.tensors]
            packing.pack(members, flat)
            replay(watch)
            if self._scale is not None:
                arrays_of.namespace(flat).multiply(flat, self._scale, out=flat)
            packing.unpack(flat, members)
        return arrays
