"""The array of one rank on all of them: broadcast, bound."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy

from mpidist.arrays import byte_view, empty_like
from mpidist.collectives.call import Call
from mpidist.collectives.exchange import plain
from mpidist.collectives.exchange.array_bound import ArrayBound, SentCollective
from mpidist.collectives.exchange.call_slots import CallSlots
from mpidist.collectives.exchange.own_results import OwnResults
from mpidist.collectives.ranks import Ranks
from mpidist.runtime.control import Watch
from mpidist.transports.base import Transport
from mpidist.transports.node_memory import SharedSegments


def bind_broadcast(
    ranks: Ranks, segments: SharedSegments | None, like: Any, root: int, results: OwnResults | None
) -> ArrayBound:
    """Return the broadcast of arrays like this one; Local.

    Parameters
    ----------
    ranks : Ranks
    segments : SharedSegments or None
        Of all ranks, for arrays of the host; None for messages.
    like : array
    root : int
    results : OwnResults or None
        None: in place, for C-contiguous arrays.
    """
    call = Call(f"broadcast(root={root})", [("", like.dtype, like.shape)])
    if segments is not None:
        return NodeBroadcast(ranks, segments, call, like, root, results)
    return SentCollective(ranks, call, like, None, partial(_sent, root=root, in_place=results is None))


class NodeBroadcast(ArrayBound):
    """The broadcast on a node: by the root's call slot, a longer array by messages, which copy it once."""

    def __init__(
        self, ranks: Ranks, segments: SharedSegments, call: Call, like: Any, root: int, results: OwnResults | None
    ) -> None:
        super().__init__(ranks, call, like)
        self._control, self._results = ranks.control, results
        self._transport, self._root = ranks.transport, root
        self._is_root = ranks.rank == root
        self._readers = [rank for rank in range(ranks.size) if rank != root]
        slots = CallSlots(segments, 0)
        is_short = like.nbytes <= slots.room
        self._slot = slots.view(root, 0, self._shape, self._dtype, like.nbytes) if is_short else None

    def show(self, array: Any) -> None:
        """Put a short array of the root into its call slot.  Local."""
        if self._is_root:
            if self._slot is not None:
                self._slot[(self._control.call + 1) & 1][...] = array
        elif self._results is None and not array.flags.writeable:
            raise ValueError(f"{self.call.what} works in place, and this array can only be read")

    def move(self, watch: Watch, array: Any) -> Any:
        out = array if self._results is None else self._results.array(self._shape, self._dtype)
        if self._slot is not None:
            if out is not array or not self._is_root:
                out[...] = self._slot[watch.call & 1]
        else:
            self._send_long(watch, array, out)
        return out

    def _send_long(self, watch: Watch, array: Any, out: Any) -> None:
        if not self._is_root:
            plain.exchange(self._transport, {}, {self._root: byte_view(out)}, watch)
            return
        own = numpy.ascontiguousarray(array)
        copied = None if out is array else partial(numpy.copyto, out, own)
        plain.exchange(self._transport, dict.fromkeys(self._readers, byte_view(own)), {}, watch, copied)


def _sent(transport: Transport, array: Any, watch: Watch, root: int, in_place: bool) -> Any:
    """Broadcast over messages."""
    out = array
    if not in_place:
        out = empty_like(array)
        if transport.rank == root:
            out[...] = array
    plain.broadcast(transport, out, root, watch)
    return out
