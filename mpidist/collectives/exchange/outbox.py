"""Long arrays between the ranks of a node, without a message: each rank shows each other one its part, piece by piece.

A rank's *outbox* are its places in shared memory, which it fills in turn.  After it has filled one it sets a flag.
The others copy the values out, or add them up, and set a flag too.  A place is filled again when all who read it have
set that flag, and nobody reads it after the call.  Turns are counted together with those of `DirectSum`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidist.runtime.control import Watch
from mpidist.runtime.shared_memory import LINE_BYTES
from mpidist.transports.node_memory import SharedSegments

#: Bytes that a rank shows to the others at a time, each its part, where a place has room for them; and how many such
#: pieces take turns: writer and readers then need not wait for each other.
_PARTS_BYTES, _DEPTH = 1 << 19, 4


class Outbox:
    """The outboxes of a node's ranks, as one of them uses them.  `rank` is that among those that share the segments."""

    def __init__(self, segments: SharedSegments, rank: int) -> None:
        self._segments, self._rank = segments, rank
        self._size = len(segments.filled_words)
        self._others = [each for each in range(self._size) if each != rank]
        parts_bytes = min(_PARTS_BYTES, segments.place_bytes)
        self._rings = [
            [places[owner, :parts_bytes] for places in segments.places[:_DEPTH]] for owner in range(self._size)
        ]
        self._depth = len(self._rings[0])
        self._part_bytes = parts_bytes // max(1, self._size - 1) // LINE_BYTES * LINE_BYTES

    @property
    def has_parts(self) -> bool:
        """Whether there is room for values of each other rank."""
        return self._part_bytes > 0

    def trade(
        self,
        watch: Watch,
        gives: Sequence[Any] | Mapping[int, Any],
        counts: Sequence[int],
        longest: int,
        dtype: Any,
        take: Callable[[int, dict[int, Any]], object],
    ) -> None:
        """Show each other rank values of its own, and read what the others show this one.

        Collective: every rank of the node calls it in the same order, within a begun call.  Rank r gets ``gives[r]``,
        converted to `dtype`, and shows this one ``counts[r]`` elements.  `longest`, the most elements that any rank
        shows another, is the same on all ranks.  ``take(start, values)`` is given what the others show, by rank, from
        their elements `start` on.
        """
        segments, rank, others, depth = self._segments, self._rank, self._others, self._depth
        step = self._part_bytes // dtype.itemsize
        base, turns = segments.turn, -(-longest // step)
        filled, reduced = (
            [words[each] for each in others] for words in (segments.filled_words, segments.reduced_words)
        )
        for index in range(turns + 1):
            if index < turns:
                if index >= depth:
                    segments.wait(reduced, base + index + 1 - depth, watch)
                for other in others:
                    piece = gives[other][index * step : (index + 1) * step]
                    self._part(rank, other, index, len(piece), dtype)[...] = piece
                segments.say_filled(rank, base + index + 1)
            if index:
                start = (index - 1) * step
                segments.wait(filled, base + index, watch)
                lengths = {each: min(step, counts[each] - start) for each in others if counts[each] > start}
                take(start, {each: self._part(each, rank, index - 1, lengths[each], dtype) for each in lengths})
                segments.say_reduced(rank, base + index)
        segments.wait(reduced, base + turns, watch)
        segments.turn = base + turns

    def _part(self, owner: int, reader: int, index: int, length: int, dtype: Any) -> Any:
        """Return where one rank shows another so many elements."""
        first = (reader - (reader > owner)) * self._part_bytes
        return self._rings[owner][index % self._depth][first : first + length * dtype.itemsize].view(dtype)
