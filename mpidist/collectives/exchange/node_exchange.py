"""What the ranks of a node move and do not reduce: gathers, broadcasts and all_to_all, bound."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import numpy

from mpidist.arrays import byte_view
from mpidist.collectives.call import Call
from mpidist.collectives.exchange import plain
from mpidist.collectives.exchange.array_bound import ArrayBound
from mpidist.collectives.exchange.call_slots import CallSlots
from mpidist.collectives.exchange.message_link import MessageLink
from mpidist.collectives.exchange.outbox import Outbox
from mpidist.collectives.kept_memory import KeptMemory
from mpidist.runtime.control import Watch
from mpidist.transports.node_memory import SharedSegments

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

_BYTES = numpy.dtype(numpy.uint8)
_NOTHING = numpy.empty(0, _BYTES)

#: Where one rank gives another so many bytes, rows that are dealt out go by messages: MPI copies them once, shared
#: memory twice.
_SENT_BYTES = 1 << 18

#: An array of more bytes that is dealt out is put into a call slot without the rows that stay on its rank.
_WHOLE_BYTES = 1 << 13

#: Shorter results are made anew each time: no page of them has to be mapped.
_LEAST_BYTES = 1 << 17


def memory_of_results() -> KeptMemory:
    """Return memory for results of any lengths, of which 64 MiB are kept, or three times the longest."""
    return KeptMemory(3, room_bytes=1 << 26, least_bytes=_LEAST_BYTES)


class NodeExchange(ArrayBound):
    """Arrays, or rows of them, from ranks of a node to others, where they are joined in rank order.

    A table says how many rows each rank gives: as one number, if its readers get the same rows, or as one for each
    rank.  A rank shows its row of the table, and a short array itself, in its call slot.  If all arrays are short, that
    is all; longer ones go by messages, which copy them once, or by outboxes, which cost less for many short pieces.

    Arrays are joined along `axis`, in whose length they may differ; without it each is one row.  Only `readers` get
    something, by default all; only `source` gives something, a single row without a table, by default all give.
    `is_dealt`: each rank gets rows of its own, and a call takes an array, or an array and its splits as a tuple.
    `in_place`: results are written into what was given, which is C-contiguous.  `received` is how many rows each rank
    gave this one in the last call.
    """

    #: Of more than 30 attributes in a dict, CPython looks up each.
    __slots__ = tuple(
        "_control _head _heads _in_place _is_short _joined _kept _outbox _own _own_heads _parts _rank _raw _readers "
        "_results _row_bytes _shown _slots _source _stacked _table _takes _transport received".split()
    )

    def __init__(
        self,
        ranks: Communicator,
        segments: SharedSegments,
        call: Call,
        like: Any,
        results: KeptMemory,
        *,
        axis: int | None = None,
        readers: Sequence[int] | None = None,
        source: int | None = None,
        is_dealt: bool = False,
        in_place: bool = False,
    ) -> None:
        super().__init__(ranks, call, like, axis, is_dealt)
        self._control, self._transport, self._results = ranks.control, ranks.transport, results
        self._rank, self._source, self._in_place = ranks.rank, source, in_place
        self._readers = range(ranks.size) if readers is None else readers
        self._takes = ranks.rank in self._readers
        self._row_bytes = prod(self._shape_of(1)) * self._dtype.itemsize
        self._slots = CallSlots(segments, 0 if source is not None else ranks.size if is_dealt else 1)
        self._outbox = Outbox(segments, ranks.rank) if is_dealt else None
        self._heads = self._slots.heads
        self._own_heads = tuple(memoryview(heads[ranks.rank]) for heads in self._heads)
        self._shown: tuple[int, ...] | None = None  # the shape for which the next three are
        self._head = b""
        self._own: tuple[Any, Any] | None = None
        self._kept: tuple[int, int] | None = None
        self._raw = b""  # the table for which the rest is
        self._table: list[list[int]] = []
        self.received: list[int] = []
        self._joined: tuple[int, ...] = ()
        self._is_short = True
        self._parts: tuple[list[Any], list[Any]] = ([], [])
        self._stacked: tuple[Any, Any] | None = None
        if source is not None:
            self._lay_out([[int(giver == source)] for giver in range(ranks.size)])

    def fill(self, given: Any) -> bool:
        """Return True, and show the others what they need; ValueError for another kind of array.  Local."""
        array, splits = given, self.splits
        if self.is_dealt and type(given) is tuple:
            array, splits = given
        if (
            type(array) is not self._type
            or array.shape != self._shown
            or array.dtype != self._dtype
            or splits is not None
        ):
            self._prepare(given, array, splits)
        at = (self._control.call + 1) & 1
        if self._head:
            self._own_heads[at][:] = self._head
        if self._own is not None:
            if self._kept is None:
                self._own[at][...] = array
            else:
                first, last = self._kept
                self._own[at][:first] = array[:first]
                self._own[at][last:] = array[last:]
        return True

    def move(self, watch: Watch, given: Any) -> Any:
        at = watch.call & 1
        if self._head and (raw := self._heads[at].tobytes()) != self._raw:
            self._raw = raw
            self._lay_out(numpy.frombuffer(raw, numpy.int64).reshape(self._size, -1).tolist())
        if self._stacked is not None:
            if not self._in_place:
                return self._stacked[at].copy().reshape(self._joined)
            if self._rank != self._source:
                given[...] = self._stacked[at]
            return given
        array, out = given[0] if type(given) is tuple else given, None
        if self._takes:
            out = given if self._in_place else self._results.array(self._joined, self._dtype)
        if not self._is_short:
            self._move_long(watch, array, out)
        elif self._takes:
            self._join(self._parts[at], array, out)
        return out

    def free_results(self) -> None:
        self._results.free()

    def forget(self) -> None:
        """Look at the next array anew: a signal may have ended `_prepare` halfway.  Local."""
        self._shown = None

    def _prepare(self, given: Any, array: Any, splits: Sequence[int] | None) -> None:
        """Take note of what this rank shows of such an array; ValueError for another kind."""
        self.check(given)
        rank = self._rank
        if self.is_dealt:
            counts = self._splits
        else:
            counts = [int(rank == self._source) if self._axis is None else array.shape[self._axis]]
        nbytes = sum(counts) * self._row_bytes
        self._head = b"" if self._source is not None else numpy.array(counts, numpy.int64).tobytes()
        is_short = 0 < nbytes <= self._slots.room
        self._own = self._slots.view(rank, 0, array.shape, self._dtype, nbytes) if is_short else None
        self._kept = None
        if self.is_dealt and nbytes > _WHOLE_BYTES:
            first = sum(counts[:rank])
            self._kept = first, first + counts[rank]
        self._shown = array.shape if splits is None else None

    def _lay_out(self, table: list[list[int]]) -> None:
        """Take note of how many rows each rank gives, and of where this one finds its own."""
        size, rank, row = self._size, self._rank, self._row_bytes
        self._table = table
        self._is_short = max(map(sum, table)) * row <= self._slots.room
        self.received = [counts[rank if self.is_dealt else 0] for counts in table]
        self._joined = self._shape_of(sum(self.received))
        self._parts, self._stacked = ([], []), None
        if not self._is_short or not self._takes:
            return
        givers = range(size) if self._source is None else (self._source,)
        starts = [sum(counts[:rank]) * row if self.is_dealt else 0 for counts in table]
        views = []
        for giver in givers:
            rows = self.received[giver]
            views.append(self._slots.view(giver, starts[giver], self._shape_of(rows), self._dtype, rows * row))
        self._parts = [even for even, _ in views], [odd for _, odd in views]
        nbytes = sum(self.received) * row
        if self._kept is not None or not (self._in_place or 0 < nbytes < _LEAST_BYTES):
            return
        if len(views) == 1:
            (self._stacked,) = views
        elif self._axis == 0 and len(set(zip(starts, self.received, strict=True))) == 1:
            self._stacked = self._slots.stack(starts[0], self._shape_of(self.received[0]), self._dtype)

    def _join(self, parts: list[Any], array: Any, out: Any) -> None:
        """Write what is in call slots to the result."""
        if self._axis is None:
            out[...] = parts[0]
            return
        if self._kept is not None:
            first, last = self._kept
            parts = [*parts[: self._rank], array[first:last], *parts[self._rank + 1 :]]
        numpy.concatenate(parts, self._axis, out)

    def _move_long(self, watch: Watch, array: Any, out: Any) -> None:
        """Move arrays by messages."""
        rank, counts = self._rank, self._table[self._rank]
        own = byte_view(numpy.ascontiguousarray(array)) if any(counts) else _NOTHING
        bounds = [bound * self._row_bytes for bound in plain.bounds_of(counts)]
        pieces = {each: own[bounds[each] : bounds[each + 1]] if self.is_dealt else own for each in self._readers}
        mine = pieces.pop(rank, None)
        if out is None:
            MessageLink(self._transport).exchange(pieces, {}, watch)
            return
        is_flat = not self._axis
        places = [bound * self._row_bytes for bound in plain.bounds_of(self.received)]
        flat = byte_view(out) if is_flat else self._results.array((places[-1],), _BYTES)
        parts = {each: flat[places[each] : places[each + 1]] for each in range(self._size)}
        own_part = parts.pop(rank)
        copied = None if out is array else partial(numpy.copyto, own_part, mine)
        if not self._traded(watch, pieces, parts, copied):
            MessageLink(self._transport).exchange(pieces, parts, watch, copied)
        if not is_flat:
            rows = zip(places[:-1], places[1:], self.received, strict=True)
            shaped = [flat[start:stop].view(self._dtype).reshape(self._shape_of(each)) for start, stop, each in rows]
            numpy.concatenate(shaped, self._axis, out)

    def _traded(self, watch: Watch, pieces: dict[int, Any], parts: dict[int, Any], copied: Any) -> bool:
        """Move rows by outboxes, if they are the way for so many; return whether they were."""
        if self._outbox is None or not self._outbox.has_parts:
            return False
        table = enumerate(self._table)
        longest = max(max(counts[:giver] + counts[giver + 1 :]) for giver, counts in table) * self._row_bytes
        if longest >= _SENT_BYTES:
            return False

        def take(start: int, shown: dict[int, Any]) -> None:
            for giver, values in shown.items():
                parts[giver][start : start + len(values)] = values

        copied()
        counts = [len(parts.get(giver, ())) for giver in range(self._size)]
        self._outbox.trade(watch, pieces, counts, longest, _BYTES, take)
        return True

    def _shape_of(self, rows: int) -> tuple[int, ...]:
        """Return the shape of so many rows."""
        axis, shape = self._axis, self._shape
        return shape if axis is None else (*shape[:axis], rows, *shape[axis + 1 :])


class CountedExchange(NodeExchange):
    """The same; it returns how many rows each rank gave as well."""

    def move(self, watch: Watch, given: Any) -> tuple[Any, list[int]]:
        return super().move(watch, given), self.received.copy()
