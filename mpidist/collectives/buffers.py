"""The all-reduce of one buffer in place, bound to its shape and dtype."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist.arrays import is_device, wire_dtype
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.call import Call
from mpidist.collectives.messages import Replay
from mpidist.collectives.persistent import Bound
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.ranks import Ranks
from mpidist.collectives.selection import Way
from mpidist.collectives.shared_memory import SegmentAllReduce
from mpidist.device.memory import DeviceMemory, memory_of
from mpidist.runtime.control import Watch


def bind_buffer(ranks: Ranks, buffer: Any, op: str, algorithm: str | None, timeout_seconds: float | None) -> Bound:
    """Return the all-reduce of flat buffers that have the size and the dtype of this one.

    Collective: every rank calls it in the same order.
    """
    wire, on_host = wire_dtype(buffer.dtype), not is_device(buffer)
    name, tensors, nbytes = f"all_reduce({op})", [("", buffer.dtype, buffer.shape)], buffer.size * wire.itemsize
    ranks.prepare(Call(name, tensors), algorithm, timeout_seconds)
    way = ranks.way(nbytes, algorithm, on_host)
    call = Call(name, tensors, [(way.label, nbytes)])
    if way.algorithm == "shared_memory" and wire == buffer.dtype:
        segment = ranks.small((buffer.size,), wire, op)
        if segment is not None:
            return _ShortBuffer(ranks, call, segment)
    pieces = Pieces((0, buffer.size))
    dtypes = (buffer.dtype, wire, buffer.dtype)
    reduction = ranks.reduction(way, pieces, pieces, dtypes, op) if on_host else None
    if reduction is not None:
        return _LongBuffer(ranks, call, reduction)
    return _SentBuffer(ranks, call, way, op, memory_of(buffer))


class _ShortBuffer(Bound):
    """The all-reduce of a short buffer in one step through shared memory."""

    def __init__(self, ranks: Ranks, call: Call, segment: SegmentAllReduce) -> None:
        super().__init__(ranks, call)
        self._segment = segment
        self._control = ranks.control

    def fill(self, flat: Any) -> bool:
        numpy.copyto(self._segment.slot(self._control.call + 1), flat)
        return True

    def move(self, watch: Watch, flat: Any) -> None:
        self._segment.combine(watch, flat)


class _LongBuffer(Bound):
    """The all-reduce of a buffer where it lies, segment by segment."""

    def __init__(self, ranks: Ranks, call: Call, reduction: BucketReduction) -> None:
        super().__init__(ranks, call)
        self._reduction = reduction

    def move(self, watch: Watch, flat: Any) -> None:
        self._reduction.run(watch, (flat,), (flat,))


class _SentBuffer(Bound):
    """The all-reduce of a buffer over messages."""

    def __init__(self, ranks: Ranks, call: Call, way: Way, op: str, memory: DeviceMemory | None) -> None:
        super().__init__(ranks, call)
        self._ranks, self._way, self._op, self._memory = ranks, way, op, memory
        self._replay: Replay | None = None

    def fill(self, flat: Any) -> bool:
        if self._memory is not None:
            self._memory.enter((flat,))
        return True

    def move(self, watch: Watch, flat: Any) -> None:
        wire = wire_dtype(flat.dtype)
        work = flat if wire == flat.dtype else flat.astype(wire)
        if self._replay is None:
            self._replay = self._ranks.bind(work, self._op, self._way.algorithm, is_example=True)
        self._replay(watch, work)
        if work is not flat:
            flat[...] = work
