"""All-reduce between two ranks of a node in which both add up everything themselves.

Each rank copies a segment of its values into shared memory, and adds its own and the other's straight into the result
while both are in cache: two passes over the data, where shares (see `segment_pipeline`) take two and a half, and half
as many flags to wait for.  Both ranks add rank 0's values to rank 1's, in this order: they get the same bits.

Turns and places are those of `segment_pipeline`.  In turn t a rank fills again the place of turn t - `PLACES`.  It has
seen the other fill turn t - 2, which the other did after it had added up turn t - 4; with four places nobody reads that
any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.arrays import reduction
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.pieces import Pieces, Transform
from mpidist.collectives.pieces import segments as cut_segments
from mpidist.runtime.control import Watch
from mpidist.transports.shared import SharedSegments


class DirectSum(BucketReduction):
    """The all-reduce of tensors of `dtype` between two ranks.

    Parameters
    ----------
    segments : SharedSegments
        Of two ranks.
    rank : int
    sources : Pieces
    dtype : numpy.dtype
        Of sources and target.
    op : str
        ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.
    scale : float, optional
        What reduced values are multiplied by.
    segment_bytes : int
        Size of a segment.
    """

    #: It has no shares to transform.
    owned: list[tuple[int, int]] = []

    def __init__(
        self,
        segments: SharedSegments,
        rank: int,
        sources: Pieces,
        dtype: Any,
        op: str,
        scale: float | None,
        segment_bytes: int,
    ) -> None:
        step = max(1, min(segment_bytes, segments.place_bytes) // dtype.itemsize)
        self._segments = segments
        self._rank = rank
        self._sources = sources
        self._combine = reduction(op, numpy)
        self._scale = scale
        self._bounds = cut_segments(sources.elements, step)
        self._theirs = (segments.filled_words[1 - rank],)
        self._places = [[place.view(dtype) for place in by_rank] for by_rank in segments.places]

    def prepare(self, call: int, sources: Sequence[Any], targets: Sequence[Any]) -> None:
        """There is nothing to prepare."""

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """Reduce the tensors into ``targets[0]``, shape (elements,); there is nothing to transform."""
        segments, rank, places, (out,) = self._segments, self._rank, self._places, targets
        turn = segments.turn
        before = -1
        for start, stop in self._bounds:
            self._sources.gather(start, stop, sources, places[turn % len(places)][rank][: stop - start])
            turn += 1
            segments.say_filled(rank, turn)
            if before >= 0:
                self._add(turn - 1, before, start, out, watch)
            before = start
        self._add(turn, before, self._sources.elements, out, watch)
        segments.turn = turn

    def _add(self, turn: int, start: int, stop: int, out: Any, watch: Watch) -> None:
        """Add up the segment of the turn before `turn`."""
        first, second = self._places[(turn - 1) % len(self._places)]
        target = out[start:stop]
        self._segments.wait(self._theirs, turn, watch)
        self._combine(first[: stop - start], second[: stop - start], out=target)
        if self._scale is not None:
            numpy.multiply(target, self._scale, out=target)
