"""The memory that ranks of a node see of each other, and the reductions that go through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from mpidist.collectives.bucket_reduction import BucketReduction, Piped
from mpidist.collectives.direct_sum import DirectSum
from mpidist.collectives.lanes import Lanes
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.remote_sum import RemoteSum
from mpidist.collectives.scratch import Scratch
from mpidist.collectives.two_level import TwoLevel
from mpidist.collectives.ways import Way
from mpidist.transports.remote_memory import RemoteMemory
from mpidist.transports.shared import SharedSegments


class NodeMemory(NamedTuple):
    """What the ranks of a node see of each other's memory.

    Attributes
    ----------
    rank, size : int
        Among the ranks of the node.
    segments : SharedSegments or None
    remote : RemoteMemory or None
    lanes : Lanes or None
        What several nodes have instead.
    scratch : Scratch
        For all reductions of this rank.
    """

    rank: int
    size: int
    segments: SharedSegments | None
    remote: RemoteMemory | None
    lanes: Lanes | None
    scratch: Scratch

    def reduction(
        self,
        way: Way,
        sources: Pieces,
        targets: Pieces,
        dtypes: Sequence[Any],
        op: str,
        scale: float | None = None,
        first: int = 0,
        contiguous: bool = True,
    ) -> BucketReduction | None:
        """Return the reduction of a bucket by a way through memory, None for ways that need messages; Local.

        Parameters
        ----------
        way : Way
        sources, targets : Pieces
        dtypes : sequence of three dtypes
            Of the sources, of what is added, and of the targets.
        op : str
        scale : float, optional
        first : int
            How many addresses other buckets of the call have in a rank's table.
        contiguous : bool
            Whether all sources will be: those of `remote_read` must.
        """
        segments, (source, work, result) = self.segments, dtypes
        if not way.segment_bytes or sources.elements == 0:
            return None
        if way.algorithm == "two_level" and self.lanes is not None:
            return Piped(TwoLevel(self.lanes, sources.elements, work, op, scale), sources, targets)
        if segments is None:
            return None
        plain = source == work == result
        segment_bytes = min(way.segment_bytes, segments.room)
        if way.algorithm == "remote_read" and plain and contiguous and self.remote is not None:
            entries = first + RemoteSum.entries(sources, targets)
            if entries * 8 <= segments.segment_bytes:
                stretch_bytes = self.size * segment_bytes
                bound = sources, targets, work, op, scale, stretch_bytes, self.scratch, first
                return RemoteSum(self.remote, segments, self.rank, *bound)
        return DirectSum(segments, self.rank, sources, targets, dtypes, op, scale, segment_bytes, self.scratch)
