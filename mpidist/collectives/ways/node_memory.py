"""The memory that ranks of a node see of each other, and the reductions that go through it."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

from mpidist.collectives.observer import NOBODY, Observer
from mpidist.collectives.ways.bucket_reduction import BucketReduction, Piped
from mpidist.collectives.ways.direct_sum import DirectSum
from mpidist.collectives.ways.lanes import Lanes
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.scratch import Scratch
from mpidist.collectives.ways.selection import Way
from mpidist.collectives.ways.shared_memory import PlaceAllReduce, SegmentAllReduce, ShareAllReduce
from mpidist.collectives.ways.two_level import TwoLevel
from mpidist.transports.node_memory import SharedSegments

#: In one step through shared memory every rank reads the values of all ranks; from so many bytes on each reads a share.
_MOST_BYTES_READ = 1 << 22


class NodeMemory(NamedTuple):
    """What the ranks of a node see of each other's memory, and the reductions that go through it.

    `rank` is that among the ranks of the node; several nodes have `lanes` instead.  `scratch` is for all reductions of
    this rank.
    """

    rank: int
    segments: SharedSegments | None
    lanes: Lanes | None
    scratch: Scratch
    observer: Observer = NOBODY

    def small(
        self, shape: tuple[int, ...], dtype: Any, op: str, scale: float | None = None, targets: Pieces | None = None
    ) -> BucketReduction | None:
        """Return the all-reduce in one step through shared memory, if it is the one for such arrays; Local.

        Parameters as for `SegmentAllReduce`.
        """
        segments = self.segments
        if segments is None:
            return None
        nbytes, size = prod(shape) * dtype.itemsize, len(segments.filled_words)
        if nbytes > segments.place_bytes:
            return None
        if nbytes <= segments.segment_bytes and nbytes * size <= _MOST_BYTES_READ:
            kind: type[SegmentAllReduce] = SegmentAllReduce
        else:
            kind = PlaceAllReduce if size == 2 else ShareAllReduce
        return self.observer.reduction(kind(segments, self.rank, shape, dtype, op, scale, targets))

    def reduction(
        self,
        way: Way,
        sources: Pieces,
        targets: Pieces,
        dtypes: Sequence[Any],
        op: str,
        scale: float | None = None,
    ) -> BucketReduction | None:
        """Return the reduction of a bucket by a way through memory, None for ways that need messages; Local.

        `dtypes` are those of the sources, of what is added, and of the targets.
        """
        if not way.segment_bytes or sources.elements == 0:
            return None
        if way.algorithm == "two_level" and self.lanes is not None:
            waves = TwoLevel(self.lanes, sources.elements, dtypes[1], op, scale, on_wave=self.observer.wave)
            return self.observer.reduction(Piped(self.observer.pipeline(waves), sources, targets))
        if self.segments is None:
            return None
        segment_bytes = min(way.segment_bytes, self.segments.room)
        places = self.segments, self.rank, sources, targets
        direct = DirectSum(*places, dtypes, op, scale, segment_bytes, self.scratch, self.observer)
        return self.observer.reduction(direct)
