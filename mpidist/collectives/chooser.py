"""Which ways of an all-reduce there are for a rank, which is taken, and what a way is bound to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.collectives import selection
from mpidist.collectives.bucket_reduction import BucketReduction
from mpidist.collectives.call import Call
from mpidist.collectives.contest import Contest, Contests
from mpidist.collectives.header import Header
from mpidist.collectives.lanes import Lanes
from mpidist.collectives.messages import Messages, Replay
from mpidist.collectives.nearness import FAR, Nearness
from mpidist.collectives.node_memory import NodeMemory
from mpidist.collectives.pieces import Pieces
from mpidist.collectives.plain import PlainCollectives
from mpidist.collectives.scratch import Scratch
from mpidist.collectives.shared_memory import PlaceAllReduce, SegmentAllReduce, ShareAllReduce
from mpidist.collectives.ways import SEGMENTED, Way, worth_trying
from mpidist.runtime.control import Watch
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
    modes : int
        In how many modes the cores are in turn, as far as it can be told; the same on all ranks.
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
        self._memory = NodeMemory(self.control.board_index, self.segments, self._lanes, scratch)
        self._messages = Messages(self.transport, self.topology, scratch)
        self._contests = Contests()
        self._forced = self.control.settings.algorithm
        if self._forced == selection.AUTO and self.control.settings.deterministic:
            self._forced = selection.PINNED
        self._nearness = self._make_nearness()
        self.modes = 1 if self._nearness is None else FAR + 1
        self.choices: selection.Choices | None = None
        self._is_tuned = self.size == 1 or not self.transport.library
        self._comparisons: dict[int, tuple[Call, SegmentAllReduce | None]] = {}

    def _make_nearness(self) -> Nearness | None:
        """Return what looks how near two ranks are, each of which has a core for itself and is free to choose."""
        if self.segments is None or self.size != 2 or self.control.pause is not None or self._forced != selection.AUTO:
            return None
        return Nearness(self.segments, self.control.board_index)

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
        return kind(segments, self.control.board_index, (elements,), dtype, op)

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

    def ways(self, nbytes: int, algorithm: str | None, on_host: bool = True) -> list[Way]:
        """Return the ways worth trying for a unit of `nbytes`; an explicit choice is the only one.  Local.

        Raises
        ------
        ValueError
            There is no such algorithm here.
        """
        asked = self._asked(algorithm)
        if self.size == 1:
            selection.check_name(asked)
            return [Way("none")]
        found = worth_trying(nbytes, asked, self.facts(on_host))
        if self.segments is None or self.segments.room == self.segments.place_bytes:
            return found
        room = self.segments.room  # many ranks have less of each other's memory than the longest segment
        return list(dict.fromkeys(way._replace(segment_bytes=min(way.segment_bytes, room)) for way in found))

    def settle(self, contest: Contest, timeout_seconds: float | None = None) -> None:
        """Compare the times that ranks took, and choose among ways by them, where that is due.

        Collective, and numbered like any call: all ranks come to it at the same step, before the call that is tried.
        """
        if not contest.is_due:
            return
        times = contest.times()
        call, segment = self._comparison(times)
        with self.control.turnstile:  # who is interrupted before it has settled would be out of step for ever
            if segment is not None:
                numpy.copyto(segment.slot(self.control.call + 1), times)
                segment.combine(self.begin(call, timeout_seconds), times)
            else:
                watch = self.begin(call, timeout_seconds)
                self.bind(times, "max", selection.PINNED)(watch)
            contest.settle(times)

    def _comparison(self, times: Any) -> tuple[Call, SegmentAllReduce | None]:
        if times.size not in self._comparisons:
            call = Call("comparison of times before an all-reduce", [("", times.dtype, times.shape)])
            self._comparisons[times.size] = call, self.small(times.size, times.dtype, "max")
        return self._comparisons[times.size]

    def contest(self, ways: Sequence[Way], nbytes: int) -> Contest:
        """Return the contest of some ways for a unit of `nbytes`; Local."""
        return self._contests.of(ways, nbytes, self.modes)

    def choose(self, contest: Contest, watch: Watch) -> int:
        """Return which way of a contest to take, one of its `turns`, in a call that has begun.

        Collective: every rank calls it in the same order, within the call.  Errors as for `Watch.tick`.
        """
        if contest.modes > 1 and self._nearness is not None:
            contest.mode = self._nearness.look(watch)
        return contest.at

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
