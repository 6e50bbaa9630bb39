"""The buffers in which a plan's buckets are reduced, and what callers get of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from sys import getrefcount
from typing import Any

from mpidist import arrays
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.messages import Replay
from mpidist.fusion.plan import Bucket, Plan


class ResultSet:
    """The buffers in which buckets are reduced, the results made of them, and the views that callers get.

    A buffer is the result itself where both have one dtype.

    Parameters
    ----------
    plan : Plan
    kind : array
        Of whose kind the buffers are.
    orders : mapping of int to tuple of int
        See `Sources`.
    buffers : list of array, optional
        A flat array for each bucket; by default new ones.
    """

    def __init__(
        self, plan: Plan, kind: Any, orders: Mapping[int, tuple[int, ...]], buffers: list[Any] | None = None
    ) -> None:
        if buffers is None:
            buffers = [arrays.empty(bucket.elements, bucket.dtype, kind) for bucket in plan.buckets]
        self.buffers = buffers
        self.results = [
            buffer if bucket.result == bucket.dtype else arrays.empty(bucket.elements, bucket.result, kind)
            for bucket, buffer in zip(plan.buckets, self.buffers, strict=True)
        ]
        self._replays: dict[tuple[int, str], Replay] = {}
        self.views: list[Any] = [None] * len(plan.signatures)
        for bucket, result in zip(plan.buckets, self.results, strict=True):
            self._cut(bucket, result, plan, orders)
        self._all = [*self.views, *self.results, *self.buffers]
        self._first = self._all[:1]
        self._idle: list[int] = []

    def _cut(self, bucket: Bucket, result: Any, plan: Plan, orders: Mapping[int, Sequence[int]]) -> None:
        for position, start, end in zip(bucket.tensors, bucket.offsets[:-1], bucket.offsets[1:], strict=True):
            shape, order = plan.signatures[position][2], orders.get(position)
            if order is None:
                self.views[position] = result[start:end].reshape(shape)
            else:  # the caller's axes, back in their places
                back = sorted(range(len(order)), key=order.__getitem__)
                self.views[position] = result[start:end].reshape([shape[axis] for axis in order]).transpose(back)

    def replay(self, index: int, communicator: Communicator, op: str, algorithm: str) -> Replay:
        """Return what reduces buffer `index` over messages; it is bound to the buffer once."""
        bound = self._replays.get((index, algorithm))
        if bound is None:
            bound = self._replays[index, algorithm] = communicator.bind(self.buffers[index], op, algorithm)
            self.settle()  # what is bound refers to the buffer
        return bound

    def finish(self, index: int, scale: float | None) -> None:
        """Multiply bucket `index` by `scale` if it is a mean, and round it to the caller's dtype."""
        buffer, result = self.buffers[index], self.results[index]
        if scale is not None:
            arrays.namespace(buffer).multiply(buffer, scale, out=buffer)
        if result is not buffer:
            result[...] = buffer

    def protect(self) -> None:
        """Let callers only read their views: others see the same memory."""
        for view in self.views:
            view.flags.writeable = False

    def settle(self) -> None:
        """Count the references there are while nobody else has any: after construction, whose locals hold some."""
        self._idle = list(map(getrefcount, self._all))

    def is_free(self) -> bool:
        """Whether nobody else refers to a view, or to a view of one (which refers to the buffer behind it)."""
        # who holds results mostly holds the first: then nobody needs to look at a thousand others
        is_first_free = list(map(getrefcount, self._first)) == self._idle[:1]
        return is_first_free and list(map(getrefcount, self._all)) == self._idle
