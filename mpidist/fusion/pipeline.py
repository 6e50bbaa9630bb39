"""Pack, reduce, hand out: a list of tensors reduced over all ranks by a cached plan.

The result lives where it was reduced: the tensors that the caller gets are views of a bucket's buffer.  The caller owns
them.  A set of buffers is used again only when nobody refers to any view of it any more, so that a training loop, which
drops its gradients every step, allocates nothing after the first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter, eq
from typing import Any, NamedTuple
from weakref import ref

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.contest import Calls
from mpidist.collectives.mismatch import OrdersDiffer
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.collectives.tracing import traced
from mpidist.collectives.ways import Way
from mpidist.errors import UnsupportedDtypeError
from mpidist.fusion.plan import Plan, build
from mpidist.fusion.plan_cache import PlanCache
from mpidist.fusion.results import ResultSet
from mpidist.fusion.rows import Rows
from mpidist.fusion.sources import Sources
from mpidist.runtime.trace import PACK

#: How many sets of buffers a plan keeps for another turn, the latest ones; who holds on to more results gets new memory
#: for each.
_KEPT_SETS = 3

#: About what a plan holds for each tensor besides its values: how it is cut, and its name.
_BYTES_PER_TENSOR = 1 << 10

#: A list of at least so many tensors, that are shorter on average than so many bytes, is told by shapes and dtypes
#: only: to look at their strides, too, would take longer than to copy those that are not contiguous.
_MANY, _SHORT_BYTES = 64, 1 << 14

_signature = attrgetter("dtype", "shape")
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


class Packed(NamedTuple):
    """Some reduced tensors of a list, one after the other in one flat array.

    Attributes
    ----------
    tensors : tuple of int
        Their positions in the list.
    offsets : tuple of int
        Where each begins in `values`, in C order; one more for the end.
    values : array, shape (n,)
        Good until the next call.
    """

    tensors: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Any


class FusedAllReduce:
    """All-reduce of lists of tensors, fused.

    Parameters
    ----------
    communicator : Communicator
    bytes_per_pack : int
        Size in bytes of a fused unit, 0 for the default.
    algorithm : str, optional
        As in `Communicator.all_reduce`.
    plans : PlanCache, optional
        For those who keep plans in common; by default its own.
    """

    def __init__(
        self,
        communicator: Communicator,
        bytes_per_pack: int = 0,
        algorithm: str | None = None,
        plans: PlanCache | None = None,
    ) -> None:
        self._communicator = communicator
        self._bytes_per_pack = bytes_per_pack
        self._algorithm = algorithm
        self.plans = PlanCache() if plans is None else plans
        self._recent: _Recent | None = None

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
        shared = self._in_shared_memory(tensors)
        if shared is not None:
            return shared.all_reduce(op, timeout_seconds)
        results, _ = self._reduced(tensors, op, names, timeout_seconds)
        return results.hand_out()

    def flat(
        self,
        tensors: Sequence[Any],
        op: str = "sum",
        names: Sequence[str] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Packed]:
        """Return what a call returns, as it lies in the buckets: for who is done with it before the next call.

        Collective; parameters and errors as for a call.
        """
        if self._in_shared_memory(tensors) is not None:
            return _apart(self(tensors, op, names, timeout_seconds))
        results, planned = self._reduced(tensors, op, names, timeout_seconds)
        return planned.packed(results)

    def _in_shared_memory(self, tensors: Sequence[Any]) -> Any:
        """Return the buffers in which these tensors lie, None if they are arrays like any other."""
        shared = self._communicator.in_shared_memory
        buffers = shared.get(id(tensors[0])) if shared and tensors else None
        return buffers if buffers is not None and buffers.holds(tensors) else None

    def _reduced(
        self, tensors: Sequence[Any], op: str, names: Sequence[str] | None, timeout_seconds: float | None
    ) -> tuple[ResultSet, _PlannedReduction]:
        again = self._quickly(tensors, op, names, timeout_seconds)
        if again is not None:
            return again
        planned, recent = None, self._recent
        if recent is not None and recent.is_asked_alike(tensors, op, names) and recent.is_for(tensors):
            planned = recent.planned()
        if planned is None:
            planned = self.plans.find(self._key(tensors, op, names))
        # Who takes its tensors in the order of their axes once does so for good: ranks then agree whatever they get.
        fits = planned is None or planned.fits(tensors)
        if planned is None or not fits:
            planned = self._plan(tensors, op, names, timeout_seconds, in_memory_order=fits)
        if planned.contest.is_due:
            self._communicator.settle(planned.contest, timeout_seconds)
        try:
            return self._run(planned, tensors, timeout_seconds), planned
        except OrdersDiffer:  # on all ranks
            planned = self._plan(tensors, op, names, timeout_seconds, in_memory_order=False)
            return self._run(planned, tensors, timeout_seconds), planned

    def _run(self, planned: _PlannedReduction, tensors: Sequence[Any], timeout_seconds: float | None) -> ResultSet:
        with self._communicator.control.turnstile:
            results = planned(tensors, timeout_seconds)
            self.plans.use(planned)
            return results

    def again(
        self,
        tensors: Sequence[Any],
        op: str = "sum",
        names: Sequence[str] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Any] | None:
        """Reduce a list of many short arrays if it is like the last one, which is seen while it is packed.

        Collective, parameters and errors as for a call; None, and nothing done, if it is not.
        """
        found = self._quickly(tensors, op, names, timeout_seconds)
        return None if found is None else found[0].hand_out()

    def _quickly(
        self, tensors: Sequence[Any], op: str, names: Sequence[str] | None, timeout_seconds: float | None
    ) -> tuple[ResultSet, _PlannedReduction] | None:
        if self.plans.basis is not self._communicator.choices:
            self.plans.clear(self._communicator.choices)
        recent, shared = self._recent, self._communicator.in_shared_memory
        if recent is None or not recent.is_asked_alike(tensors, op, names) or (shared and id(tensors[0]) in shared):
            return None
        planned = recent.planned()
        if planned is None:
            return None
        with self._communicator.control.turnstile:
            results = planned.quickly(tensors, timeout_seconds)
            if results is None:
                return None
            self.plans.use(planned)
            return results, planned

    def _key(self, tensors: Sequence[Any], op: str, names: Sequence[str] | None) -> Any:
        """Return what a plan is kept by: ranks have it in common, other than how their tensors lie in memory."""
        kinds = frozenset(map(type, tensors))
        asked = self._bytes_per_pack, self._algorithm, op, tuple(names) if names is not None else None
        return (*asked, kinds, *map(_signature, tensors))

    def _plan(
        self,
        tensors: Sequence[Any],
        op: str,
        names: Sequence[str] | None,
        timeout_seconds: float | None,
        in_memory_order: bool = True,
    ) -> _PlannedReduction:
        if names is not None and len(names) != len(tensors):
            raise ValueError(f"got {len(tensors)} tensors and {len(names)} names; give each tensor a name, or none")
        communicator = self._communicator
        _check_kinds(tensors, communicator)
        labels = names if names is not None else [""] * len(tensors)
        signatures = [(name, array.dtype, tuple(array.shape)) for name, array in zip(labels, tensors, strict=True)]
        on_host = not (tensors and arrays.is_device(tensors[0]))
        nbytes = sum(array.nbytes for array in tensors)
        communicator.prepare(nbytes, Call(f"all_reduce({op})", signatures), self._algorithm, on_host, timeout_seconds)
        plan = build(signatures, op, self._bytes_per_pack or communicator.bytes_per_pack(self._algorithm))
        any_strides = on_host and len(tensors) >= _MANY and nbytes < _SHORT_BYTES * len(tensors)
        sources = Sources([] if any_strides else tensors, in_memory_order)
        key = self._key(tensors, op, names)
        planned = _PlannedReduction(key, plan, communicator, self._algorithm, sources, tensors, any_strides)
        if any_strides:
            self._recent = _Recent(planned, tensors, op, names)
        return planned


class _Recent:
    """The last list of many short tensors, which the next one is compared with: that is quicker than to look it up.

    Attributes
    ----------
    planned : weakref
        Of its plan, which may have been dropped.
    """

    def __init__(
        self, planned: _PlannedReduction, tensors: Sequence[Any], op: str, names: Sequence[str] | None
    ) -> None:
        self.planned = ref(planned)
        self._op = op
        self._names = None if names is None else list(names)
        self._kinds = set(map(type, tensors))
        self._shapes, self._dtypes = list(map(_shape, tensors)), list(map(_dtype, tensors))
        self._only_dtype = set(self._dtypes) if len(set(self._dtypes)) == 1 else None

    def is_asked_alike(self, tensors: Sequence[Any], op: str, names: Sequence[str] | None) -> bool:
        """Whether the plan is one for so many tensors, reduced in that way and named like that."""
        return (
            len(tensors) == len(self._shapes)
            and op == self._op
            and (names if names is None else list(names)) == self._names
        )

    def is_for(self, tensors: Sequence[Any]) -> bool:
        """Whether the plan is one for so many tensors of these kinds, shapes and dtypes."""
        return (
            set(map(type, tensors)) == self._kinds
            and all(
                map(eq, map(_shape, tensors), self._shapes)
            )  # makes no list of new tuples: that takes twice as long
            and self._are_of_dtypes(tensors)
        )

    def _are_of_dtypes(self, tensors: Sequence[Any]) -> bool:
        if self._only_dtype is not None:
            return set(map(_dtype, tensors)) == self._only_dtype
        return list(map(_dtype, tensors)) == self._dtypes


class _PlannedReduction:
    """A plan with what it needs to run: the ways to reduce its buckets, and sets of buffers.

    No cycle of references leads back to it: its memory is free when it is dropped.

    Attributes
    ----------
    key, nbytes, last_call
        For the `PlanCache`.
    """

    def __init__(
        self,
        key: Any,
        plan: Plan,
        communicator: Communicator,
        algorithm: str | None,
        sources: Sources,
        tensors: Sequence[Any],
        takes_any_strides: bool,
    ) -> None:
        self.key = key
        self.nbytes = plan.nbytes + _BYTES_PER_TENSOR * len(plan.signatures)
        self._wire_bytes = max(1, plan.nbytes)
        self.last_call = 0
        self._plan = plan
        self._communicator = communicator
        self._pack = traced(communicator, PACK, _pack)
        self._sources = sources
        on_host = not (tensors and arrays.is_device(tensors[0]))
        # An empty array of the tensors' kind: no reference to a user's array is kept.
        self._kind = numpy.empty(0) if on_host else arrays.empty(0, tensors[0].dtype, tensors[0])
        self._scale = 1.0 / communicator.size if plan.op == "mean" and communicator.size > 1 else None
        self._sets: list[ResultSet] = []
        largest = max((bucket.nbytes for bucket in plan.buckets), default=0)
        ways = communicator.ways(largest, algorithm, on_host)
        self.contest = communicator.contest(ways, largest)
        self._segment = self._small(ways[0]) if on_host else None
        rows = None
        if takes_any_strides and self._segment is not None:
            rows = Rows.of(tensors, plan.buckets[0].dtype)
        self._pack_rows = None if rows is None else traced(communicator, PACK, rows.pack_arrays)
        in_place = on_host and self._segment is None
        self._ways = [_Way(plan, communicator, way, self._scale, in_place) for way in ways]
        self.calls = Calls(self.contest, partial(_call, plan, sources.orders))
        # In one step there is one way: no turns are taken, and no times.
        self._small_call = self.calls[0,]

    def fits(self, tensors: Sequence[Any]) -> bool:
        """Whether the plan is for tensors that lie in memory like these, whose shapes and dtypes are its own."""
        if not self._sources.are_like(tensors):
            sources = Sources(tensors, self._sources.in_memory_order)
            if sources.orders != self._sources.orders:
                return False
            self._sources = sources
        return True

    def _small(self, way: Way) -> SegmentAllReduce | None:
        """Return the all-reduce of the only bucket in one step, if that is the way."""
        if way.algorithm != "shared_memory" or len(self._plan.buckets) != 1:
            return None
        (only,) = self._plan.buckets
        return self._communicator.small(only.elements, only.dtype, self._plan.reduction)

    def __call__(self, tensors: Sequence[Any], timeout_seconds: float | None) -> ResultSet:
        tensors = self._sources.in_order(tensors)
        if self._segment is not None:
            return self._run_small(self._segment, tensors, timeout_seconds)
        results, members = self._free_set(), self._members(tensors)
        watch = self._communicator.begin(self.calls[self.contest.turns], timeout_seconds)
        way = self._ways[self._communicator.choose(self.contest, watch)]
        start = time.perf_counter()
        for index, (reduction, sources) in enumerate(zip(way.reductions, members, strict=True)):
            if reduction is not None:
                reduction.run(watch, sources, (results.results[index],))
            else:
                self._pack(sources, results.buffers[index])
                results.replay(index, self._communicator, self._plan.reduction, way.algorithm)(watch)
                results.finish(index, self._scale)
        self.contest.record(time.perf_counter() - start, self._wire_bytes)
        return results

    def _members(self, tensors: Sequence[Any]) -> list[Sequence[Any]]:
        """Return the tensors by bucket."""
        buckets = self._plan.buckets
        return [tensors] if len(buckets) == 1 else [[tensors[each] for each in bucket.tensors] for bucket in buckets]

    def quickly(self, tensors: Sequence[Any], timeout_seconds: float | None) -> ResultSet | None:
        """Reduce tensors of which nobody has looked whether the plan is for them, only whether they are as many.

        Collective: every rank calls it in the same order.  None, and nothing done, if the plan is not for them, or this
        is not the way.
        """
        segment, pack = self._segment, self._pack_rows
        if segment is None or pack is None or not pack(tensors, segment.slot(self._communicator.control.call + 1)):
            return None
        return self._combine_small(segment, timeout_seconds)

    def _run_small(self, segment: SegmentAllReduce, tensors: Sequence[Any], timeout_seconds: float | None) -> ResultSet:
        """Reduce the only bucket in one step; its values lie in shared memory before the call is begun."""
        (members,) = self._members(tensors)
        self._pack(members, segment.slot(self._communicator.control.call + 1))
        return self._combine_small(segment, timeout_seconds)

    def _combine_small(self, segment: SegmentAllReduce, timeout_seconds: float | None) -> ResultSet:
        results = self._free_set()
        watch = self._communicator.begin(self._small_call, timeout_seconds)
        segment.combine(watch, results.buffers[0])
        results.finish(0, self._scale)
        return results

    def packed(self, results: ResultSet) -> list[Packed]:
        """Return reduced buckets as they are; tensors one by one where axes lie in memory in another order."""
        if self._sources.orders:
            return _apart(results.hand_out())
        buckets = zip(self._plan.buckets, results.results, strict=True)
        return [Packed(bucket.tensors, bucket.offsets, values) for bucket, values in buckets]

    def _free_set(self) -> ResultSet:
        for results in self._sets:
            if results.is_free():
                return results
        results = ResultSet(self._plan, self._kind, self._sources.orders)
        results.settle()
        self._sets = [*self._sets, results][-_KEPT_SETS:]
        return results


class _Way:
    """A way bound to a plan: the reduction of each bucket.

    A bucket without one is packed and sent as messages.
    """

    def __init__(
        self,
        plan: Plan,
        communicator: Communicator,
        way: Way,
        scale: float | None,
        in_place: bool,
    ) -> None:
        self.algorithm = way.algorithm
        self.reductions: list[Any] = [None] * len(plan.buckets)
        for index, bucket in enumerate(plan.buckets if in_place else ()):
            sources, targets = Pieces(bucket.offsets), Pieces((0, bucket.elements))
            dtypes = (plan.signatures[bucket.tensors[0]][1], bucket.dtype, bucket.result)
            self.reductions[index] = communicator.reduction(way, sources, targets, dtypes, plan.reduction, scale)


def _call(plan: Plan, orders: Mapping[int, Sequence[int]], label: str) -> Call:
    """Return the call by ways of that label, which all ranks must make alike."""
    packs = [(label, bucket.nbytes) for bucket in plan.buckets]
    return Call(f"all_reduce({plan.op})", plan.signatures, packs, orders)


def _apart(tensors: Sequence[Any]) -> list[Packed]:
    """Return each of some tensors flat, by itself."""
    return [Packed((position,), (0, each.size), each.reshape(-1)) for position, each in enumerate(tensors)]


def _check_kinds(tensors: Sequence[Any], communicator: Communicator) -> None:
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
    if communicator.size > 1 and tensors:
        arrays.check_memory(tensors[0], communicator.transport.memory, communicator.transport.name)


def _pack(tensors: Sequence[Any], out: Any) -> None:
    """Copy tensors, one after the other in C order, into the flat `out`, converting to its dtype."""
    if len(tensors) == 1:
        out[...] = tensors[0].reshape(-1)
    elif tensors:
        arrays.namespace(out).concatenate(tensors, axis=None, out=out)
