"""The arrays of all ranks joined, on all of them or on one: all_gather and gather, bound."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import numpy

from mpidist.arrays import byte_view
from mpidist.collectives.call import Call
from mpidist.collectives.exchange import plain
from mpidist.collectives.exchange.array_bound import ArrayBound, SentCollective
from mpidist.collectives.exchange.call_slots import CallSlots
from mpidist.collectives.exchange.own_results import LEAST_BYTES, OwnResults
from mpidist.collectives.ranks import Ranks
from mpidist.runtime.control import Watch
from mpidist.transports.node_memory import SharedSegments


def bind_gather(
    ranks: Ranks,
    segments: SharedSegments | None,
    like: Any,
    axis: int,
    root: int | None,
    results: OwnResults,
) -> ArrayBound:
    """Return the gathering of arrays like this one; Local.

    Parameters
    ----------
    ranks : Ranks
    segments : SharedSegments or None
        Of all ranks, for arrays of the host; None for messages.
    like : array
    axis : int
        In whose length ranks may differ.
    root : int or None
        The rank that gets the result; None for all.
    results : OwnResults
    """
    others = [-1 if index == axis else length for index, length in enumerate(like.shape)]
    name = f"all_gather(axis={axis})" if root is None else f"gather(root={root}, axis={axis})"
    call = Call(name, [("", like.dtype, others)])
    if segments is not None:
        return NodeGather(ranks, segments, call, like, axis, root, results)
    move = partial(plain.gather, axis=axis, root=root)
    return SentCollective(ranks, call, like, axis, move)


class NodeGather(ArrayBound):
    """The gathering on a node.

    A rank shows the length of its axis, and a short array itself, in its call slot.  If all are short, that is all;
    longer ones go by messages, which copy them once.
    """

    def __init__(
        self,
        ranks: Ranks,
        segments: SharedSegments,
        call: Call,
        like: Any,
        axis: int,
        root: int | None,
        results: OwnResults,
    ) -> None:
        super().__init__(ranks, call, like, axis)
        self._control, self._rank, self._size = ranks.control, ranks.rank, ranks.size
        self._transport = ranks.transport
        self._at_axis, self._results = axis, results
        self._takes = root in (None, ranks.rank)
        self._readers = range(ranks.size) if root is None else (root,)
        self._row_bytes = prod((*self._shape[:axis], *self._shape[axis + 1 :])) * self._dtype.itemsize
        self._slots = CallSlots(segments, 1)
        self._words = self._slots.words
        self._own_words = tuple(words[self._rank] for words in self._words)
        self._shown: tuple[int, ...] | None = None  # the shape for which `_own` is
        self._own: tuple[Any, Any] | None = None
        self._own_length = 0
        self._lengths: list[int] = []  # those for which the rest is
        self._by_parity: tuple[list[Any], list[Any]] = ([], [])
        self._stacked: tuple[Any, Any] | None = None
        self._joined: tuple[int, ...] = ()
        self._is_short = True

    def fill(self, array: Any) -> bool:
        """Return True, and put the length, and a short array, into the call slot.  Local."""
        if type(array) is not self._type:
            raise self.refused(array)
        shape, at = array.shape, (self._control.call + 1) & 1
        if shape != self._shown or array.dtype != self._dtype:
            self.check(array)
            self._shown, length = shape, shape[self._at_axis]
            nbytes, self._own_length = length * self._row_bytes, length
            is_short = nbytes <= self._slots.room
            self._own = self._slots.view(self._rank, 0, shape, self._dtype, nbytes) if is_short else None
        self._own_words[at][0] = self._own_length
        if self._own is not None:
            self._own[at][...] = array
        return True

    def move(self, watch: Watch, array: Any) -> Any:
        at = watch.call & 1
        lengths = [words[0] for words in self._words[at]]
        if lengths != self._lengths:
            self._lay_out(lengths)
        if not self._is_short:
            return self._move_long(watch, array)
        if not self._takes:
            return None
        if self._stacked is not None:
            return self._stacked[at].copy().reshape(self._joined)
        out = self._results.array(self._joined, self._dtype)
        numpy.concatenate(self._by_parity[at], self._at_axis, out)
        return out

    def _shape_of(self, length: int) -> tuple[int, ...]:
        axis, shape = self._at_axis, self._shape
        return (*shape[:axis], length, *shape[axis + 1 :])

    def _lay_out(self, lengths: list[int]) -> None:
        """Take note of what each rank has."""
        self._lengths = lengths
        self._joined = self._shape_of(sum(lengths))
        self._is_short = max(lengths) * self._row_bytes <= self._slots.room
        if self._is_short:
            views = [
                self._slots.view(rank, 0, self._shape_of(length), self._dtype, length * self._row_bytes)
                for rank, length in enumerate(lengths)
            ]
            self._by_parity = ([even for even, _ in views], [odd for _, odd in views])
        nbytes = sum(lengths) * self._row_bytes
        is_stack = self._is_short and self._at_axis == 0 and len(set(lengths)) == 1 and 0 < nbytes < LEAST_BYTES
        self._stacked = self._slots.stack(0, self._shape_of(lengths[0]), self._dtype) if is_stack else None

    def _move_long(self, watch: Watch, array: Any) -> Any:
        """Move arrays by messages."""
        counts = [length * self._row_bytes for length in self._lengths]
        bounds = [sum(counts[:rank]) for rank in range(self._size + 1)]
        own = byte_view(numpy.ascontiguousarray(array))
        gives = {reader: own for reader in self._readers if reader != self._rank}
        if not self._takes:
            plain.exchange(self._transport, gives, {}, watch)
            return None
        out = self._results.array(self._joined, self._dtype)
        flat = byte_view(out) if self._at_axis == 0 else self._results.array((bounds[-1],), numpy.dtype(numpy.uint8))
        parts = [flat[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        places = {rank: part for rank, part in enumerate(parts) if rank != self._rank}
        plain.exchange(self._transport, gives, places, watch, partial(numpy.copyto, parts[self._rank], own))
        if self._at_axis:
            rows = zip(parts, self._lengths, strict=True)
            shaped = [part.view(self._dtype).reshape(self._shape_of(length)) for part, length in rows]
            numpy.concatenate(shaped, self._at_axis, out)
        return out
