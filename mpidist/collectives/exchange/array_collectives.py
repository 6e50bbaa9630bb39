"""The collectives of one array: which bound object is the one for an array, and on what it is bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mpidist import arrays
from mpidist.collectives.call import Call
from mpidist.collectives.exchange import plain
from mpidist.collectives.exchange.array_bound import ArrayBound, SentCollective
from mpidist.collectives.exchange.node_exchange import CountedExchange, NodeExchange, memory_of_results
from mpidist.collectives.exchange.outbox import Outbox
from mpidist.collectives.exchange.reduce_scatters import NodeReduceScatter
from mpidist.collectives.reductions.plan import build
from mpidist.collectives.ways.chooser import ONE_PACK
from mpidist.collectives.ways.device_ways import DeviceCollective
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator
    from mpidist.device.memory import Link


class ArrayCollectives:
    """Binds the collectives of one array for some ranks.

    All methods are Local, and raise before any communication what is wrong with an array.
    """

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks
        self._results = memory_of_results()
        self._segments = ranks.segments

    def bind_gather(self, like: Any, axis: int, root: int | None) -> ArrayBound:
        """Return a new all_gather, or gather to `root`; ranks may differ in the length of `axis`."""
        like = self.checked(like)
        axis = plain.checked_axis(like, axis, "all_gather" if root is None else "gather")
        name = f"all_gather(axis={axis})" if root is None else f"gather(root={root}, axis={axis})"
        others = [-1 if index == axis else length for index, length in enumerate(like.shape)]
        call, segments = Call(name, [("", like.dtype, others)]), self._segments_for(like)
        if segments is None:
            return self.sent(call, like, axis, partial(plain.gather, axis=axis, root=root))
        readers = None if root is None else (root,)
        return NodeExchange(self._ranks, segments, call, like, self._results, axis=axis, readers=readers)

    def bind_broadcast(self, like: Any, root: int, in_place: bool = False) -> ArrayBound:
        """Return a new broadcast."""
        like = self.checked(like)
        call, segments = Call(f"broadcast(root={root})", [("", like.dtype, like.shape)]), self._segments_for(like)
        if segments is None:
            return self.sent(call, like, None, partial(_from_root, root=root, in_place=in_place))
        return NodeExchange(self._ranks, segments, call, like, self._results, source=root, in_place=in_place)

    def bind_reduce_scatter(self, like: Any, op: str) -> ArrayBound:
        """Return a new reduce_scatter."""
        like = self.checked(like, "sum" if op == "mean" else op)
        plain.checked_axis(like, 0, "reduce_scatter")
        plan = build([("", like.dtype, tuple(like.shape))], op, ONE_PACK)
        call = Call(f"reduce_scatter({op})", [("", like.dtype, like.shape)])
        (bucket,), segments = plan.buckets, self._segments_for(like)
        if segments is None or not Outbox(segments, self._ranks.rank).has_parts:
            move = partial(plain.reduce_scatter, op=op, bucket=bucket)
            return self.sent(call, like, None, move, reduces=(bucket.dtype, plan.reduction))
        return NodeReduceScatter(self._ranks, segments, call, like, (op, plan.reduction, bucket), self._results)

    def bind_all_to_all(self, like: Any) -> ArrayBound:
        """Return a new all_to_all: it returns the rows that this rank got, and how many each rank gave."""
        like = self.checked(like)
        plain.checked_axis(like, 0, "all_to_all")
        call, segments = Call("all_to_all", [("", like.dtype, [-1, *like.shape[1:]])]), self._segments_for(like)
        if segments is None or segments.segment_bytes <= 8 * self._ranks.size + 64:
            return self.sent(call, like, 0, plain.all_to_all, is_dealt=True)
        return CountedExchange(self._ranks, segments, call, like, self._results, axis=0, is_dealt=True)

    def checked(self, array: Any, op: str | None = None) -> Any:
        """Return an array as `arrays.plain` does; raise if it cannot be moved, or reduced by `op`.

        ValueError where there is no reduction `op`.
        """
        array = arrays.plain(array)
        arrays.kind_of(array)
        if op is not None:
            arrays.check_reducible(array.dtype, op)
        arrays.check_movable(array.dtype)
        if self._ranks.size > 1 and self._ranks.devices.memory(array) is None:
            arrays.check_memory(array, self._ranks.transport.memory, self._ranks.transport.name)
        return array

    def checked_root(self, root: int, name: str) -> int:
        """Return the rank that a collective goes to or comes from, as an int; raise unless there is such a rank."""
        size = self._ranks.size
        if type(root) is int and 0 <= root < size:  # quickly: short broadcasts take a few microseconds
            return root
        return plain.checked_rank(root, size, f"{name}: root")

    def sent(
        self,
        call: Call,
        like: Any,
        axis: int | None,
        move: Callable[..., Any],
        is_dealt: bool = False,
        reduces: tuple[Any, str] | None = None,
    ) -> ArrayBound:
        """Return a collective over messages, or that of device arrays, see `DeviceCollective`."""
        memory = self._ranks.devices.memory(like) if self._ranks.size > 1 else None
        if memory is None:
            return SentCollective(self._ranks, call, like, axis, move, is_dealt)
        return DeviceCollective(self._ranks, memory, call, like, axis, move, is_dealt, reduces)

    def _segments_for(self, like: Any) -> Any:
        return None if arrays.is_device(like) else self._segments


def _from_root(transport: Any, array: Any, watch: Watch, root: int, in_place: bool, link: Link | None = None) -> Any:
    """Broadcast over messages, or by a link."""
    out = array
    if not in_place:
        out = arrays.empty_like(array)
        if transport.rank == root:
            out[...] = array
    plain.from_root(transport, out, root, watch, link)
    return out
