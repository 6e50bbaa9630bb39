"""Gradients that are written where all ranks of a node see them: nothing is packed.

The buffers, and the results of reducing them, are memory shared by the ranks of a node, as large as the model; it is
made when somebody asks for buffers.  A result is one array for all ranks, each of which has added up its shares of it.
So it can only be read; and it is used again when no rank refers to it any more, which each says before a call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

import numpy

from mpidist.arrays import ALIGNMENT, wire_dtype
from mpidist.collectives.call import Call
from mpidist.collectives.persistent import Once
from mpidist.collectives.reductions.plan import Plan, Signature, build
from mpidist.collectives.reductions.results import ResultSet
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.chooser import ONE_PACK
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.selection import SEGMENT_BYTES
from mpidist.collectives.ways.shared_sum import SharedSum
from mpidist.errors import RankFailedError, TransportError, TransportTimeoutError, UnsupportedDtypeError
from mpidist.runtime.control import Watch
from mpidist.transports.node_memory import map_together

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: So many results may be held at a time: each has a bit in the word in which a rank says which are free.
_MOST_RESULTS = 63

#: What a rank adds up at one go where nothing of it is used again while it is in cache: memory likes long reads.
_LONG_BYTES = 1 << 22


class GradientBuffers:
    """Buffers for the gradients of some variables, in memory that the ranks of a node share.

    Collective: every rank makes it in the same order.  UnsupportedDtypeError for a dtype that is not added as such;
    TransportError, on all ranks, where there is not so much shared memory.
    """

    def __init__(
        self, ranks: Communicator, signatures: Sequence[Signature], timeout_seconds: float | None = None
    ) -> None:
        for name, dtype, _ in signatures:
            if wire_dtype(dtype) != dtype:
                raise UnsupportedDtypeError(f"variable {name!r} is {dtype}: gradient buffers are for 32 bits or more")
        assert ranks.segments is not None
        self._ranks = ranks
        self._segments = ranks.segments
        self._plan = build(signatures, "sum", ONE_PACK)
        self._line = ranks.control.board_index
        self._timeout_seconds = timeout_seconds
        memory = self._map(ranks.size, self._exchange)
        self._by_rank = [_flat(part, self._plan) for part in _parts(memory, ranks.size)]
        self._arrays: list[ref[Any]] = []
        self._ids: list[int] = []
        self._dead: list[ref[Any]] = []
        self._results: list[_Result] = []
        self._calls: dict[str, Call] = {}
        self._update_results: list[Any] | None = None
        self._update: tuple[Any, Call, list[BucketReduction]] | None = None

    def hand_out(self) -> list[Any]:
        """Return this rank's buffers, zeros at first: a call with all of them reduces them where they are.  Local.

        When they die, and nothing else refers to the memory, it is given back.
        """
        buffers = ResultSet(self._plan, numpy.empty(0), {}, self._by_rank[self._line]).hand_out()
        self._ids = list(map(id, buffers))
        self._arrays = [ref(each, self._dead.append) for each in buffers]  # another array may get the id of a dead one
        known, key = self._ranks.in_shared_memory, id(buffers[0])
        known[key] = self
        finalize(buffers[0], known.pop, key, None).atexit = False  # before another array may get that id
        return buffers

    def _exchange(self, raw: bytes) -> list[bytes]:
        return self._ranks.exchange(raw, "gradient_buffers", self._timeout_seconds)

    def _map(self, copies: int, exchange: Callable[[bytes], list[bytes]]) -> Any:
        return map_together(copies * _nbytes(self._plan), self._line, exchange)

    def holds(self, tensors: Sequence[Any]) -> bool:
        """Whether these are the buffers, all of them in their order.  Local."""
        return not self._dead and list(map(id, tensors)) == self._ids

    def reduced(self, op: str, timeout_seconds: float | None) -> list[Any]:
        """Return the buffers reduced over all ranks, as arrays to be read.  Collective.

        UnsupportedDtypeError, before any communication, where a dtype has no such reduction.  TransportError or
        MemoryError, on all ranks, which can go on, where so many results are held that there is no memory for one more.
        """
        if op not in self._calls:
            self._check(op)
            self._calls[op] = self.call(f"all_reduce({op})", with_names=False)
        found = Once(self._ranks, self._calls[op], partial(self._move, op), self._show_free)(None, timeout_seconds)
        if isinstance(found, Exception):
            raise found  # not inside the call, which all ranks have left in step
        return found

    def _show_free(self) -> None:
        """Show the other ranks to which results nobody refers on this one.  Local."""
        free = sum(1 << number for number, results in enumerate(self._results) if results.is_free())
        self._words(self._ranks.control.call + 1)[self._line][0] = free

    def _words(self, call: int) -> list[Any]:
        """Return by rank the word of a call in which it shows its free results."""
        return [table[:8].view(numpy.uint64) for table in self._segments.segments[call & 1]]

    def _move(self, op: str, watch: Watch) -> list[Any] | Exception:
        """Reduce the buffers into a result that no rank refers to; return why there is none."""
        free = reduce(operator.and_, [int(word[0]) for word in self._words(watch.call)])
        refused = self._more(watch) if free == 0 else None
        if refused is not None:
            return refused
        number = (free & -free).bit_length() - 1 if free else len(self._results) - 1
        for reduction in self._reductions(number, op):
            reduction.run(watch, (), ())
        return self._results[number].hand_out()

    def _check(self, op: str) -> None:
        """Raise unless all buffers can be reduced by `op` into arrays of their own dtypes."""
        asked = build(self._plan.signatures, op, ONE_PACK).buckets
        for bucket, own in zip(asked, self._plan.buckets, strict=True):
            if bucket.result != own.dtype:
                raise UnsupportedDtypeError(
                    f"the {op} of {own.dtype} arrays is {bucket.result}, and their results in gradient buffers are "
                    f"{own.dtype}: ask for the sum, or pass copies of the buffers"
                )

    def _more(self, watch: Watch) -> Exception | None:
        """Make memory for one more result; return why there is none, on all ranks.  Collective, within a call."""
        if len(self._results) == _MOST_RESULTS:
            return MemoryError(f"{_MOST_RESULTS} results of gradient buffers are held; copy those that are kept")
        try:
            memory = self._map(1, lambda raw: self._ranks.transport.exchange(raw, watch))
        except (TransportTimeoutError, RankFailedError):
            raise
        except TransportError as error:
            return TransportError(
                f"no memory for result {len(self._results) + 1} of gradient buffers that is held at a time: {error}; "
                "drop or copy earlier results before the next step"
            )
        self._results.append(_Result(self._plan, numpy.empty(0), {}, _flat(memory, self._plan)))
        return None

    def _reductions(self, number: int, op: str) -> list[BucketReduction]:
        result = self._results[number]
        if op not in result.reductions:
            reduced, size = ("sum", self._ranks.size) if op == "mean" else (op, 1)
            result.reductions[op] = [self._sum(at, each, reduced, size) for at, each in enumerate(result.results)]
            result.settle()  # what is bound refers to the buffers
        return result.reductions[op]

    def _sum(self, index: int, result: Any, op: str, size: int, targets: Pieces | None = None) -> BucketReduction:
        segments, buffers = self._segments, [flat[index] for flat in self._by_rank]
        scale = 1.0 / size if size > 1 else None
        is_used_once = targets is None and scale is None and len(buffers) == 2
        share_bytes = _LONG_BYTES if is_used_once else min(SEGMENT_BYTES, segments.room)
        bound = SharedSum(segments, self._line, buffers, result, op, scale, len(buffers) * share_bytes, targets)
        return self._ranks.observer.reduction(bound)

    def call(self, name: str, with_names: bool = True) -> Call:
        """Return a call on these buffers.  Local."""
        signatures = [(label if with_names else "", dtype, shape) for label, dtype, shape in self._plan.signatures]
        return Call(name, signatures, [("in gradient buffers", bucket.nbytes) for bucket in self._plan.buckets])

    def updates(self, targets: Sequence[Pieces]) -> tuple[Call, list[BucketReduction]]:
        """Return call and sums of all buckets for an update of parameters that lie at `targets`, mostly the last one.

        Collective at first: every rank calls it in the same order; local later.
        """
        if self._update_results is None:  # one for all updates, which run one at a time
            self._update_results = _flat(self._map(1, self._exchange), self._plan)
        if self._update is None or self._update[0] is not targets:
            pairs = enumerate(zip(self._update_results, targets, strict=True))
            sums = [self._sum(index, each, "sum", 1, where) for index, (each, where) in pairs]
            self._update = targets, self.call("apply_gradients"), sums
        return self._update[1:]


class _Result(ResultSet):
    """A result that others see, too, and by operation what is bound to its memory: that goes with it."""

    def __init__(self, *like: Any) -> None:
        super().__init__(*like)
        self.reductions: dict[str, list[BucketReduction]] = {}
        for view in self._views:
            view.flags.writeable = False


def _nbytes(plan: Plan) -> int:
    """Return how much memory one copy takes; never none, which cannot be shared."""
    return max(ALIGNMENT, sum(-(-bucket.nbytes // ALIGNMENT) * ALIGNMENT for bucket in plan.buckets))


def _parts(memory: Any, count: int) -> list[memoryview]:
    view = memoryview(memory)
    nbytes = len(view) // count
    return [view[part * nbytes : (part + 1) * nbytes] for part in range(count)]


def _flat(memory: Any, plan: Plan) -> list[Any]:
    """Return a flat array for each bucket, one after the other in the memory."""
    flat, offset = [], 0
    for bucket in plan.buckets:
        flat.append(numpy.frombuffer(memory, bucket.dtype, bucket.elements, offset))
        offset += -(-bucket.nbytes // ALIGNMENT) * ALIGNMENT
    return flat
