"""Rows from every rank to every rank: all_to_all, bound."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from operator import index
from typing import Any

import numpy

from mpidist.arrays import byte_view
from mpidist.collectives.call import Call
from mpidist.collectives.exchange import plain
from mpidist.collectives.exchange.array_bound import ArrayBound
from mpidist.collectives.exchange.call_slots import CallSlots
from mpidist.collectives.exchange.outbox import Outbox
from mpidist.collectives.exchange.own_results import LEAST_BYTES, OwnResults
from mpidist.collectives.ranks import Ranks
from mpidist.runtime.control import Watch
from mpidist.transports.node_memory import SharedSegments

_BYTES = numpy.dtype(numpy.uint8)

#: Where one rank gives another so many bytes, all go by messages: MPI copies them once, shared memory twice.
_SENT_BYTES = 1 << 18

#: An array of more bytes is put into a call slot without the rows that stay on its rank.
_WHOLE_BYTES = 1 << 13


def checked_splits(rows: int, splits: Sequence[int] | None, size: int) -> list[int]:
    """Return how many rows each rank gets; equal parts by default.  Local.

    Raises
    ------
    ValueError
        There is not one split a rank, one is negative, or they do not add up to `rows`; without splits, `rows` is no
        multiple of `size`.
    TypeError
        A split is no whole number.
    """
    if splits is None:
        if rows % size:
            raise ValueError(
                f"all_to_all of {rows} rows on {size} ranks: they cannot be dealt out evenly; pass splits, the number "
                "of rows for each rank"
            )
        return [rows // size] * size
    found = [index(each) for each in splits]
    if len(found) != size:
        raise ValueError(f"all_to_all on {size} ranks got {len(found)} splits; give the number of rows for each rank")
    if min(found) < 0:
        raise ValueError(f"all_to_all got the splits {found}; the number of rows for a rank cannot be negative")
    if sum(found) != rows:
        raise ValueError(f"all_to_all got splits of {sum(found)} rows, {found}, for an array of {rows} rows")
    return found


class AllToAll(ArrayBound):
    """The exchange of rows: bound to the dtype and to the shape of a row.

    It is called with an array, or with an array and its splits as a tuple.  It returns the rows that this rank got, in
    rank order, and how many each rank gave.

    Parameters
    ----------
    ranks : Ranks
    like : array, at least one dimension
    """

    def __init__(self, ranks: Ranks, like: Any) -> None:
        super().__init__(ranks, Call("all_to_all", [("", like.dtype, [-1, *like.shape[1:]])]), like, 0)
        self._rank, self._size, self._transport = ranks.rank, ranks.size, ranks.transport
        self._splits: list[int] = []
        self._even: list[int] = []
        self._even_shape: tuple[int, ...] | None = None  # for which `_even` is

    def fill(self, given: Any) -> bool:
        """Return True, and show the others what is short enough; ValueError for another kind of array.  Local."""
        self.check(given)
        self.show(given[0] if type(given) is tuple else given)
        return True

    def check(self, given: Any) -> None:
        """Raise ValueError for another kind of array, or for wrong splits.  Local."""
        array, splits = given if type(given) is tuple else (given, None)
        super().check(array)
        if splits is None:
            if array.shape != self._even_shape:
                self._even, self._even_shape = checked_splits(len(array), None, self._size), array.shape
            self._splits = self._even
        else:
            self._splits = checked_splits(len(array), splits, self._size)

    def move(self, watch: Watch, given: Any) -> tuple[Any, list[int]]:
        array = given[0] if type(given) is tuple else given
        return plain.all_to_all(self._transport, array, self._splits, watch)


class NodeAllToAll(AllToAll):
    """The same on a node.

    A rank shows its splits, and a short array itself, in its call slot.  If all are short, that is all; longer ones go
    through the outboxes, the longest by messages.
    """

    def __init__(self, ranks: Ranks, segments: SharedSegments, like: Any, results: OwnResults) -> None:
        super().__init__(ranks, like)
        self._control, self._results = ranks.control, results
        self._row_bytes = prod(self._shape[1:]) * self._dtype.itemsize
        self._slots = CallSlots(segments, ranks.size)
        self._words = tuple([words[: ranks.size] for words in each] for each in self._slots.words)
        self._own_words = tuple(each[ranks.rank] for each in self._words)
        self._outbox = Outbox(segments, ranks.rank)
        self._shown: tuple[int, ...] | None = None  # the shape for which `_own` is
        self._own: tuple[Any, Any] = (None, None)
        self._table: list[list[int]] = []  # the splits of all ranks, for which the rest is
        self._received: list[int] = []
        self._by_parity: tuple[list[Any], list[Any]] = ([], [])
        self._stacked: tuple[Any, Any] | None = None
        self._got: tuple[int, ...] = ()
        self._is_short = True

    def show(self, array: Any) -> None:
        """Put the splits, and a short array, into the call slot.  Local."""
        at, shape = (self._control.call + 1) & 1, array.shape
        words = self._own_words[at]
        for rank, rows in enumerate(self._splits):
            words[rank] = rows
        nbytes = shape[0] * self._row_bytes
        if nbytes <= self._slots.room:
            if shape != self._shown:
                self._own = self._slots.view(self._rank, 0, shape, self._dtype, nbytes)
                self._shown = shape
            if nbytes <= _WHOLE_BYTES:
                self._own[at][...] = array
            else:
                first = sum(self._splits[: self._rank])
                last = first + self._splits[self._rank]
                self._own[at][:first] = array[:first]
                self._own[at][last:] = array[last:]

    def move(self, watch: Watch, given: Any) -> tuple[Any, list[int]]:
        at = watch.call & 1
        table = [words.tolist() for words in self._words[at]]
        if table != self._table:
            self._lay_out(table)
        array = given[0] if type(given) is tuple else given
        if self._stacked is not None and array.nbytes <= _WHOLE_BYTES:
            return self._stacked[at].copy().reshape(self._got), self._received.copy()
        out = self._results.array(self._got, self._dtype)
        if self._is_short:
            parts, rank, first = self._by_parity[at], self._rank, sum(self._splits[: self._rank])
            own = array[first : first + self._splits[rank]]
            numpy.concatenate([*parts[:rank], own, *parts[rank + 1 :]], 0, out)
        else:
            self._move_long(watch, array, out)
        return out, self._received.copy()

    def _lay_out(self, table: list[list[int]]) -> None:
        """Take note of what each rank gives to each."""
        self._table, rank, row = table, self._rank, self._row_bytes
        self._received = [splits[rank] for splits in table]
        self._is_short = max(map(sum, table)) * row <= self._slots.room
        if self._is_short:
            views = []
            for other, splits in enumerate(table):
                shape = (splits[rank], *self._shape[1:])
                views.append(self._slots.view(other, sum(splits[:rank]) * row, shape, self._dtype, shape[0] * row))
            self._by_parity = ([even for even, _ in views], [odd for _, odd in views])
        self._got = (sum(self._received), *self._shape[1:])
        first, nbytes = sum(table[0][:rank]) * row, self._got[0] * row
        is_stack = self._is_short and all(each == table[0] for each in table) and 0 < nbytes < LEAST_BYTES
        shape = (self._received[0], *self._shape[1:])
        self._stacked = self._slots.stack(first, shape, self._dtype) if is_stack else None

    def _move_long(self, watch: Watch, array: Any, out: Any) -> None:
        own, flat, row, rank = byte_view(numpy.ascontiguousarray(array)), byte_view(out), self._row_bytes, self._rank
        bounds, places = plain.bounds_of(self._splits), plain.bounds_of(self._received)
        gives = [own[start * row : stop * row] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        counts = [0 if other == rank else rows * row for other, rows in enumerate(self._received)]
        pairs = [(giver, getter) for giver in range(self._size) for getter in range(self._size) if giver != getter]
        longest = max(self._table[giver][getter] for giver, getter in pairs) * row
        parts = [flat[start * row : stop * row] for start, stop in zip(places[:-1], places[1:], strict=True)]
        if longest >= _SENT_BYTES:
            others = [other for other in range(self._size) if other != rank]
            sent, received = ({other: each[other] for other in others} for each in (gives, parts))
            plain.exchange(self._transport, sent, received, watch, partial(numpy.copyto, parts[rank], gives[rank]))
            return
        parts[rank][...] = gives[rank]

        def take(start: int, shown: dict[int, Any]) -> None:
            for other, values in shown.items():
                first = places[other] * row + start
                flat[first : first + len(values)] = values

        self._outbox.trade(watch, gives, counts, longest, _BYTES, take)
