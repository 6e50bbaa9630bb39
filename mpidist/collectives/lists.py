"""The all-reduce of a list of tensors, bound: one short array, short lists in one step, long ones piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, eq
from typing import Any, NamedTuple

import numpy

from mpidist import arrays
from mpidist.collectives.adjustment import check_factors
from mpidist.collectives.call import Call
from mpidist.collectives.messages import Replay
from mpidist.collectives.mismatch import fact
from mpidist.collectives.persistent import Bound, Handle
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.plan import Plan, build
from mpidist.collectives.ranks import Ranks
from mpidist.collectives.results import ResultSet
from mpidist.collectives.rows import Rows
from mpidist.collectives.scratch import Scratch
from mpidist.collectives.selection import Way
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.collectives.sources import Sources
from mpidist.device.memory import memory_of
from mpidist.errors import UnsupportedDtypeError
from mpidist.runtime.control import Watch
from mpidist.runtime.trace import PACK

#: How many sets of buffers a list keeps for another turn, the latest ones; who holds on to more results gets new memory
#: for each.
_KEPT_SETS = 3

#: About what a list holds for each tensor besides its values: how it is cut, and its name.
_BYTES_PER_TENSOR = 1 << 10

#: A list of at least so many tensors, that are shorter on average than so many bytes, is told by shapes and dtypes
#: only: to look at their strides, too, would take longer than to copy those that are not contiguous.
_MANY, _SHORT_BYTES = 64, 1 << 14

_signature = attrgetter("dtype", "shape")
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


class Packed(NamedTuple):
    """Reduced tensors of one dtype that lie one after the other, each in the order of its axes.

    Attributes
    ----------
    tensors : tuple of int
        Their positions in the list.
    offsets : tuple of int
        Where each begins, in elements; one more for the end.
    values : array, shape (elements,)
        The next call writes to it.
    """

    tensors: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Any


class Question(NamedTuple):
    """What is asked for besides the tensors themselves.

    Attributes
    ----------
    op : str
    names : tuple of str or None
    bytes_per_pack : int
        0 for the default.
    algorithm : str or None
    is_packed : bool
        Whether the results are wanted as `Packed`.
    prescale, postscale : float or None
        What values are multiplied by before they are reduced, and what results are multiplied by.
    """

    op: str
    names: tuple[str, ...] | None = None
    bytes_per_pack: int = 0
    algorithm: str | None = None
    is_packed: bool = False
    prescale: float | None = None
    postscale: float | None = None

    def key(self, tensors: Sequence[Any]) -> Any:
        """Return what a bound list is kept by: ranks have it in common, other than how their tensors lie in memory."""
        return (*self, frozenset(map(type, tensors)), *map(_signature, tensors))


def bind_list(
    ranks: Ranks,
    tensors: Sequence[Any],
    question: Question,
    timeout_seconds: float | None = None,
    in_memory_order: bool = True,
    any_strides: bool = False,
) -> BoundList:
    """Return the all-reduce of lists like this one; no reference to the tensors is kept.

    Parameters
    ----------
    ranks : Ranks
    tensors : sequence of array
    question : Question
    timeout_seconds : float, optional
    in_memory_order : bool
        Whether a tensor may be taken in the order in which its axes lie in memory.
    any_strides : bool
        Whether lists that lie in memory otherwise are taken, too; a list of many short tensors is in any case.
    """
    names = question.names
    if names is not None and len(names) != len(tensors):
        raise ValueError(f"got {len(tensors)} tensors and {len(names)} names; give each tensor a name, or none")
    _check_kinds(tensors, ranks)
    labels = names if names is not None else [""] * len(tensors)
    signatures = [(name, array.dtype, tuple(array.shape)) for name, array in zip(labels, tensors, strict=True)]
    on_host = not (tensors and arrays.is_device(tensors[0]))
    nbytes = sum(array.nbytes for array in tensors)
    ranks.prepare(Call(f"all_reduce({question.op})", signatures), question.algorithm, timeout_seconds)
    plan = build(signatures, question.op, question.bytes_per_pack or ranks.bytes_per_pack(question.algorithm, on_host))
    multiplied = [(plan.signatures[each.tensors[0]][1], each.dtype) for each in plan.buckets]
    check_factors(question.prescale, question.postscale, multiplied, question.op)
    way = ranks.way(max((bucket.nbytes for bucket in plan.buckets), default=0), question.algorithm, on_host)
    is_array = len(tensors) == 1 and nbytes <= _SHORT_BYTES and not question.is_packed
    is_array = is_array and {tensors[0].dtype} == {plan.buckets[0].dtype, plan.buckets[0].result}
    segment = _segment(ranks, plan, way, tensors[0].shape if is_array else None) if on_host else None
    is_array = is_array and segment is not None
    any_strides |= is_array or (len(tensors) >= _MANY and nbytes < _SHORT_BYTES * len(tensors))
    any_strides &= on_host  # a device packs memory as it lies
    like = _Like(tensors, any_strides, in_memory_order and not question.is_packed)
    call = _call(plan, like.sources.orders, way, question)
    if segment is None:
        return _LongList(ranks, call, question, plan, like, way)
    if is_array:
        return _ShortArray(ranks, call, question, plan, like, segment)
    rows = Rows.of(tensors, plan.buckets[0].dtype) if any_strides else None
    return _ShortList(ranks, call, question, plan, like, segment, rows)


class _Like:
    """Which lists are like the one that an all-reduce was bound for.

    Attributes
    ----------
    sources : Sources
        How tensors become contiguous ones.
    kind : array
        An empty array of the tensors' kind.
    """

    def __init__(self, tensors: Sequence[Any], any_strides: bool, in_memory_order: bool) -> None:
        self.sources = Sources([] if any_strides else tensors, in_memory_order)
        on_host = not (tensors and arrays.is_device(tensors[0]))
        self.kind = numpy.empty(0) if on_host else arrays.empty(0, tensors[0].dtype, tensors[0])
        self.any_strides = any_strides
        self._count = len(tensors)
        self._kinds = set(map(type, tensors))
        self._shapes, self._dtypes = list(map(_shape, tensors)), list(map(_dtype, tensors))
        self._only_dtype = set(self._dtypes) if len(set(self._dtypes)) == 1 else None

    def __call__(self, tensors: Sequence[Any]) -> bool:
        """Whether tensors are of the same kind, shapes and dtypes, and lie in memory alike.  Local."""
        return (
            len(tensors) == self._count
            and set(map(type, tensors)) == self._kinds
            and all(map(eq, map(_shape, tensors), self._shapes))  # makes no list of tuples: that takes twice as long
            and self._are_of_dtypes(tensors)
            and (self.any_strides or self._lie_alike(tensors))
        )

    def _are_of_dtypes(self, tensors: Sequence[Any]) -> bool:
        if self._only_dtype is not None:
            return set(map(_dtype, tensors)) == self._only_dtype
        return list(map(_dtype, tensors)) == self._dtypes

    def _lie_alike(self, tensors: Sequence[Any]) -> bool:
        if not self.sources.are_like(tensors):
            sources = Sources(tensors, self.sources.in_memory_order)
            if sources.orders != self.sources.orders:
                return False
            self.sources = sources
        return True


class BoundList(Bound):
    """The all-reduce of lists of tensors that are like one list.

    Attributes
    ----------
    question : Question
    """

    def __init__(self, ranks: Ranks, call: Call, question: Question, plan: Plan, like: _Like) -> None:
        super().__init__(ranks, call)
        self.question = question
        self.nbytes = plan.nbytes + _BYTES_PER_TENSOR * len(plan.signatures)
        self._plan = plan
        self._like = like
        self._scale = 1.0 / ranks.size if plan.op == "mean" and ranks.size > 1 else None
        if question.postscale is not None:
            self._scale = (1.0 if self._scale is None else self._scale) * question.postscale
        self._prescale = question.prescale
        self._pack = ranks.traced(PACK, _pack)
        self._sets: list[ResultSet] = []
        # Taken before the call is begun: a rank that has no memory for it raises, and stays in step.
        self._next_set: Any = None

    def start(self, arrays: Any, timeout_seconds: float | None = None) -> Handle:
        """Take the collective's place in the order of calls; errors as for `Bound`, and for arrays that are unlike."""
        if not self._like(arrays):
            raise self.unlike(arrays)
        return super().start(arrays, timeout_seconds)

    def _free_set(self) -> ResultSet:
        """Return buffers to whose results nobody refers."""
        for results in self._sets:
            if results.is_free():
                return results
        results = ResultSet(self._plan, self._like.kind, self._like.sources.orders)
        results.settle()
        self._sets = [*self._sets, results][-_KEPT_SETS:]
        return results

    def _given(self, results: ResultSet) -> list[Any]:
        """Return what the caller gets."""
        if not self.question.is_packed:
            return results.hand_out()
        pairs = zip(self._plan.buckets, results.results, strict=True)
        return [Packed(bucket.tensors, bucket.offsets, values) for bucket, values in pairs]


class _ShortArray(BoundList):
    """The all-reduce of one short array in one step through shared memory; the result is an array of its own."""

    def __init__(
        self, ranks: Ranks, call: Call, question: Question, plan: Plan, like: _Like, segment: SegmentAllReduce
    ) -> None:
        super().__init__(ranks, call, question, plan, like)
        self._slot, self._combine, self._control = segment.slot, segment.combine, ranks.control
        (_, self._dtype, self._shape), *_ = plan.signatures

    def fill(self, tensors: Sequence[Any]) -> bool:
        (array,) = tensors
        if type(array) is not numpy.ndarray or array.shape != self._shape:
            return False
        if array.dtype is not self._dtype and array.dtype != self._dtype:  # mostly the same object
            return False
        slot = self._slot(self._control.call + 1)
        slot[...] = array
        if self._prescale is not None:
            numpy.multiply(slot, self._prescale, out=slot)
        return True

    def move(self, watch: Watch, tensors: Sequence[Any]) -> list[Any]:
        out = numpy.empty(self._shape, self._dtype)
        self._combine(watch, out)
        if self._scale is not None:
            numpy.multiply(out, self._scale, out=out)
        return [out]


class _ShortList(BoundList):
    """The all-reduce of a short list in one step; its values lie in shared memory before the call is begun."""

    def __init__(
        self,
        ranks: Ranks,
        call: Call,
        question: Question,
        plan: Plan,
        like: _Like,
        segment: SegmentAllReduce,
        rows: Rows | None,
    ) -> None:
        super().__init__(ranks, call, question, plan, like)
        self._segment, self._control = segment, ranks.control
        self._pack_rows = None if rows is None else ranks.traced(PACK, rows.pack_arrays)

    def fill(self, tensors: Sequence[Any]) -> bool:
        slot = self._segment.slot(self._control.call + 1)
        if self._pack_rows is not None:
            if not self._pack_rows(tensors, slot):
                return False
        elif self._like(tensors):
            self._pack(self._like.sources.in_order(tensors), slot)
        else:
            return False
        if self._prescale is not None:
            numpy.multiply(slot, self._prescale, out=slot)
        self._next_set = self._free_set()
        return True

    def move(self, watch: Watch, tensors: Sequence[Any]) -> list[Any]:
        results = self._next_set
        self._segment.combine(watch, results.buffers[0])
        results.finish(0, self._scale)
        return self._given(results)


class _LongList(BoundList):
    """The all-reduce of a list where its tensors lie, or packed into buckets that are sent."""

    def __init__(self, ranks: Ranks, call: Call, question: Question, plan: Plan, like: _Like, way: Way) -> None:
        super().__init__(ranks, call, question, plan, like)
        self._ranks, self._way = ranks, way
        self._scratch = Scratch()
        self._scaled: list[Any] = []
        # Long tensors that may lie anyhow: a span of one that is not contiguous would be found by copying all of it.
        on_host = isinstance(like.kind, numpy.ndarray)
        self._memory = None if on_host else memory_of(like.kind)
        self._packings = [] if self._memory is None else [self._memory.packing(each.offsets) for each in plan.buckets]
        self._is_loose = on_host and like.any_strides and plan.nbytes >= _SHORT_BYTES * len(plan.signatures)
        self._reductions = [self._reduction(index) if on_host else None for index in range(len(plan.buckets))]
        # MPI's own all-reduce is quicker where values and results lie apart.
        self._is_apart = on_host and way.algorithm == "native"

    def _reduction(self, index: int) -> Any:
        """Return the reduction of a bucket; a bucket without one is packed and sent as messages."""
        bucket, plan = self._plan.buckets[index], self._plan
        sources, targets = Pieces(bucket.offsets), Pieces((0, bucket.elements))
        own = plan.signatures[bucket.tensors[0]][1] if self._prescale is None else bucket.dtype
        dtypes = (own, bucket.dtype, bucket.result)
        return self._ranks.reduction(self._way, sources, targets, dtypes, plan.reduction, self._scale)

    def enter(self, tensors: Sequence[Any]) -> None:
        if self._memory is not None:
            self._memory.enter(tensors)

    def fill(self, tensors: Sequence[Any]) -> bool:
        if not self._like(tensors):
            return False
        self.enter(tensors)
        self._next_set = self._free_set()
        return True

    def move(self, watch: Watch, tensors: Sequence[Any]) -> list[Any]:
        tensors, results = self._like.sources.in_order(tensors), self._next_set
        if self._is_loose:
            tensors = [each if each.flags.c_contiguous else numpy.ascontiguousarray(each) for each in tensors]
        if self._prescale is not None:
            tensors = self._times_prescale(tensors, self._prescale)
        for index, (bucket, reduction) in enumerate(zip(self._plan.buckets, self._reductions, strict=True)):
            members = tensors if len(self._reductions) == 1 else [tensors[each] for each in bucket.tensors]
            if reduction is not None:
                reduction.run(watch, members, (results.results[index],))
            else:
                self._send(index, members, results, watch)
        return self._given(results)

    def _times_prescale(self, tensors: Sequence[Any], factor: float) -> list[Any]:
        """Return copies of the tensors in the dtypes in which they are reduced, multiplied."""
        if not self._scaled:
            dtypes = {position: bucket.dtype for bucket in self._plan.buckets for position in bucket.tensors}
            self._scaled = [arrays.empty(each.shape, dtypes[at], each) for at, each in enumerate(tensors)]
        for source, target in zip(tensors, self._scaled, strict=True):
            arrays.namespace(target).multiply(source, factor, out=target, dtype=target.dtype)
        return self._scaled

    def _send(self, index: int, members: Sequence[Any], results: ResultSet, watch: Watch) -> None:
        """Reduce a bucket over messages."""
        buffer, replay = results.buffers[index], results.replay(index, self._replay_of)
        if not self._is_apart:
            pack = self._packings[index].pack if self._packings else self._pack
            pack(members, buffer)
            replay(watch)
        elif len(members) == 1 and members[0].dtype == buffer.dtype:
            replay(watch, None, members[0].reshape(-1))
        else:
            source = self._scratch.array(buffer.shape, buffer.dtype)
            self._pack(members, source)
            replay(watch, None, source)
        results.finish(index, self._scale)

    def _replay_of(self, buffer: Any) -> Replay:
        return self._ranks.bind(buffer, self._plan.reduction, self._way.algorithm)


def _segment(ranks: Ranks, plan: Plan, way: Way, shape: tuple[int, ...] | None) -> SegmentAllReduce | None:
    """Return the all-reduce of the only bucket in one step, if that is the way; of one array with its shape."""
    if way.algorithm != "shared_memory" or len(plan.buckets) != 1:
        return None
    (only,) = plan.buckets
    return ranks.small((only.elements,) if shape is None else shape, only.dtype, plan.reduction)


def _call(plan: Plan, orders: Mapping[int, Sequence[int]], way: Way, question: Question) -> Call:
    """Return the call, which all ranks must make alike."""
    packs = [(way.label, bucket.nbytes) for bucket in plan.buckets]
    scales = {"prescale": question.prescale, "postscale": question.postscale}
    facts = [fact(what, value) for what, value in scales.items() if value is not None]
    return Call(f"all_reduce({plan.op})", [*plan.signatures, *facts], packs, orders)


def _check_kinds(tensors: Sequence[Any], ranks: Ranks) -> None:
    """Raise, before any communication, unless all tensors are of one kind that the transport can move.

    Subclasses of NumPy's arrays, which `arrays.plain` takes care of, may be cut in another way.
    """
    if odd := [type(tensor).__name__ for tensor in tensors if arrays.plain(tensor) is not tensor]:
        raise TypeError(f"a list to be reduced has plain arrays only, got a {odd[0]}; pass numpy.asarray(array)")
    kinds = {arrays.kind_of(tensor).name for tensor in tensors}
    if len(kinds) > 1:
        raise UnsupportedDtypeError(
            f"a list to be reduced together must be of one kind of arrays, got {', '.join(sorted(kinds))}; "
            "reduce each kind in a call of its own"
        )
    if ranks.size > 1 and tensors and ranks.devices.memory(tensors[0]) is None:
        arrays.check_memory(tensors[0], ranks.transport.memory, ranks.transport.name)


def _pack(tensors: Sequence[Any], out: Any) -> None:
    """Copy tensors, one after the other in C order, into the flat `out`, converting to its dtype."""
    if len(tensors) == 1:
        out[...] = tensors[0].reshape(-1)
    elif tensors:
        arrays.namespace(out).concatenate(tensors, axis=None, out=out)
