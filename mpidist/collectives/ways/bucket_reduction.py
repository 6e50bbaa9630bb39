"""Tensors of one dtype reduced over the ranks as one flat buffer: what all ways have in common.

`SegmentAllReduce` takes one step through shared memory, `DirectSum` many, `SharedSum` finds the values there; `Piped`
goes through a pipeline, which is `TwoLevel`, over several nodes; `PackedReduction` packs tensors into a flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mpidist.collectives.ways.pieces import Pieces, Transform, passed_on
from mpidist.runtime.control import Watch

#: ``fill(index, place)`` writes this rank's values of segment `index` into `place`, shape (elements of the segment,).
Fill = Callable[[int, Any], None]

#: ``take(start, values)`` gets the reduced values from element `start` on, to copy them out before it returns.
Take = Callable[[int, Any], None]


class BucketReduction(Protocol):
    """The all-reduce of some tensors, bound to where they lie in their bucket, not to the tensors.

    `owned` spans are the elements that a `transform` gets on this rank.  ``slot(call)`` is where this rank's values are
    to lie before it begins that call; None for a way that reads the sources.
    """

    owned: list[tuple[int, int]]
    slot: Callable[[int], Any] | None = None

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """Reduce the tensors; all ranks get the same bits.

        Collective: every rank of the node calls it in the same order, within a begun call.

        One after the other the `sources` are the bucket; they are not changed, and not looked at where values lie in a
        slot.  `targets` are likewise, cut in their own way, and may be the sources.  `transform` is called for each of
        the `owned` spans that is not empty, in order, with an array that it may use up; it puts into this rank's
        targets what all ranks get there.
        """


class Pipeline(Protocol):
    """Reduces a buffer span by span."""

    bounds: list[tuple[int, int]]
    owned: list[tuple[int, int]]

    def run(self, watch: Watch, fill: Fill, take: Take, transform: Transform | None = None) -> None:
        """Reduce what `fill` gives, and hand it to `take`; all ranks get the same bits.

        Collective: every rank of the node calls it in the same order, within a begun call.  `fill` is called once for
        each segment, in order.  `take` gets every element once, in any order, and may write where `fill` reads: a
        segment is taken after it was read.  `transform` is called once for each of the `owned` spans that is not empty,
        in order, when it is reduced; those are not taken, since who has changed them has them already.
        """


class Piped(BucketReduction):
    """Tensors that go through a pipeline."""

    def __init__(self, pipeline: Pipeline, sources: Pieces, targets: Pieces) -> None:
        self.owned = pipeline.owned
        self._pipeline = pipeline
        self._sources = sources
        self._targets = targets

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """Reduce the tensors."""
        bounds, pieces, places = self._pipeline.bounds, self._sources, self._targets

        def fill(index: int, place: Any) -> None:
            pieces.gather(*bounds[index], sources, place)

        def take(start: int, values: Any) -> None:
            places.scatter(start, values, targets)

        self._pipeline.run(watch, fill, take, transform and passed_on(transform, places, targets))
