"""All-reduce inside a node: every rank adds up one segment of each stripe, straight from the others' places.

The buffer is cut into stripes, and a stripe into as many segments as there are ranks.  Each rank adds up one segment
of each stripe.  For every stripe a rank

1. fills: it copies its values of the others' segments into its places in shared memory, one place for each other rank;
2. reduces: it adds the values in the others' places to its own, in rank order, straight into its result, and writes the
   sums over the values that it has read;
3. takes: it copies the others' sums out of its own places.

After steps 1 and 2 a rank sets a flag.  Its own values of its own segment are never copied into shared memory.  A place
is written and read by the same two cores, a whole segment at a time: this is quick also where cores share no cache.

A rank fills its places again when all others have reduced and it has taken their sums.  Two ranks have places for two
turns, so one rank fills the next places while it waits for the other.  More ranks have places for one turn: the fewer
places are in use, the more of them stay in cache.  After a call nobody but its owner reads or writes a place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy

from mpidist.arrays import reduction
from mpidist.collectives.observer import NOBODY, Observer
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.pieces import Pieces, Transform, owned
from mpidist.collectives.ways.scratch import Scratch
from mpidist.runtime.control import Watch
from mpidist.runtime.trace_kinds import PACK, UNPACK
from mpidist.transports.node_memory import SharedSegments

#: Tensors of which a segment has pieces shorter than this on average, in bytes, are put together before they are added.
_SHORT_BYTES = 1 << 14


class Part(NamedTuple):
    """Values that are added at one go.

    `member` is the tensor in which this rank's own lie; None for all of a segment, which are put together first.
    `elements` are those of the tensor, or of the buffer if a segment is put together; `where` counts the same from
    where the segment begins.  `below` and `above` have what the ranks before this one, and after it, put there.
    """

    member: int | None
    elements: slice
    where: slice
    below: tuple[Any, ...]
    above: tuple[Any, ...]


class Stripe(NamedTuple):
    """What the ranks do together in one turn.

    This rank adds up the elements from `start` to `stop`.  By other rank, `got` is where it puts its values of them and
    finds their sums; `given` has the elements that it adds up, and where this rank puts its values and finds the sums.
    """

    start: int
    stop: int
    got: tuple[Any, ...]
    given: tuple[tuple[int, int, Any], ...]


class DirectSum(BucketReduction):
    """The all-reduce of tensors over the ranks of a node.

    `dtypes` are those of the sources, of what is added, and of the targets; reduced values are multiplied by `scale`.
    `segment_bytes` is the size of a segment, if there is room for it.  `observer` is told when a stripe is packed and
    handed out.
    """

    def __init__(
        self,
        segments: SharedSegments,
        rank: int,
        sources: Pieces,
        targets: Pieces,
        dtypes: Sequence[Any],
        op: str,
        scale: float | None,
        segment_bytes: int,
        scratch: Scratch,
        observer: Observer = NOBODY,
    ) -> None:
        source, work, result = dtypes
        size = len(segments.filled_words)
        step = size * max(1, min(segment_bytes, segments.room) // work.itemsize)
        shares = [owned(sources.elements, step, each, size) for each in range(size)]
        others = [each for each in range(size) if each != rank]
        self.owned = shares[rank]
        self._segments = segments
        self._rank = rank
        self._sources, self._targets = sources, targets
        self._combine = reduction(op, numpy)
        self._scale = scale
        # With that many elements a piece is added where it lies; one of another dtype is not.
        self._short = _SHORT_BYTES // work.itemsize if source == work else sources.elements + 1
        self._is_flat = targets.is_single and work == result
        longest = max(stop - start for start, stop in self.owned)
        self._sums, self._own = scratch.array((2, longest), work)
        self._filled = tuple(segments.filled_words[each] for each in others)
        self._reduced = tuple(segments.reduced_words[each] for each in others)
        self._is_deep = segments.depth > 1
        self._fill, self._take = observer.stripe(PACK, _filling(sources)), observer.stripe(UNPACK, _taking(targets))
        self._parts: dict[int, list[Part]] = {}  # by where a segment begins, once it is added up
        turns = range(segments.depth)
        given = [[segments.between(rank, each, turn).view(work) for each in others] for turn in turns]
        got = [[segments.between(each, rank, turn).view(work) for each in others] for turn in turns]
        self._stripes = [
            _stripe(cuts[rank], [cuts[each] for each in others], got[index % len(got)], given[index % len(given)])
            for index, cuts in enumerate(zip(*shares, strict=True))
        ]

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """Reduce the tensors."""
        segments, rank = self._segments, self._rank
        turn, before = segments.turn, None
        for stripe in self._stripes:
            if before is not None and not self._is_deep:
                self._take_when_reduced(before, turn, targets, watch)
            self._fill(stripe, sources)
            turn += 1
            segments.say_filled(rank, turn)
            if before is not None and self._is_deep:
                self._take_when_reduced(before, turn - 1, targets, watch)
            segments.wait(self._filled, turn, watch)
            if stripe.start < stripe.stop:
                if transform is None:
                    self._reduce(stripe, sources, targets)
                else:
                    self._change(stripe, sources, targets, transform)
            segments.say_reduced(rank, turn)
            before = stripe
        assert before is not None
        self._take_when_reduced(before, turn, targets, watch)
        segments.turn = turn

    def _take_when_reduced(self, stripe: Stripe, turn: int, targets: Sequence[Any], watch: Watch) -> None:
        self._segments.wait(self._reduced, turn, watch)
        self._take(stripe, targets)

    def _reduce(self, stripe: Stripe, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """Add up this rank's segment into its result, and hand it on."""
        start, stop = stripe.start, stripe.stop
        is_direct = self._is_flat and not (self._rank > 1 and numpy.may_share_memory(targets[0], sources[0]))
        # In place, the sum of the ranks before this one would take the place of its own values.
        sums = targets[0].reshape(-1)[start:stop] if is_direct else self._sums[: stop - start]
        self._add(stripe, sources, sums)
        for place in stripe.got:
            place[...] = sums
        if not is_direct:
            self._targets.scatter(start, sums, targets)

    def _change(self, stripe: Stripe, sources: Sequence[Any], targets: Sequence[Any], transform: Transform) -> None:
        """Add up this rank's segment, and hand on what `transform` makes of it."""
        start, stop, (first, *others), _ = stripe
        sums = self._sums[: stop - start]
        self._add(stripe, sources, sums)
        transform(start, sums)
        if self._targets.within(start, stop):
            self._targets.gather(start, stop, targets, first)
            for place in others:
                place[...] = first

    def _add(self, stripe: Stripe, sources: Sequence[Any], out: Any) -> None:
        """Reduce this rank's own values of its segment and what it got, in rank order."""
        combine, parts = self._combine, self._parts.get(stripe.start)
        if parts is None:
            parts = self._parts[stripe.start] = self._cut(stripe)
        for member, elements, where, below, above in parts:
            if member is None:
                own = self._own[where]
                self._sources.gather(elements.start, elements.stop, sources, own)
            else:
                own = sources[member].reshape(-1)[elements]
            values, sums = [*below, own, *above], out[where]
            combine(values[0], values[1], out=sums)
            for other in values[2:]:
                combine(sums, other, out=sums)
        if self._scale is not None:
            numpy.multiply(out, self._scale, out=out)

    def _cut(self, stripe: Stripe) -> list[Part]:
        """Return in what parts this rank adds up its segment."""
        start, stop, got, _ = stripe
        pieces, rank = self._sources.within(start, stop), self._rank
        if stop - start < self._short * len(pieces):
            return [Part(None, slice(start, stop), slice(0, stop - start), got[:rank], got[rank:])]
        parts, done = [], 0
        for piece in pieces:
            where = slice(done, done + piece.stop - piece.start)
            below, above = (tuple(place[where] for place in places) for places in (got[:rank], got[rank:]))
            parts.append(Part(piece.member, slice(piece.start, piece.stop), where, below, above))
            done = where.stop
        return parts


def _filling(pieces: Pieces) -> Callable[[Stripe, Sequence[Any]], None]:
    """Return what puts values in place for the ranks that add them up."""

    def fill(stripe: Stripe, sources: Sequence[Any]) -> None:
        for start, stop, place in stripe.given:
            pieces.gather(start, stop, sources, place)

    return fill


def _taking(pieces: Pieces) -> Callable[[Stripe, Sequence[Any]], None]:
    """Return what copies the others' sums, which are there, to where they belong."""

    def take(stripe: Stripe, targets: Sequence[Any]) -> None:
        for start, _, sums in stripe.given:
            pieces.scatter(start, sums, targets)

    return take


def _stripe(mine: tuple[int, int], theirs: Sequence[tuple[int, int]], got: list[Any], given: list[Any]) -> Stripe:
    """Return a stripe of which these are the bounds; places are cut to them."""
    start, stop = mine
    puts = [(first, last, place[: last - first]) for (first, last), place in zip(theirs, given, strict=True)]
    return Stripe(start, stop, tuple(place[: stop - start] for place in got), tuple(puts))
