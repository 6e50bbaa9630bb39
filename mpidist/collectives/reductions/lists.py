"""The all-reduce of a list of tensors, bound: one short array, short lists in one step, long ones piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.handle import Handle
from mpidist.collectives.mismatch import fact
from mpidist.collectives.persistent import Bound
from mpidist.collectives.reductions.adjustment import Zeros, checked_factors
from mpidist.collectives.reductions.intake import Intake, ListIntake, OptionalIntake
from mpidist.collectives.reductions.plan import Bucket, Plan, Signature, build
from mpidist.collectives.reductions.reduction import (
    BYTES_PER_TENSOR,
    BoundReduction,
    one_step,
    scale_of,
)
from mpidist.collectives.reductions.rows import Rows
from mpidist.collectives.reductions.sinks import ResultSink
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.packed import pack
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.scratch import Scratch
from mpidist.collectives.ways.selection import Way
from mpidist.device.memory import memory_of
from mpidist.errors import UnsupportedDtypeError
from mpidist.runtime.control import Watch
from mpidist.runtime.trace_kinds import PACK

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: A list of at least so many tensors, that are shorter on average than so many bytes, is told by shapes and dtypes
#: only: to look at their strides, too, would take longer than to copy those that are not contiguous.
_MANY, _SHORT_BYTES = 64, 1 << 14

_signature = attrgetter("dtype", "shape")


class Question(NamedTuple):
    """What is asked for besides the tensors themselves.

    `bytes_per_pack` is 0 for the default; `is_packed` wants results as `Packed`.  Values are multiplied by `prescale`,
    results by `postscale`.
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
    ranks: Communicator,
    tensors: Sequence[Any],
    question: Question,
    timeout_seconds: float | None = None,
    in_memory_order: bool = True,
    any_strides: bool = False,
    zeros: Zeros | None = None,
) -> BoundList:
    """Return the all-reduce of lists like this one; no reference to the tensors is kept.

    `in_memory_order`: a tensor may be taken in the order in which its axes lie in memory.  `any_strides`: lists that
    lie in memory otherwise are taken, too; a list of many short tensors is in any case.  `zeros` stands in for tensors
    that are None.
    """
    op, names = question.op, question.names
    if zeros is not None:
        tensors = [*tensors, zeros.counts]
        names = zeros.named(names)
    if names is not None and len(names) != len(tensors):
        raise ValueError(f"got {len(tensors)} tensors and {len(names)} names; give each tensor a name, or none")
    _check_kinds(tensors, ranks, names)
    labels = names if names is not None else [""] * len(tensors)
    signatures = [(name, array.dtype, tuple(array.shape)) for name, array in zip(labels, tensors, strict=True)]
    on_host = not (tensors and arrays.is_device(tensors[0]))
    nbytes = sum(array.nbytes for array in tensors)
    ranks.prepare(Call(f"all_reduce({question.op})", signatures), question.algorithm, timeout_seconds)
    plan = build(signatures, op, question.bytes_per_pack or ranks.bytes_per_pack(question.algorithm, on_host))
    multiplied = [(plan.signatures[each.tensors[0]][1], each.dtype) for each in plan.buckets]
    prescale, postscale = checked_factors(question.prescale, question.postscale, multiplied, op)
    question = question._replace(prescale=prescale, postscale=postscale)
    way = ranks.way(max((bucket.nbytes for bucket in plan.buckets), default=0), question.algorithm, on_host)
    is_array = len(tensors) == 1 and nbytes <= _SHORT_BYTES and not question.is_packed and zeros is None
    is_array = is_array and {tensors[0].dtype} == {plan.buckets[0].dtype, plan.buckets[0].result}
    targets, scale = [Pieces((0, bucket.elements)) for bucket in plan.buckets], scale_of(ranks, op, postscale)
    segment = one_step(ranks, plan, way, targets, scale, tensors[0].shape if is_array else None) if on_host else None
    is_array = is_array and segment is not None
    any_strides |= is_array or (len(tensors) >= _MANY and nbytes < _SHORT_BYTES * len(tensors))
    any_strides &= on_host  # a device packs memory as it lies
    is_long = plan.nbytes >= _SHORT_BYTES * len(tensors)
    pack_flat = ranks.observer.function(PACK, pack)
    like = ListIntake(tensors, any_strides, in_memory_order and not question.is_packed, is_long, pack_flat)
    call = _call(plan, like.sources.orders, way, question)
    if is_array and segment is not None:
        short = ShortArray(ranks, call, signatures[0], segment, prescale)
        short.question = question
        return short
    rows = Rows.of(tensors, plan.buckets[0].dtype) if any_strides and segment is not None else None
    pack_checked = None if rows is None else ranks.observer.function(PACK, rows.pack_arrays)
    memory, scratch = None if on_host else memory_of(like.kind), Scratch()
    before, while_packed = (prescale, None) if on_host else (None, prescale)  # a device multiplies while it packs

    def reduction(bucket: Bucket, target: Pieces) -> BucketReduction:
        own = plan.signatures[bucket.tensors[0]][1] if before is None else bucket.dtype
        given = (own, bucket.dtype, bucket.result), plan.reduction, scale, like.kind, scratch, while_packed
        return ranks.reduction(way, Pieces(bucket.offsets), target, *given)

    reductions = [segment] if segment is not None else list(map(reduction, plan.buckets, targets))
    sink = ResultSink(plan, like, question.is_packed, zeros)
    intake: Intake = like
    if zeros is not None:
        intake, pack_checked = OptionalIntake(zeros, like, pack_checked or like.pack), None
    bound = BoundReduction(ranks, call, plan, reductions, intake, sink, memory, before, pack_checked)
    bound.question = question
    return bound


class ShortArray(Bound):
    """The all-reduce of one short array in one step through shared memory.

    `step` has a slot.  Values are multiplied by `prescale` before they are reduced; with `is_in_place` the result lies
    where the values lay.  `question` is what a new array was asked for by.
    """

    question: Any = None

    def __init__(
        self,
        ranks: Communicator,
        call: Call,
        signature: Signature,
        step: BucketReduction,
        prescale: float | None = None,
        is_in_place: bool = False,
    ) -> None:
        super().__init__(ranks, call)
        self.nbytes = 2 * BYTES_PER_TENSOR
        assert step.slot is not None
        self._slot, self._run, self._control = step.slot, step.run, ranks.control
        _, self._dtype, self._shape = signature
        self._prescale, self._is_in_place = prescale, is_in_place

    def start(self, arrays: Any, timeout_seconds: float | None = None) -> Handle:
        """Take the collective's place in the order of calls; errors as for `Bound`, and for an array that is unlike."""
        array = arrays[0] if len(arrays) == 1 else None
        if type(array) is not numpy.ndarray or array.shape != self._shape or array.dtype != self._dtype:
            raise self.unlike(arrays)
        return super().start(arrays, timeout_seconds)

    def fill(self, tensors: Sequence[Any]) -> bool:
        array = tensors[0] if len(tensors) == 1 else None
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
        results = [tensors[0] if self._is_in_place else numpy.empty(self._shape, self._dtype)]
        self._run(watch, tensors, results)
        return results


#: The all-reduce of lists like one list.
BoundList = BoundReduction | ShortArray


def _call(plan: Plan, orders: Mapping[int, Sequence[int]], way: Way, question: Question) -> Call:
    """Return the call, which all ranks must make alike."""
    packs = [(way.label, bucket.nbytes) for bucket in plan.buckets]
    scales = {"prescale": question.prescale, "postscale": question.postscale}
    facts = [fact(what, value) for what, value in scales.items() if value is not None]
    return Call(f"all_reduce({plan.op})", [*plan.signatures, *facts], packs, orders)


def _check_kinds(tensors: Sequence[Any], ranks: Communicator, names: Sequence[str] | None) -> None:
    """Raise, before any communication, unless all tensors are of one kind that the transport can move.

    Subclasses of NumPy's arrays, which `arrays.plain` takes care of, may be cut in another way.
    """
    if odd := [type(tensor).__name__ for tensor in tensors if arrays.plain(tensor) is not tensor]:
        raise TypeError(f"a list to be reduced has plain arrays only, got a {odd[0]}; pass numpy.asarray(array)")
    kinds: dict[str, int] = {}  # the number of the first tensor of each
    for number, tensor in enumerate(tensors):
        kinds.setdefault(arrays.kind_of(tensor).name, number)
    if len(kinds) > 1:
        labels = {number: f"tensor {number}" if names is None else names[number] for number in kinds.values()}
        told = ", ".join(f"{kind} ({labels[number]})" for kind, number in sorted(kinds.items()))
        raise UnsupportedDtypeError(
            f"a list to be reduced together must be of one kind of arrays, got {told}; reduce each kind in a call of "
            "its own"
        )
    if ranks.size > 1 and tensors and ranks.devices.memory(tensors[0]) is None:
        arrays.check_memory(tensors[0], ranks.transport.memory, ranks.transport.name)
