"""All-reduce of a long buffer through the shared segments of a node, a cache-sized stretch at a time.

Nomenclature.  A *segment* is a stretch of the buffer.  A *turn* numbers segments through all calls, alike on all ranks.
Each rank has some places for segments in shared memory, taken in turn.  In each turn a rank

1. fills its place with its own values, and says so (flag *filled*);
2. takes the reduced values of the turn before, each rank's share from that rank's place, once all said *reduced*;
3. waits until all have filled, reduces its own share of the segment over all ranks into its own place, and says so.

In turn t a rank fills again the place of turn t - `PLACES`.  With three places or more nobody reads that any more: it
has seen all others fill turn t - 1, which they did after they had taken turn t - 3.  Sums are made in rank order, so
their bits do not depend on how the buffer is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from mpidist.arrays import reduction
from mpidist.collectives.pieces import Transform, owned, shares
from mpidist.collectives.pieces import segments as cut_segments
from mpidist.runtime.control import Watch
from mpidist.transports.shared import SharedSegments

#: ``fill(index, place)`` writes this rank's values of segment `index` into `place`, shape (elements of the segment,).
Fill = Callable[[int, Any], None]

#: ``take(start, values)`` gets the reduced values from element `start` on, to copy them out before it returns.
Take = Callable[[int, Any], None]


class _Place(NamedTuple):
    """The places of one turn, for segments of one length.

    Attributes
    ----------
    whole : array
        This rank's place.
    operands : tuple of array
        By rank: its values of this rank's share.
    start : int
        Where this rank's share begins, from the segment's first element.
    mine : array
        Where this rank's share goes when it is reduced.
    shares : tuple of (start, array)
        The shares of the segment, where they are reduced.
    """

    whole: Any
    operands: tuple[Any, ...]
    start: int
    mine: Any
    shares: tuple[tuple[int, Any], ...]


class SegmentPipeline:
    """The all-reduce of `elements` values of `dtype`, bound to the shared segments.

    Parameters
    ----------
    segments : SharedSegments
    rank : int
        Of this process, among those that share the segments.
    elements : int
        At least 1.
    dtype : numpy.dtype
    op : str
        ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.
    scale : float, optional
        What reduced values are multiplied by: a mean is one multiplication, made while they are in cache.
    segment_bytes : int, optional
        Size of a segment; by default all there is room for.

    Attributes
    ----------
    bounds : list of (start, stop)
        The segments, in elements of the buffer.
    owned : list of (start, stop)
        This rank's shares of them.
    """

    def __init__(
        self,
        segments: SharedSegments,
        rank: int,
        elements: int,
        dtype: Any,
        op: str,
        scale: float | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        room = segments.place_bytes if segment_bytes is None else min(segment_bytes, segments.place_bytes)
        step = max(1, room // dtype.itemsize)
        self.bounds = cut_segments(elements, step)
        self._segments = segments
        self._rank = rank
        self._combine = reduction(op, numpy)
        self._scale = scale
        self._dtype = dtype
        size = len(segments.places[0])
        self.owned = owned(elements, step, rank, size)
        self._scratch = numpy.empty(-(-step // size), dtype) if size > 2 else None
        last_start, last_stop = self.bounds[-1]
        self._full = self._places(step)
        self._last = self._places(last_stop - last_start)

    def _places(self, length: int) -> list[_Place]:
        """Return the places of `PLACES` turns for segments of so many elements."""
        nbytes = length * self._dtype.itemsize
        found = []
        for by_rank in self._segments.places:
            values = [place[:nbytes].view(self._dtype) for place in by_rank]
            cuts = shares(length, len(values))
            start, stop = cuts[self._rank], cuts[self._rank + 1]
            operands = tuple(value[start:stop] for value in values)
            reduced = tuple((a, value[a:b]) for a, b, value in zip(cuts[:-1], cuts[1:], values, strict=True) if a < b)
            found.append(_Place(values[self._rank], operands, start, operands[self._rank], reduced))
        return found

    def run(self, watch: Watch, fill: Fill, take: Take, transform: Transform | None = None) -> None:
        """Reduce what `fill` gives, and hand it to `take`; all ranks get the same bits.

        Collective: every rank of the node calls it in the same order, within a begun call.

        Parameters
        ----------
        watch : Watch
            Of the call.
        fill : callable
            Called once for each segment, in order.
        take : callable
            Gets every element once, in any order.  May write where `fill` reads: a segment is taken after it was read.
        transform : callable, optional
            Called once for each of the `owned` stretches that is not empty, in order, when it is reduced; those are not
            taken then, since who has changed them has them already.

        Raises
        ------
        TransportTimeoutError, RankFailedError
        """
        segments, turn = self._segments, self._segments.turn
        before: tuple[_Place, int] | None = None
        for index, (start, _) in enumerate(self.bounds):
            places = self._last if index == len(self.bounds) - 1 else self._full
            place = places[turn % len(places)]
            fill(index, place.whole)
            turn += 1
            segments.say_filled(self._rank, turn)
            if before is not None:
                self._take(*before, take, turn - 1, watch, transform is not None)
            segments.wait(segments.filled_words, turn, watch)
            self._reduce(place)
            if transform is not None and len(place.mine):
                transform(start + place.start, place.mine)
            segments.say_reduced(self._rank, turn)
            before = place, start
        assert before is not None
        self._take(*before, take, turn, watch, transform is not None)
        segments.turn = turn

    def _reduce(self, place: _Place) -> None:
        """Reduce this rank's share in rank order; what is written over has been read by then."""
        first, *others = place.operands
        result = first
        for other in others:
            target = place.mine if other is others[-1] or self._scratch is None else self._scratch[: len(other)]
            self._combine(result, other, out=target)
            result = target
        if self._scale is not None:
            numpy.multiply(place.mine, self._scale, out=place.mine)

    def _take(self, place: _Place, start: int, take: Take, turn: int, watch: Watch, but_mine: bool) -> None:
        self._segments.wait(self._segments.reduced_words, turn, watch)
        # a share without elements begins where the next one does, which is another rank's
        mine = place.start if but_mine and len(place.mine) else None
        for offset, values in place.shares:
            if offset != mine:
                take(start + offset, values)
