"""All-reduce of buffers that lie in memory shared by the ranks of a node: nothing is copied in.

Every rank adds up its share of each segment straight from all ranks' buffers, into a result that all of them see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.arrays import reduction
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.pieces import Pieces, Transform, owned, passed_on
from mpidist.runtime.control import Watch
from mpidist.transports.node_memory import SharedSegments


class SharedSum(BucketReduction):
    """The all-reduce of one buffer a rank.

    `segments` are for their flags.  All ranks see the `buffers`, by rank, and the `result`, which is multiplied by
    `scale` and copied to `targets`, if there are any.
    """

    def __init__(
        self,
        segments: SharedSegments,
        rank: int,
        buffers: Sequence[Any],
        result: Any,
        op: str,
        scale: float | None,
        segment_bytes: int,
        targets: Pieces | None = None,
    ) -> None:
        step, size = max(1, segment_bytes // result.itemsize), len(buffers)
        shares = [owned(len(result), step, each, size) for each in range(size)]
        self.owned = shares[rank]
        self._segments = segments
        self._rank = rank
        self._combine = reduction(op, numpy)
        self._scale = scale
        self._targets = targets
        self._mine = [
            (start, [buffer[start:stop] for buffer in buffers], result[start:stop])
            for start, stop in self.owned
            if start < stop
        ]
        others = [span for each in range(size) if each != rank for span in shares[each]]
        self._theirs = [(start, result[start:stop]) for start, stop in sorted(others) if start < stop]

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """Reduce the buffers; `sources` are not looked at."""
        segments, combine = self._segments, self._combine
        if transform is not None:
            assert self._targets is not None
            transform = passed_on(transform, self._targets, targets)
        turn = segments.turn = segments.turn + 1
        for start, (first, second, *rest), total in self._mine:
            combine(first, second, out=total)
            for values in rest:
                combine(total, values, out=total)
            if self._scale is not None:
                numpy.multiply(total, self._scale, out=total)
            if transform is not None:
                transform(start, total)
        segments.say_filled(self._rank, turn)
        segments.wait(segments.filled_words, turn, watch)
        if self._targets is not None:
            for start, values in self._theirs:
                self._targets.scatter(start, values, targets)
