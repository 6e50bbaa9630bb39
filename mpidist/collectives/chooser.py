"""Which ways of an all-reduce there are for a rank, which is taken, and what a way is bound to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.collectives import selection
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.header import Header
from mpidist.collectives.lanes import Lanes
from mpidist.collectives.messages import Messages, Replay
from mpidist.collectives.node_memory import NodeMemory
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.plain import PlainCollectives
from mpidist.collectives.scratch import Scratch
from mpidist.collectives.selection import SEGMENTED, Way
from mpidist.collectives.shared_memory import PlaceAllReduce, SegmentAllReduce, ShareAllReduce
from mpidist.schedules.table import algorithm as schedule_of
from mpidist.transports import World

#: In one step through shared memory every rank reads the values of all ranks; from so many bytes on each reads a share.
_MOST_BYTES_READ = 1 << 22

#: Sizes in bytes from which on a pack is closed: never where segments are the unit of work; as a message otherwise.
ONE_PACK, _MESSAGE_PACK = 1 << 62, 1 << 22


class Chooser(PlainCollectives):
    """A rank that may reduce in several ways.

    Parameters
    ----------
    world : World

    Attributes
    ----------
    segments : SharedSegments or None
        Of all ranks, where they are on one node.
    choices : Choices or None
        What follows from measurements, once there are any: what was chosen before may be chosen otherwise now.
    """

    def __init__(self, world: World) -> None:
        self._lanes = _lanes(world)
        header = None
        if self._lanes is not None and world.control.arbiter is not None:
            header = Header(self._lanes.segments, world.control, world.transport, world.topology)
        super().__init__(world, header)
        # Small all-reduces through segments are for whole worlds only: their flag barrier is the call's own.
        shares = self.topology.node_count == 1 and self.size > 1
        self.segments = world.segments if shares else None
        scratch = Scratch()
        self._memory = NodeMemory(self.control.line, self.segments, self._lanes, scratch)
        self._messages = Messages(self.transport, self.topology, scratch)
        self._forced = self.control.settings.algorithm
        if self._forced == selection.AUTO and self.control.settings.deterministic:
            self._forced = selection.PINNED
        self.choices: selection.Choices | None = None

    def facts(self, has_segments: bool = True) -> selection.Facts:
        """Return what the choice of an algorithm depends on; Local."""
        shared = has_segments and (self.segments is not None or self._lanes is not None)
        return selection.Facts(self.topology, tuple(self.transport.native), shared, self.choices)

    def _asked(self, algorithm: str | None) -> str:
        """Return what is asked for: by a call, else by the settings; those win over a pinned choice, or pin it."""
        forced, free = self._forced, (selection.AUTO, selection.PINNED)
        pins = algorithm in free and forced != selection.AUTO and selection.PINNED in (algorithm, forced)
        return forced if algorithm is None or pins else algorithm

    # -- what a way is bound to ---------------------------------------------------------------------------------------

    def small(self, elements: int, dtype: Any, op: str) -> SegmentAllReduce | None:
        """Return the all-reduce in one step through shared memory, if it is the one for so many elements; Local."""
        nbytes, segments = elements * dtype.itemsize, self.segments
        if segments is None or nbytes > segments.place_bytes:
            return None
        if nbytes <= segments.segment_bytes and nbytes * self.size <= _MOST_BYTES_READ:
            kind = SegmentAllReduce
        else:
            kind = PlaceAllReduce if self.size == 2 else ShareAllReduce
        return kind(segments, self.control.line, (elements,), dtype, op)

    def reduction(
        self,
        way: Way,
        sources: Pieces,
        targets: Pieces,
        dtypes: Sequence[Any],
        op: str,
        scale: float | None = None,
    ) -> BucketReduction | None:
        """Return the reduction of tensors where they lie, None for a way that needs them packed and `bind`; Local.

        Parameters as for `NodeMemory.reduction`.
        """
        return self._memory.reduction(way, sources, targets, dtypes, op, scale)

    def way(self, nbytes: int, algorithm: str | None, on_host: bool = True) -> Way:
        """Return the way of a unit of `nbytes`; an explicit choice wins.  Local.

        Raises
        ------
        ValueError
            There is no such algorithm here.
        """
        asked = self._asked(algorithm)
        if self.size == 1:
            selection.check_name(asked)
            return Way("none")
        found = selection.way(nbytes, asked, self.facts(on_host))
        if self.segments is None or self.segments.room == self.segments.place_bytes:
            return found
        # many ranks have less of each other's memory than a long segment
        return found._replace(segment_bytes=min(found.segment_bytes, self.segments.room))

    def bytes_per_pack(self, algorithm: str | None) -> int:
        """Return from what size in bytes on a pack is closed when the user leaves it to us; Local."""
        facts, asked = self.facts(), self._asked(algorithm)
        if facts.has_segments and asked in (selection.AUTO, selection.PINNED, *SEGMENTED):
            return ONE_PACK
        return facts.choices.bucket_bytes if facts.choices is not None and asked == selection.AUTO else _MESSAGE_PACK

    def bind(self, buffer: Any, op: str, algorithm: str | None = None, is_example: bool = False) -> Replay:
        """Return what reduces `buffer` in place every time it is called with the watch of a begun call; Local.

        Parameters
        ----------
        buffer : array, shape (n,), contiguous, in a dtype that is added as such
        op : str
        algorithm : str, optional
        is_example : bool
            Whether every call is given a buffer of its own, of the same length and dtype; this one is not kept.
        """
        chosen = self._chosen(buffer.nbytes, algorithm) if self.size > 1 and buffer.size > 0 else "none"
        return self._messages.bind(buffer, op, chosen, is_example)

    def _chosen(self, nbytes: int, algorithm: str | None) -> str:
        """Return the algorithm over messages."""
        return selection.asked_for(nbytes, self._asked(algorithm), self.facts(has_segments=False))


def _lanes(world: World) -> Lanes | None:
    """Return who carries what between nodes, where the ranks of each node share memory."""
    if world.segments is None or world.topology.node_count == 1 or not world.transport.has_channels:
        return None
    across = schedule_of("all_reduce", selection.between_carriers(world.topology))
    return Lanes(world.segments, world.transport, world.topology, across)
