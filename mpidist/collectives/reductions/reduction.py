"""The bound all-reduce of lists of tensors: a plan, a way for each bucket, an intake, and a sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.handle import Handle
from mpidist.collectives.persistent import Bound
from mpidist.collectives.reductions.intake import pack
from mpidist.collectives.reductions.plan import Bucket, Plan
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.messages import Replay
from mpidist.collectives.ways.scratch import Scratch
from mpidist.collectives.ways.selection import Way
from mpidist.collectives.ways.shared_memory import SegmentAllReduce
from mpidist.device.memory import DeviceMemory
from mpidist.runtime.control import Watch
from mpidist.runtime.trace_kinds import PACK

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: ``pack(tensors, out)`` copies tensors, one after the other in C order, into the flat `out`, converting to its dtype.
Pack = Callable[[Sequence[Any], Any], object]

#: About what a list holds for each tensor besides its values: how it is cut, and its name.
BYTES_PER_TENSOR = 1 << 10


class Ways(NamedTuple):
    """By what the buckets of a plan are reduced.

    Attributes
    ----------
    algorithm : str
    one_step : SegmentAllReduce or None
        What reduces the only bucket in one step through shared memory.
    reductions : list of BucketReduction or None
        By bucket: what reduces it where its tensors lie.  A bucket that has none is packed and sent.
    packs : list of callable
        By bucket.
    is_apart : bool
        Whether the values of what is sent lie apart from the results.
    """

    algorithm: str
    one_step: SegmentAllReduce | None
    reductions: list[BucketReduction | None]
    packs: list[Pack]
    is_apart: bool = False


def ways_of(
    ranks: Communicator,
    plan: Plan,
    way: Way,
    step: SegmentAllReduce | None,
    on_host: bool,
    memory: DeviceMemory | None,
    reduction: Callable[[Bucket], BucketReduction | None],
    is_apart: bool = False,
) -> Ways:
    """Return the ways of a plan's buckets; ``reduction(bucket)`` asks for the one that packs nothing.  Local."""
    is_direct = step is None and on_host
    reductions = [reduction(bucket) if is_direct else None for bucket in plan.buckets]
    packs: list[Pack] = [
        ranks.observer.function(PACK, pack) if memory is None else memory.packing(bucket.offsets).pack
        for bucket in plan.buckets
    ]
    return Ways(way.algorithm, step, reductions, packs, is_apart)


def one_step(
    ranks: Communicator, plan: Plan, way: Way, shape: tuple[int, ...] | None = None
) -> SegmentAllReduce | None:
    """Return the all-reduce of the only bucket in one step, if that is the way; of one array with its shape.  Local."""
    if way.algorithm != "shared_memory" or len(plan.buckets) != 1:
        return None
    (only,) = plan.buckets
    return ranks.small((only.elements,) if shape is None else shape, only.dtype, plan.reduction)


def scale_of(ranks: Communicator, op: str, postscale: float | None = None) -> float | None:
    """Return what the results of an operation are multiplied by.  Local."""
    scale = 1.0 / ranks.size if op == "mean" and ranks.size > 1 else None
    return scale if postscale is None else (1.0 if scale is None else scale) * postscale


class Intake(Protocol):
    """Which lists a reduction takes, and in which form.  All methods are Local."""

    def takes(self, tensors: Sequence[Any]) -> bool:
        """Whether the reduction is for such tensors; ValueError where it cannot be for any like them."""
        ...

    def pack(self, tensors: Sequence[Any], slot: Any) -> bool:
        """Put tensors where all ranks see them; return whether the reduction is for such tensors."""
        ...

    def in_order(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return tensors that it takes as C-contiguous ones."""
        ...


class ResultPlace(Protocol):
    """Where the results of one call go.

    Attributes
    ----------
    buffers : list of array
        By bucket: flat memory in the dtype in which it is reduced.
    """

    buffers: list[Any]

    def targets(self, index: int, members: Sequence[Any]) -> Sequence[Any]:
        """Return where a way that packs nothing writes bucket `index`, whose tensors are `members`."""
        ...

    def holds(self, index: int) -> bool:
        """Whether buffer `index` is where the values lie, so that nothing is packed."""
        ...

    def replay(self, index: int, bind: Callable[[Any, bool], Replay]) -> tuple[Replay, Any]:
        """Return what reduces buffer `index` over messages, and what it is to be given as buffer.

        ``bind(buffer, is_example)`` makes it once.
        """
        ...

    def finish(self, index: int, scale: float | None) -> None:
        """Make results of what lies in buffer `index`: multiplied by `scale`, in the caller's dtype."""

    def hand_out(self) -> Any:
        """Return what the caller gets."""


class Sink(Protocol):
    """What becomes of results: new arrays, or what was given."""

    def place(self, tensors: Sequence[Any]) -> ResultPlace:
        """Return where the results of a call with these tensors go.  Local."""
        ...

    def free(self) -> None:
        """Give back what is kept for results of later calls.  Local; at any time, also in the middle of a call."""


class BoundReduction(Bound):
    """The all-reduce of lists of tensors that are like one list.

    Parameters
    ----------
    ranks : Communicator
    call : Call
    plan : Plan
    ways : Ways
    intake : Intake
    sink : Sink
    memory : DeviceMemory, optional
        Of the tensors; by default the host's.
    prescale, scale : float, optional
        What values are multiplied by before, and results after the reduction.
    pack_checked : callable, optional
        In place of the intake's `pack`.

    Attributes
    ----------
    question : Question or None
        What new arrays were asked for by.
    """

    question: Any = None

    def __init__(
        self,
        ranks: Communicator,
        call: Call,
        plan: Plan,
        ways: Ways,
        intake: Intake,
        sink: Sink,
        memory: DeviceMemory | None = None,
        prescale: float | None = None,
        scale: float | None = None,
        pack_checked: Callable[[Sequence[Any], Any], bool] | None = None,
    ) -> None:
        super().__init__(ranks, call)
        self.nbytes = plan.nbytes + BYTES_PER_TENSOR * len(plan.signatures)
        self._ranks, self._control, self._plan, self._memory = ranks, ranks.control, plan, memory
        self._ways, self._one_step = ways, ways.one_step
        self._intake, self._pack = intake, pack_checked or intake.pack
        self._place_for, self._free = sink.place, sink.free
        self._prescale, self._scale = prescale, scale
        self._scratch = Scratch()
        self._multiplied: list[Any] = []
        # Taken before the call is begun: a rank that has no memory for it raises, and stays in step.
        self._place: Any = None

    def start(self, arrays: Any, timeout_seconds: float | None = None) -> Handle:
        """Take the collective's place in the order of calls; errors as for `Bound`, and for arrays that are unlike."""
        if not self._intake.takes(arrays):
            raise self.unlike(arrays)
        return super().start(arrays, timeout_seconds)

    def enter(self, arrays: Sequence[Any]) -> None:
        if self._memory is not None:
            self._memory.enter([each for each in arrays if each is not None])

    def fill(self, tensors: Sequence[Any]) -> bool:
        if self._one_step is None:
            if not self._intake.takes(tensors):
                return False
            self.enter(tensors)
        else:
            slot = self._one_step.slot(self._control.call + 1)
            if not self._pack(tensors, slot):
                return False
            if self._prescale is not None:
                numpy.multiply(slot, self._prescale, out=slot)
        self._place = self._place_for(tensors)
        return True

    def move(self, watch: Watch, tensors: Sequence[Any]) -> Any:
        place, self._place = self._place, None
        if self._one_step is None:
            self._reduce(watch, self._values(tensors), place)
        else:
            self._one_step.combine(watch, place.buffers[0])
            place.finish(0, self._scale)
        return place.hand_out()

    def forget(self) -> None:
        self._place = None

    def free_results(self) -> None:
        self._free()

    def _reduce(self, watch: Watch, tensors: Sequence[Any], place: ResultPlace) -> None:
        """Reduce bucket by bucket, where the tensors lie or packed."""
        reductions = self._ways.reductions
        for index, (bucket, reduction) in enumerate(zip(self._plan.buckets, reductions, strict=True)):
            members = tensors if len(reductions) == 1 else [tensors[each] for each in bucket.tensors]
            if reduction is not None:
                reduction.run(watch, members, place.targets(index, members))
            else:
                self._send(watch, index, members, place)
                place.finish(index, self._scale)

    def _send(self, watch: Watch, index: int, members: Sequence[Any], place: ResultPlace) -> None:
        """Reduce a bucket over messages, or by what its device has."""
        buffer, (replay, given) = place.buffers[index], place.replay(index, self._bind)
        if place.holds(index):
            replay(watch, given)
        elif not self._ways.is_apart:
            self._ways.packs[index](members, buffer)
            replay(watch, given)
        elif len(members) == 1 and members[0].dtype == buffer.dtype:
            replay(watch, given, members[0].reshape(-1))
        else:
            values = self._scratch.array(buffer.shape, buffer.dtype)
            self._ways.packs[index](members, values)
            replay(watch, given, values)

    def _bind(self, buffer: Any, is_example: bool) -> Replay:
        return self._ranks.bind(buffer, self._plan.reduction, self._ways.algorithm, is_example)

    def _values(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors as contiguous ones; multiplied, in the dtypes in which they are reduced, if need be."""
        tensors = self._intake.in_order(tensors)
        if self._prescale is None:
            return tensors
        if not self._multiplied:
            dtypes = {position: bucket.dtype for bucket in self._plan.buckets for position in bucket.tensors}
            self._multiplied = [arrays.empty(each.shape, dtypes[at], each) for at, each in enumerate(tensors)]
        for source, target in zip(tensors, self._multiplied, strict=True):
            arrays.namespace(target).multiply(source, self._prescale, out=target, dtype=target.dtype)
        return self._multiplied
