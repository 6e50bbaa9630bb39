"""The memory of the results of a plan's buckets, and what callers get of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mpidist.collectives.kept_memory import Owners
from mpidist.collectives.reductions.plan import Bucket, Plan
from mpidist.device.memory import kept_empty


class Packed(NamedTuple):
    """Reduced tensors of one dtype that lie one after the other, each in the order of its axes.

    `tensors` are their positions in the list; `offsets` say where each begins, in elements, with one more for the end.
    The next call writes to `values`.
    """

    tensors: tuple[int, ...]
    offsets: tuple[int, ...]
    values: Any


class ResultSet(Owners):
    """Flat memory for the results of buckets, and the results.

    Callers get new array objects, whose shape, dtype and flags are theirs to change.  What is used here are other views
    of the owners, which nobody else has.

    The buffers are of the kind of `kind`; `orders` are those of `Sources`.  `buffers`, by default new ones, are a flat
    array for each bucket, in the dtype of its results, which does not lie in another one.  With `is_packed` results are
    handed out as they were packed.
    """

    def __init__(
        self,
        plan: Plan,
        kind: Any,
        orders: Mapping[int, tuple[int, ...]],
        buffers: list[Any] | None = None,
        is_packed: bool = False,
    ) -> None:
        if buffers is None:
            buffers = [kept_empty(bucket.elements, bucket.result, kind) for bucket in plan.buckets]
        super().__init__(buffers, plan.nbytes)
        self.results = [owner.view() for owner in buffers]
        self._packed = [
            Packed(bucket.tensors, bucket.offsets, result)
            for bucket, result in zip(plan.buckets, self.results, strict=True)
            if is_packed
        ]
        self._is_packed = is_packed
        self._views: list[Any] = [None] * len(plan.signatures)
        for bucket, result in zip(plan.buckets, self.results, strict=True):
            self._cut(bucket, result, plan, orders)
        self._new_view = type(kind).view

    def _cut(self, bucket: Bucket, result: Any, plan: Plan, orders: Mapping[int, Sequence[int]]) -> None:
        for position, start, end in zip(bucket.tensors, bucket.offsets[:-1], bucket.offsets[1:], strict=True):
            shape, order = plan.signatures[position][2], orders.get(position)
            if order is None:
                self._views[position] = result[start:end].reshape(shape)
            else:  # the caller's axes, back in their places
                back = sorted(range(len(order)), key=order.__getitem__)
                self._views[position] = result[start:end].reshape([shape[axis] for axis in order]).transpose(back)

    def hand_out(self) -> list[Any]:
        """Return the results as new array objects, in the caller's shapes; or as they were packed."""
        return list(self._packed) if self._is_packed else list(map(self._new_view, self._views))
