"""All-reduce of a long buffer over several nodes: shared memory inside a node, messages between nodes, both at once.

Nomenclature.  A *segment* is a cache-sized span of the buffer, a *wave* some segments in a row, a *shard* a part
of every segment; see `lanes` for who carries a shard.  For each wave a rank

1. *gathers*: segment after segment it fills its place with its own values.  When all ranks of the node have filled
   theirs, it adds up the shards that it carries, into its slot;
2. sends: it starts the all-reduce of its shards between the nodes.  This moves on whenever this rank polls it: after
   every segment, and in every turn of every wait;
3. *publishes*: it says that its shards are complete.  All ranks of the node copy them out of its slot, and say that the
   wave is *taken*.

While one wave is gathered, those before it are between the nodes.  In a slow network there are always two under way,
so that the link is never idle.

*Turns* number segments, and *waves* are numbered, through all calls, alike on the ranks of a node.  A rank has two
places and fills them in turn.  It fills turn t when all ranks have filled turn t - 1; by then they have added up turn
t - 2, so nobody reads the place any more.  A slot is written again when all ranks have taken its wave.

Sums are made in the order of the local ranks, then as the schedule between the nodes says.  So the bits do not depend
on time, but on how ranks are placed; and on how the buffer is cut where that schedule is a ring of three nodes or more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy

from mpidist.arrays import reduction
from mpidist.collectives.ways.bucket_reduction import Fill, Take
from mpidist.collectives.ways.executor import Executor, Progress
from mpidist.collectives.ways.lanes import Lanes
from mpidist.collectives.ways.pieces import Transform, segments
from mpidist.runtime.board import fence
from mpidist.runtime.control import Watch

#: Into how many waves a buffer is cut, so that there is something to overlap; but a wave has so many bytes for each
#: node at least, since a message of a few KiB takes as long as an empty one.
_WAVES, _LEAST_WAVE_BYTES = 8, 1 << 17


class _UnderWay(NamedTuple):
    """A wave that is under way between the nodes: which one of the buffer, and how far its shards are."""

    wave: int
    progress: tuple[Progress, ...]

    def poll(self) -> bool:
        """Move on, and return whether all shards have come back."""
        return all([progress.done or progress.poll() for progress in self.progress])

    def abandon(self) -> None:
        """Give up after an error."""
        for progress in self.progress:
            progress.abandon()


def _nothing(index: int, is_back: bool) -> None:
    """Nobody wants to know."""


class TwoLevel:
    """The all-reduce of `elements` values of `dtype`, bound to the lanes.

    Reduced values are multiplied by `scale` before `transform`.  `segment_bytes` are by default all there is room for.
    ``on_wave(index, is_back)`` is told when a wave goes to the other nodes, and when it is back.  `bounds` are the
    segments, in elements of the buffer; `owned` is this rank's part of them: of the shards that it carries, segment by
    segment.
    """

    def __init__(
        self,
        lanes: Lanes,
        elements: int,
        dtype: numpy.dtype,
        op: str,
        scale: float | None = None,
        segment_bytes: int | None = None,
        on_wave: Callable[[int, bool], object] = _nothing,
    ) -> None:
        self._lanes, self._segments = lanes, lanes.segments
        self._dtype, self._scale, self._on_wave = dtype, scale, on_wave
        self._combine = reduction(op, numpy)
        step, per_wave = _sizes(lanes, elements, dtype.itemsize, segment_bytes)
        self._part = step // lanes.shards
        self.bounds = segments(elements, step)
        self.owned = [self._span(index, lane.shard) for index in range(len(self.bounds)) for lane in lanes.mine]
        count = len(self.bounds)
        self._waves = [range(first, min(first + per_wave, count)) for first in range(0, count, per_wave)]
        nbytes = step * dtype.itemsize
        self._places = [[place[:nbytes].view(dtype) for place in turn] for turn in self._segments.segments]
        self._slots = [
            [lanes.values(slot, shard, per_wave * self._part, dtype) for shard in range(lanes.shards)]
            for slot in range(lanes.SLOTS)
        ]
        self._last = self._executors(self._waves[-1], op)
        self._full = self._executors(self._waves[0], op) if len(self._waves) > 1 else self._last
        self._transform: Transform | None = None
        self._under_way: deque[_UnderWay] = deque()

    def _executors(self, wave: range, op: str) -> list[list[Executor]]:
        """Return by slot and lane the all-reduces between nodes for waves of this length."""
        lengths = [self._shard_elements(wave, lane.shard) for lane in self._lanes.mine]
        pairs = list(zip(self._lanes.mine, lengths, strict=True))
        slots = range(self._lanes.SLOTS)
        return [[self._lanes.executor(lane, slot, length, self._dtype, op) for lane, length in pairs] for slot in slots]

    def _shard_elements(self, wave: range, shard: int) -> int:
        start, stop = self._part_of(wave[-1], shard)
        return (len(wave) - 1) * self._part + stop - start

    def _part_of(self, index: int, shard: int) -> tuple[int, int]:
        """Return which elements of segment `index`, counted from its start, belong to a shard."""
        start, stop = self.bounds[index]
        length, shards = stop - start, self._lanes.shards
        return shard * length // shards, (shard + 1) * length // shards

    def _span(self, index: int, shard: int) -> tuple[int, int]:
        """Return the same, counted from the start of the buffer."""
        first, (start, stop) = self.bounds[index][0], self._part_of(index, shard)
        return first + start, first + stop

    def run(self, watch: Watch, fill: Fill, take: Take, transform: Transform | None = None) -> None:
        """As `Pipeline.run`; Collective over all nodes.

        On every node one rank transforms a span: all of them must make the same of it.
        """
        behind = self._lanes.SLOTS - 1
        self._transform = transform
        try:
            for index, wave in enumerate(self._waves):
                self._gather(index, wave, watch, fill)
                self._send(index)
                if index >= behind:
                    self._take(index - behind, watch, take)
            for index in range(max(0, len(self._waves) - behind), len(self._waves)):
                self._take(index, watch, take)
        except BaseException:
            for under_way in self._under_way:
                under_way.abandon()
            raise
        self._segments.wave += len(self._waves)

    def _number(self, index: int) -> int:
        """Return the number, from 1 on, of a wave of this run among those of all calls."""
        return self._segments.wave + index + 1

    def _slot(self, index: int) -> int:
        return self._number(index) % self._lanes.SLOTS

    def _gather(self, index: int, wave: range, watch: Watch, fill: Fill) -> None:
        """Bring a wave's shards together in the slots of their carriers on this node."""
        segments, rank = self._segments, self._lanes.local_rank
        slot, number = self._slots[self._slot(index)], self._number(index)
        for place, segment in enumerate(wave):
            start, stop = self.bounds[segment]
            if self._lanes.shards == 1:  # every rank is alone on its node, and took the wave that was here itself
                fill(segment, slot[0][place * self._part :][: stop - start])
                self._progress()
                continue
            turn = segments.turn
            fill(segment, self._places[turn & 1][rank][: stop - start])
            segments.turn = turn = turn + 1
            segments.say_filled(rank, turn)
            self._progress()
            if place == 0:
                self._wait(segments.taken_words, number - self._lanes.SLOTS, watch)
            self._wait(segments.filled_words, turn, watch)
            for lane in self._lanes.mine:
                self._add_up(self._places[turn - 1 & 1], segment, lane.shard, slot[lane.shard][place * self._part :])

    def _add_up(self, places: Sequence[Any], segment: int, shard: int, target: Any) -> None:
        """Reduce a shard's part of a segment over the ranks of this node, in their order."""
        start, stop = self._part_of(segment, shard)
        out = target[: stop - start]
        if len(places) == 1:
            out[...] = places[0][start:stop]
            return
        self._combine(places[0][start:stop], places[1][start:stop], out=out)
        for place in places[2:]:
            self._combine(out, place[start:stop], out=out)

    def _send(self, index: int) -> None:
        """Begin to reduce a wave between the nodes."""
        self._on_wave(index, False)
        executors = self._last if index == len(self._waves) - 1 else self._full
        progress = tuple(executor.start() for executor in executors[self._slot(index)])
        self._under_way.append(_UnderWay(index, progress))
        self._progress()

    def _progress(self) -> None:
        """Move on what is under way, and publish what has come back, wave after wave."""
        under_way = self._under_way
        while under_way and under_way[0].poll():
            self._publish(under_way.popleft().wave)
        for later in islice(under_way, 1, None):
            later.poll()

    def _publish(self, index: int) -> None:
        """Say that this rank's shards of a wave have come back, scaled and transformed."""
        self._on_wave(index, True)
        wave, slot = self._waves[index], self._slots[self._slot(index)]
        mine = [lane.shard for lane in self._lanes.mine]
        if self._scale is not None:
            for shard in mine:
                values = slot[shard][: self._shard_elements(wave, shard)]
                numpy.multiply(values, self._scale, out=values)
        if self._transform is not None:
            self._hand_over(self._transform, index, mine)
        self._segments.say_reduced(self._lanes.local_rank, self._number(index))

    def _take(self, index: int, watch: Watch, take: Take) -> None:
        """Wait until a wave is published, and hand it out."""
        number = self._number(index)
        self._wait(self._segments.reduced_words, number, watch)
        self._hand_over(take, index, range(self._lanes.shards))
        self._segments.say_taken(self._lanes.local_rank, number)

    def _hand_over(self, receiver: Take, index: int, shards: Sequence[int]) -> None:
        """Give the parts of some shards to who wants them, each with the element that it begins at."""
        slot = self._slots[self._slot(index)]
        for place, segment in enumerate(self._waves[index]):
            first = place * self._part
            for shard in shards:
                start, stop = self._span(segment, shard)
                if start < stop:
                    receiver(start, slot[shard][first : first + stop - start])

    def _wait(self, words: tuple[int, ...], value: int, watch: Watch) -> None:
        flags = self._segments.flags
        for word in words:
            while flags[word] < value:
                self._progress()
                watch.tick()
        fence()


def _sizes(lanes: Lanes, elements: int, itemsize: int, segment_bytes: int | None) -> tuple[int, int]:
    """Return the elements of a segment, a multiple of the number of shards, and the segments of a wave."""
    shards, room = lanes.shards, lanes.lane_bytes // itemsize
    wanted = max(-(-elements // _WAVES), _LEAST_WAVE_BYTES * lanes.node_count // itemsize)
    per_shard = min(room, -(-wanted // shards))  # of a wave
    longest = lanes.segments.segment_bytes
    longest = longest if segment_bytes is None else min(segment_bytes, longest)
    per_wave = -(-per_shard // max(1, longest // itemsize // shards))
    return per_shard // per_wave * shards, per_wave
