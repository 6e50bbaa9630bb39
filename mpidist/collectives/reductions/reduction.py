"""The bound all-reduce of lists of tensors: a plan, a way for each bucket, an intake, and a sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.handle import Handle
from mpidist.collectives.persistent import Bound
from mpidist.collectives.reductions.intake import Intake
from mpidist.collectives.reductions.plan import Plan
from mpidist.collectives.reductions.results import ResultSet
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.selection import Way
from mpidist.device.memory import DeviceMemory, kept_empty
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: About what a list holds for each tensor besides its values: how it is cut, and its name.
BYTES_PER_TENSOR = 1 << 10


def one_step(
    ranks: Communicator,
    plan: Plan,
    way: Way,
    targets: Sequence[Pieces],
    scale: float | None,
    shape: tuple[int, ...] | None = None,
) -> BucketReduction | None:
    """Return the all-reduce of the only bucket in one step, if that is the way; of one array with its shape.  Local.

    `targets` are by bucket.
    """
    if way.algorithm != "shared_memory" or len(plan.buckets) != 1:
        return None
    (only,) = plan.buckets
    is_flat = len(only.tensors) == 1 or targets[0].is_single
    where = None if is_flat and only.dtype == only.result else targets[0]
    return ranks.small((only.elements,) if shape is None else shape, only.dtype, plan.reduction, scale, where)


def scale_of(ranks: Communicator, op: str, postscale: float | None = None) -> float | None:
    """Return what the results of an operation are multiplied by.  Local."""
    scale = 1.0 / ranks.size if op == "mean" and ranks.size > 1 else None
    return scale if postscale is None else (1.0 if scale is None else scale) * postscale


class Sink(Protocol):
    """What becomes of results."""

    def place(self, tensors: Sequence[Any]) -> ResultSet:
        """Return where the results of a call with these tensors go.  Local."""
        ...

    def free(self) -> None:
        """Give back what is kept for results of later calls.  Local; at any time, also in the middle of a call."""


class BoundReduction(Bound):
    """The all-reduce of lists of tensors that are like one list.

    `reductions` are by bucket; `memory` is that of the tensors, by default the host's.  Values are multiplied by
    `prescale` before they are reduced; `pack_checked` stands in place of the intake's `pack`.  `question` is what new
    arrays were asked for by.  Without a `sink` results are put in place of the values.
    """

    question: Any = None

    def __init__(
        self,
        ranks: Communicator,
        call: Call,
        plan: Plan,
        reductions: Sequence[BucketReduction],
        intake: Intake,
        sink: Sink | None,
        memory: DeviceMemory | None = None,
        prescale: float | None = None,
        pack_checked: Callable[[Sequence[Any], Any], bool] | None = None,
    ) -> None:
        super().__init__(ranks, call)
        self.nbytes = plan.nbytes + BYTES_PER_TENSOR * len(plan.signatures)
        self._control, self._plan, self._memory = ranks.control, plan, memory
        self.reductions = reductions
        self._slot = reductions[0].slot if len(reductions) == 1 else None
        self._intake, self._pack = intake, pack_checked or intake.pack
        self._sink = sink
        self._prescale = prescale
        self._multiplied: list[Any] = []
        # Taken before the call is begun: a rank that has no memory for it raises, and stays in step.
        self._place: ResultSet | None = None

    def start(self, arrays: Any, timeout_seconds: float | None = None) -> Handle:
        """Take the collective's place in the order of calls; errors as for `Bound`, and for arrays that are unlike."""
        if not self._intake.takes(arrays):
            raise self.unlike(arrays)
        return super().start(arrays, timeout_seconds)

    def enter(self, arrays: Sequence[Any]) -> None:
        if self._memory is not None:
            self._memory.enter([each for each in arrays if each is not None])

    def fill(self, tensors: Sequence[Any]) -> bool:
        if self._slot is None:
            if not self._intake.takes(tensors):
                return False
            self.enter(tensors)
        else:
            slot = self._slot(self._control.call + 1)
            if not self._pack(tensors, slot):
                return False
            if self._prescale is not None:
                numpy.multiply(slot, self._prescale, out=slot)
        if self._sink is not None:
            self._place = self._sink.place(tensors)
        return True

    def move(self, watch: Watch, tensors: Sequence[Any]) -> Any:
        place, self._place = self._place, None
        if self._slot is None:
            tensors = self._values(tensors)
        reductions = self.reductions
        if len(reductions) == 1:
            reductions[0].run(watch, tensors, tensors if place is None else place.results)
        else:
            for index, (bucket, reduction) in enumerate(zip(self._plan.buckets, reductions, strict=True)):
                members = [tensors[each] for each in bucket.tensors]
                reduction.run(watch, members, members if place is None else place.results[index : index + 1])
        return tensors if place is None else place.hand_out()

    def forget(self) -> None:
        self._place = None

    def free_results(self) -> None:
        if self._sink is not None:
            self._sink.free()

    def _values(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors as contiguous ones; multiplied, in the dtypes in which they are reduced, if need be."""
        tensors = self._intake.in_order(tensors)
        if self._prescale is None:
            return tensors
        if not self._multiplied:
            dtypes = {position: bucket.dtype for bucket in self._plan.buckets for position in bucket.tensors}
            self._multiplied = [kept_empty(each.shape, dtypes[at], each) for at, each in enumerate(tensors)]
        for source, target in zip(tensors, self._multiplied, strict=True):
            arrays.namespace(target).multiply(source, self._prescale, out=target, dtype=target.dtype)
        return self._multiplied
