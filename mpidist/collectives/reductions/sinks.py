"""Where results of bound reductions go: into new arrays that are the caller's, or in place of the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.kept_memory import KeptMemory
from mpidist.collectives.reductions.adjustment import Zeros
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
    is_packed : bool
        Whether they are handed out as they were packed.
    zeros : Zeros, optional
        What stood in for tensors that are None.
    """

    def __init__(self, plan: Plan, like: ListIntake, is_packed: bool, zeros: Zeros | None = None) -> None:
        self._plan, self._like, self._is_packed, self._zeros = plan, like, is_packed, zeros
        self._memory, self._nbytes = KeptMemory(_KEPT_SETS), plan.nbytes
        self.free = self._memory.free

    def place(self, tensors: Sequence[Any]) -> ResultSet:
        """Return buffers to whose results nobody refers.  Local."""
        results = self._memory.take(self._nbytes)
        if results is not None:
            return results
        like = self._plan, self._like.kind, self._like.sources.orders
        if self._zeros is None:
            return self._memory.keep(ResultSet(*like, is_packed=self._is_packed))
        return self._memory.keep(_OptionalResults(self._zeros, *like))


class _OptionalResults(ResultSet):
    """Results of lists in which tensors may be None."""

    def __init__(self, zeros: Zeros, *like: Any) -> None:
        super().__init__(*like)
        self._zeros = zeros

    def hand_out(self) -> list[Any]:
        """Return the results, None where all ranks had None."""
        return self._zeros.emptied(super().hand_out())


class InPlaceSink:
    """Results in place of the values.

    Parameters
    ----------
    are_packed : sequence of bool
        By bucket, whether it is reduced in a flat buffer.
    memory : DeviceMemory or None
        None for the host's.
    kind : array or None
        Of whose kind the buffers of a device are.

    Attributes
    ----------
    packings : list of Packing or None
        By bucket, for arrays of a device.
    alone : dict of int to int
        By bucket that is one array, reduced in its own dtype, and so is its own buffer: the position of that array.
    buffers : list of array or None
        By bucket, for those that have one here.
    """

    def __init__(self, plan: Plan, are_packed: Sequence[bool], memory: DeviceMemory | None, kind: Any) -> None:
        self.plan = plan
        self.packings = None if memory is None else [memory.packing(bucket.offsets) for bucket in plan.buckets]
        self.alone = {
            index: bucket.tensors[0]
            for index, (bucket, is_packed) in enumerate(zip(plan.buckets, are_packed, strict=True))
            if is_packed and len(bucket.tensors) == 1 and plan.signatures[bucket.tensors[0]][1] == bucket.dtype
        }
        wanted = [is_packed and index not in self.alone for index, is_packed in enumerate(are_packed)]
        self.buffers = _buffers(plan, wanted, kind)
        self.replays: dict[int, Replay] = {}

    def place(self, tensors: Sequence[Any]) -> _InPlace:
        """Return these tensors as the place of results.  Local."""
        return _InPlace(self, tensors)

    def free(self) -> None:
        """Do nothing: no results are kept.  Local."""


class _InPlace:
    """The `ResultPlace` of one call: the tensors that it was given."""

    def __init__(self, sink: InPlaceSink, tensors: Sequence[Any]) -> None:
        self._sink, self._tensors = sink, tensors
        self.buffers = list(sink.buffers)
        for index, position in sink.alone.items():
            self.buffers[index] = tensors[position].reshape(-1)

    def targets(self, index: int, members: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors of a bucket."""
        return members

    def holds(self, index: int) -> bool:
        """Whether a bucket lies in its buffer."""
        return index in self._sink.alone

    def replay(self, index: int, bind: Callable[[Any, bool], Replay]) -> tuple[Replay, Any]:
        """Return what reduces buffers like `index` over messages, and that buffer."""
        replays, buffer = self._sink.replays, self.buffers[index]
        if index not in replays:
            replays[index] = bind(buffer, True)
        return replays[index], buffer

    def finish(self, index: int, scale: float | None) -> None:
        """Put the reduced values of a bucket where they belong."""
        flat, bucket, tensors = self.buffers[index], self._sink.plan.buckets[index], self._tensors
        if scale is not None:
            arrays.namespace(flat).multiply(flat, scale, out=flat)
        if index in self._sink.alone:
            return
        packings = self._sink.packings
        if packings is not None:
            packings[index].unpack(flat, [tensors[each] for each in bucket.tensors])
            return
        for each, start, stop in zip(bucket.tensors, bucket.offsets[:-1], bucket.offsets[1:], strict=True):
            tensors[each].reshape(-1)[...] = flat[start:stop]

    def hand_out(self) -> Sequence[Any]:
        """Return the tensors."""
        return self._tensors


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
