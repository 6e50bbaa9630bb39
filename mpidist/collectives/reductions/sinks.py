"""Where results of bound reductions go: into new arrays that are the caller's, or in place of the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.reductions.intake import ListIntake
from mpidist.collectives.reductions.plan import Plan
from mpidist.collectives.reductions.results import ResultSet
from mpidist.collectives.ways.messages import Replay
from mpidist.device.memory import DeviceMemory

#: How many sets of buffers a list keeps for another turn, the latest ones; who holds on to more results gets new memory
#: for each.
_KEPT_SETS = 3


class ResultSink:
    """Results in new arrays.

    Parameters
    ----------
    plan : Plan
    like : ListIntake
    is_packed : bool
        Whether they are handed out as they were packed.
    """

    def __init__(self, plan: Plan, like: ListIntake, is_packed: bool) -> None:
        self._plan, self._like, self._is_packed = plan, like, is_packed
        self._sets: list[ResultSet] = []

    def place(self, tensors: Sequence[Any]) -> ResultSet:
        """Return buffers to whose results nobody refers.  Local."""
        for results in self._sets:
            if results.is_free():
                return results
        results = ResultSet(self._plan, self._like.kind, self._like.sources.orders, is_packed=self._is_packed)
        results.settle()
        self._sets = [*self._sets, results][-_KEPT_SETS:]
        return results


class InPlaceSink:
    """Results in place of the values; also the `ResultPlace` of the call that is under way.

    Parameters
    ----------
    plan : Plan
    are_packed : sequence of bool
        By bucket, whether it is reduced in a flat buffer.
    memory : DeviceMemory or None
        None for the host's.
    kind : array or None
        Of whose kind the buffers of a device are.
    """

    def __init__(self, plan: Plan, are_packed: Sequence[bool], memory: DeviceMemory | None, kind: Any) -> None:
        self._plan = plan
        self._packings = None if memory is None else [memory.packing(bucket.offsets) for bucket in plan.buckets]
        # A bucket of one array, which is reduced in its own dtype, is its own buffer.
        self._alone = [
            packed and len(bucket.tensors) == 1 and plan.signatures[bucket.tensors[0]][1] == bucket.dtype
            for bucket, packed in zip(plan.buckets, are_packed, strict=True)
        ]
        self.buffers = _buffers(plan, [a and not b for a, b in zip(are_packed, self._alone, strict=True)], kind)
        self._replays: dict[int, Replay] = {}
        self._tensors: Sequence[Any] = ()

    def place(self, tensors: Sequence[Any]) -> InPlaceSink:
        """Return this sink, for these tensors.  Local."""
        self._tensors = tensors
        for index, is_alone in enumerate(self._alone):
            if is_alone:
                self.buffers[index] = tensors[self._plan.buckets[index].tensors[0]].reshape(-1)
        return self

    def targets(self, index: int, members: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors of a bucket."""
        return members

    def holds(self, index: int) -> bool:
        """Whether a bucket lies in its buffer."""
        return self._alone[index]

    def replay(self, index: int, bind: Callable[[Any, bool], Replay]) -> tuple[Replay, Any]:
        """Return what reduces buffers like `index` over messages, and that buffer."""
        if index not in self._replays:
            self._replays[index] = bind(self.buffers[index], True)
        return self._replays[index], self.buffers[index]

    def finish(self, index: int, scale: float | None) -> None:
        """Put the reduced values of a bucket where they belong."""
        flat, bucket, tensors = self.buffers[index], self._plan.buckets[index], self._tensors
        if scale is not None:
            arrays.namespace(flat).multiply(flat, scale, out=flat)
        if self._alone[index]:
            return
        if self._packings is not None:
            self._packings[index].unpack(flat, [tensors[each] for each in bucket.tensors])
            return
        for each, start, stop in zip(bucket.tensors, bucket.offsets[:-1], bucket.offsets[1:], strict=True):
            tensors[each].reshape(-1)[...] = flat[start:stop]

    def hand_out(self) -> Sequence[Any]:
        """Return the tensors, which are not kept."""
        tensors, self._tensors = self._tensors, ()
        for index, is_alone in enumerate(self._alone):
            if is_alone:
                self.buffers[index] = None
        return tensors


def _buffers(plan: Plan, wanted: Sequence[bool], kind: Any) -> list[Any]:
    """Return a flat array for each bucket that wants one: on the host one piece of memory for all, used in turn."""
    if kind is not None and arrays.is_device(kind):
        pairs = zip(plan.buckets, wanted, strict=True)
        return [arrays.empty(each.elements, each.dtype, kind) if is_wanted else None for each, is_wanted in pairs]
    nbytes = [bucket.nbytes if is_wanted else 0 for bucket, is_wanted in zip(plan.buckets, wanted, strict=True)]
    memory = numpy.empty(max(nbytes, default=0), numpy.uint8)
    return [
        memory[:count].view(bucket.dtype) if is_wanted else None
        for bucket, is_wanted, count in zip(plan.buckets, wanted, nbytes, strict=True)
    ]
