"""Reduce gradients and update parameters in one pass: each rank of a node updates the slices that it has reduced.

The rank that owns a slice turns its summed gradient into new parameters while it is in cache.  The others get the new
parameters.  A rank owns the same elements whatever the way, so an optimizer can keep their slots on that rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from mpidist import arrays
from mpidist.arrays import wire_dtype
from mpidist.collectives.call import Call
from mpidist.collectives.persistent import Once
from mpidist.collectives.reductions.plan import Plan, Signature, build
from mpidist.collectives.reductions.reduction import BYTES_PER_TENSOR
from mpidist.collectives.ways.chooser import ONE_PACK
from mpidist.collectives.ways.pieces import Pieces, SeenByAll, Transform
from mpidist.collectives.ways.selection import SEGMENT_BYTES, SEGMENTED, Way
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: Below so many bytes a step is short whoever updates what, and every rank keeps everything.
LEAST_BYTES = 1 << 20


class Slice(NamedTuple):
    """What a rank owns of one bucket.

    `tensors` are positions in the list, `pieces` say where these lie in the bucket; the spans of `owned` ascend.
    """

    tensors: tuple[int, ...]
    pieces: Pieces
    dtype: Any
    owned: list[tuple[int, int]]

    def cut(self, values: Any) -> list[Any]:
        """Return views of what this rank keeps, one for each span that it owns.  Local."""
        stops = numpy.cumsum([0] + [stop - start for start, stop in self.owned]).tolist()
        return [values[a:b] for a, b in zip(stops[:-1], stops[1:], strict=True)]


class FusedUpdate(NamedTuple):
    """Plans updates over the ranks of a communicator.  Two that plan the same are equal.

    `in_one_copy`: the parameters are arrays that all ranks see, so what one rank has updated is there for the others.
    """

    communicator: Communicator
    algorithm: str | None = None
    timeout_seconds: float | None = None
    in_one_copy: bool = False

    def pays(self, nbytes: int) -> bool:
        """Return whether slices may pay for gradients of so many bytes.  Local; the same answer on all ranks."""
        return self.communicator.size > 1 and nbytes >= LEAST_BYTES

    def plan(self, gradients: Sequence[Any], names: Sequence[str]) -> PlannedUpdate | None:
        """Return the update for gradients of these shapes, mostly from the table of bindings.

        None where slices do not pay, or cannot be had.  Collective, where the ranks have not been measured yet; the
        same answer on all ranks.
        """
        is_plain = all(
            not arrays.is_device(each) and each.dtype == wire_dtype(each.dtype) and each.dtype.kind == "f"
            for each in gradients
        )
        if not is_plain or not self.pays(sum(gradient.nbytes for gradient in gradients)):
            return None
        signatures = [(name, each.dtype, tuple(each.shape)) for name, each in zip(names, gradients, strict=True)]
        key = ("apply_gradients", self.algorithm, self.in_one_copy, *signatures)
        found: PlannedUpdate | None = self.communicator.bindings.find(key)
        return self._bind(key, signatures) if found is None else found

    def _bind(self, key: Any, signatures: Sequence[Signature]) -> PlannedUpdate | None:
        communicator = self.communicator
        communicator.prepare(Call("apply_gradients", signatures), self.algorithm, self.timeout_seconds)
        plan = build(signatures, "sum", ONE_PACK)
        if not all(bucket.elements for bucket in plan.buckets):  # of a dtype there are empty tensors only
            return None
        largest = max(bucket.nbytes for bucket in plan.buckets)
        algorithm = communicator.way(largest, self.algorithm).algorithm
        if algorithm not in SEGMENTED:
            return None
        return PlannedUpdate(key, plan, communicator, Way(algorithm, SEGMENT_BYTES), self.in_one_copy)

    def gather(self, part: Slice, values: Any) -> Any:
        """Return what the ranks have for their slices of a bucket, as one flat array; `values` are those of this rank.

        Collective.
        """
        ranks, whole = self.communicator, numpy.zeros(part.pieces.elements, values.dtype)
        if ranks.topology.node_of[ranks.rank] == 0:  # on other nodes others own the same
            for (start, stop), own in zip(part.owned, part.cut(values), strict=True):
                whole[start:stop] = own
        # As integers: a sum with zeros keeps the bits, those of -0.0 too.
        ranks.all_reduce(whole.view(f"u{whole.itemsize}"), timeout_seconds=self.timeout_seconds)
        return whole


class PlannedUpdate:
    """An update of parameters of some shapes; the table of bindings keeps it from its first call on.

    `slices` are by bucket.
    """

    last_call = 0

    def __init__(self, key: Any, plan: Plan, ranks: Communicator, way: Way, in_one_copy: bool) -> None:
        self.key, self.nbytes = key, BYTES_PER_TENSOR * len(plan.signatures)
        self._plan, self._ranks = plan, ranks
        self._copies: dict[int, Any] = {}
        self._pieces = [Pieces(bucket.offsets) for bucket in plan.buckets]
        # Where all see the parameters, nothing is handed over; who has gone through a bucket has waited for the others.
        self._targets = [SeenByAll(bucket.offsets) for bucket in plan.buckets] if in_one_copy else self._pieces
        cuts = zip(plan.buckets, self._pieces, self._targets, strict=True)
        self._reductions = [
            ranks.reduction(way, pieces, targets, (bucket.dtype,) * 3, "sum") for bucket, pieces, targets in cuts
        ]
        packs = [(way.label, bucket.nbytes) for bucket in plan.buckets]
        self._call = Call("apply_gradients", plan.signatures, packs)
        self.slices = [
            Slice(bucket.tensors, pieces, bucket.dtype, reduction.owned)
            for bucket, pieces, reduction in zip(plan.buckets, self._pieces, self._reductions, strict=True)
        ]

    def run(
        self,
        gradients: Sequence[Any],
        parameters: Sequence[Any],
        transforms: Sequence[Transform],
        on_begin: Callable[[], None],
        timeout_seconds: float | None,
    ) -> None:
        """Sum the gradients over the ranks and put new parameters in place.  Collective.

        By bucket, ``transform(start, values)`` gets summed gradients that this rank owns, from element `start` of the
        bucket on, and updates its own parameters there.  `on_begin` is called when all ranks have come, before anything
        is changed.
        """
        buffers = self._ranks.in_shared_memory.get(id(gradients[0]))
        if buffers is not None and buffers.holds(gradients):
            call, reductions = buffers.updates(self._targets)
        else:
            call, reductions, gradients = self._call, self._reductions, self._contiguous(gradients)

        def move(watch: Watch) -> None:
            on_begin()
            for bucket, reduction, transform in zip(self._plan.buckets, reductions, transforms, strict=True):
                sources = [gradients[each] for each in bucket.tensors]
                reduction.run(watch, sources, [parameters[each] for each in bucket.tensors], transform)

        Once(self._ranks, call, move)(None, timeout_seconds)
        self._ranks.bindings.use(self)

    def free_results(self) -> None:
        """Give back the copies that were made of gradients.  Local."""
        self._copies = {}

    def _contiguous(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients in the order of their axes, as parameters lie; those that are not are copied."""
        odd = [position for position, each in enumerate(gradients) if not each.flags.c_contiguous]
        if not odd:
            return gradients
        contiguous = list(gradients)
        for position in odd:
            if position not in self._copies:
                self._copies[position] = numpy.empty(contiguous[position].shape, contiguous[position].dtype)
            self._copies[position][...] = contiguous[position]
            contiguous[position] = self._copies[position]
        return contiguous
