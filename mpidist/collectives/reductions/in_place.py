"""The all-reduce of a list of arrays in place, bound: the reduced values lie where this rank's own values lay.

Who holds the arrays sees the results; no memory is handed out.  That is what adapters of frameworks need, whose
gradients lie in the framework's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.persistent import Bound
from mpidist.collectives.reductions.intake import InPlaceIntake, Intake
from mpidist.collectives.reductions.lists import ShortArray
from mpidist.collectives.reductions.plan import Bucket, Signature, build
from mpidist.collectives.reductions.reduction import BoundReduction, one_step, scale_of
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.scratch import Scratch
from mpidist.device.memory import memory_of
from mpidist.errors import UnsupportedDtypeError

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


def bind_in_place(
    ranks: Communicator,
    signatures: Sequence[Signature],
    op: str = "sum",
    algorithm: str | None = None,
    timeout_seconds: float | None = None,
    kind: Any = None,
    is_checked: bool = False,
) -> Bound:
    """Return what reduces lists of such arrays in place, to be called any number of times.  Collective.

    Calls compare names, dtypes and shapes.  `kind` is an array of the kind that will be reduced, by default NumPy's;
    the deadline is that of the calls, too.  With `is_checked` lists are of one array, which is flat when it is given,
    and which whoever calls has looked at.  UnsupportedDtypeError where there is no such reduction of a dtype into
    arrays of that dtype.
    """
    what = f"all_reduce({op})" if is_checked else f"all_reduce({op}) in place"
    memory = None if kind is None else memory_of(kind)
    on_host = kind is None or not arrays.is_device(kind)
    plan = build(signatures, op, ranks.bytes_per_pack(algorithm, on_host))
    for bucket in plan.buckets:
        dtype = plan.signatures[bucket.tensors[0]][1]
        if bucket.result != dtype:
            raise UnsupportedDtypeError(f"the {op} of {dtype} arrays is {bucket.result}, and cannot be put in place")
    ranks.prepare(Call(what, signatures), algorithm, timeout_seconds)
    way = ranks.way(max((each.nbytes for each in plan.buckets), default=0), algorithm, on_host)
    scale, scratch, pieces = scale_of(ranks, op), Scratch(), [Pieces(bucket.offsets) for bucket in plan.buckets]

    def reduction(bucket: Bucket, where: Pieces) -> BucketReduction:
        dtypes = bucket.result, bucket.dtype, bucket.result
        return ranks.reduction(way, where, where, dtypes, plan.reduction, scale, kind, scratch)

    call = Call(what, signatures, [(way.label, bucket.nbytes) for bucket in plan.buckets])
    shape = signatures[0][2] if len(signatures) == 1 and not is_checked else None
    step = one_step(ranks, plan, way, pieces, scale, shape) if on_host else None
    if is_checked and step is not None and plan.buckets[0].dtype == signatures[0][1]:
        only = plan.buckets[0]
        return ShortArray(ranks, call, ("", only.dtype, (only.elements,)), step, is_in_place=True)
    intake = Intake()
    if not is_checked:
        intake = InPlaceIntake(f"{ranks.control.own_name}: {call.what}", plan, memory, are_apart=step is None)
    reductions = [step] if step is not None else list(map(reduction, plan.buckets, pieces))
    bound = BoundReduction(ranks, call, plan, reductions, intake, None, memory)
    bound.timeout_seconds = timeout_seconds
    return bound
