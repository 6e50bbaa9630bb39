"""Which parts of which tensors lie in a span of the flat buffer that they make up.  Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy


class Piece(NamedTuple):
    """A part of one tensor.

    `start` and `stop` are its elements of tensor `member`, in memory order; `part` is the same as a slice, None for the
    whole tensor.
    """

    member: int
    start: int
    stop: int
    part: slice | None

    def of(self, tensors: Sequence[Any]) -> Any:
        """Return the part, flat unless it is the whole tensor."""
        tensor = tensors[self.member]
        return tensor if self.part is None else tensor.reshape(-1)[self.part]


class Pieces:
    """Tensors that lie one after the other in a flat buffer.

    `offsets` say where each begins, in elements, with one more for the end.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self.offsets = tuple(offsets)
        self.elements = self.offsets[-1]
        self.is_single = len(self.offsets) == 2  # then the tensor is the buffer
        self._found: dict[tuple[int, int], list[Piece]] = {}
        self._whole: dict[tuple[int, int], slice | None] = {}

    def within(self, start: int, stop: int) -> list[Piece]:
        """Return the pieces of the buffer's elements from `start` to `stop`; kept for the next time."""
        pieces = self._found.get((start, stop))
        if pieces is None:
            pieces = self._found[start, stop] = self._cut(start, stop)
            # Where no tensor is cut, those between the first and the last are taken without looking at each.
            is_whole = bool(pieces) and all(piece.part is None for piece in pieces)
            self._whole[start, stop] = slice(pieces[0].member, pieces[-1].member + 1) if is_whole else None
        return pieces

    def _cut(self, start: int, stop: int) -> list[Piece]:
        offsets, pieces = self.offsets, []
        for member in range(bisect_right(offsets, start) - 1, len(offsets) - 1):
            begin, end = offsets[member], offsets[member + 1]
            if begin >= stop:
                break
            first, last = max(start, begin) - begin, min(stop, end) - begin
            if first < last:
                whole = last - first == end - begin
                pieces.append(Piece(member, first, last, None if whole else slice(first, last)))
        return pieces

    def gather(self, start: int, stop: int, tensors: Sequence[Any], out: Any) -> None:
        """Copy the elements from `start` to `stop` into the flat `out`, converting to its dtype."""
        pieces = self.within(start, stop)
        if len(pieces) == 1:
            out[...] = pieces[0].of(tensors).reshape(-1)
            return
        if not pieces:  # a rank's share of a span with fewer elements than ranks
            return
        whole = self._whole[start, stop]
        parts = [piece.of(tensors) for piece in pieces] if whole is None else tensors[whole]
        numpy.concatenate(parts, axis=None, out=out)

    def scatter(self, start: int, values: Any, tensors: Sequence[Any]) -> None:
        """Copy flat `values` to where the elements from `start` on lie, converting to the tensors' dtypes."""
        done = 0
        for piece in self.within(start, start + len(values)):
            length = piece.stop - piece.start
            tensors[piece.member].reshape(-1)[piece.start : piece.stop] = values[done : done + length]
            done += length


class SeenByAll(Pieces):
    """Tensors that all ranks see: what a rank puts there, others have.  So there is nothing to copy to or from them."""

    def within(self, start: int, stop: int) -> list[Piece]:
        """Return no pieces."""
        return []


def segments(elements: int, step: int) -> list[tuple[int, int]]:
    """Return (start, stop) of the segments of a buffer, each of `step` elements but the last."""
    return [(start, min(start + step, elements)) for start in range(0, elements, step)]


def shares(length: int, size: int) -> list[int]:
    """Return where the shares of `size` ranks in a segment begin, and one more for the end."""
    return [share * length // size for share in range(size + 1)]


def owned(elements: int, step: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return (start, stop) of this rank's share of every segment."""
    spans = []
    for start, stop in segments(elements, step):
        cuts = shares(stop - start, size)
        spans.append((start + cuts[rank], start + cuts[rank + 1]))
    return spans


#: ``transform(start, values)`` gets reduced values from element `start` on, before others get them.
Transform = Callable[[int, Any], None]


def passed_on(transform: Transform, pieces: Pieces, targets: Sequence[Any]) -> Transform:
    """Return a transform that also leaves in the values what `transform` has put into this rank's targets.  Local."""

    def pass_on(start: int, values: Any) -> None:
        transform(start, values)
        pieces.gather(start, start + len(values), targets, values)

    return pass_on
