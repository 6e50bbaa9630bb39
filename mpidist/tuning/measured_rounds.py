"""Levels measured as schedules are played: rounds, by the executor itself, in turn with whole schedules.

A message costs what its round costs: with posting and waiting, with segments of which one is reduced while the next one
arrives, with buffers that fit the caches or do not.  And what is sent must have been received, or reduced, just before:
what never changes stays in the caches of those who read it, and is read for nothing.  All work in the same memory, as
the pages that a buffer happens to lie on make a difference too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mpidist.collectives.communicator import Communicator
from mpidist.collectives.ways.executor import Executor
from mpidist.schedules.cost import CostModel, Level
from mpidist.schedules.rounds import NOBODY, Round, Schedule
from mpidist.tuning.calibration import Run, Stopwatch

#: How many rounds are played in one go, an even number: few, as schedules on few ranks have few.
_TURNS = 2

#: How often all that is measured takes its turn, how long one turn is at least, in seconds and at most in calls, and
#: which part of the turns may be slower than what counts: others that use the machine make turns slower, never faster.
_REPETITIONS, _TURN_SECONDS, _MOST_CALLS, _SLOWER = 21, 3e-4, 25, 0.75

#: How much of a time its first turns and its last ones may differ by, and how often all is measured until then: a host
#: that moves the cores in between makes two different machines of one.
_UNSTEADY, _TRIES = 0.1, 4


@dataclass(frozen=True)
class Taken:
    """What something took.

    Attributes
    ----------
    first, last : float
        By the first turns alone, and by the last ones.
    """

    seconds: float
    first: float
    last: float

    @property
    def unsteady(self) -> float:
        """How far first and last turns are apart, relative to the quicker ones."""
        return max(self.first, self.last) / max(min(self.first, self.last), 1e-9) - 1


@dataclass(frozen=True)
class Neighbours:
    """Who speaks to whom: by rank the next one and the one before in its circle, and its partner, or `NOBODY`."""

    next: Sequence[int]
    previous: Sequence[int]
    partner: Sequence[int]

    @classmethod
    def of(cls, circles: Sequence[Sequence[int]], size: int) -> Neighbours:
        """Return the neighbours of `size` ranks, those in no circle, or alone in one, without any."""
        following, previous, partner = ([NOBODY] * size for _ in range(3))
        for circle in circles:
            for place, rank in enumerate(circle):
                if len(circle) > 1:
                    following[rank], previous[rank] = circle[(place + 1) % len(circle)], circle[place - 1]
                    partner[rank] = circle[place ^ 1] if place ^ 1 < len(circle) else NOBODY
        return cls(following, previous, partner)

    def swap(self, rank: int, reduce: bool) -> Iterator[Round]:
        """Send one half of the buffer on and receive the other, then send that on."""
        for turn in range(_TURNS):
            half = turn % 2
            yield Round(self.next[rank], half, 1, self.previous[rank], 1 - half, 1, reduce)

    def in_place(self, rank: int, reduce: bool) -> Iterator[Round]:
        """Send all of the buffer on and reduce what comes into it."""
        for _ in range(_TURNS):
            yield Round(self.next[rank], 0, 1, self.previous[rank], 0, 1, reduce)

    def there_and_back(self, rank: int, reduce: bool) -> Iterator[Round]:
        """Send the buffer to the partner of higher rank, which sends it back."""
        other = self.partner[rank]
        for turn in range(_TURNS):
            sends = (rank < other) == (turn % 2 == 0)
            yield Round(other if sends else NOBODY, 0, 1, NOBODY if sends else other, 0, 1, reduce)


class _Points:
    """What was measured of a level: seconds by bytes."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.kinds: list[tuple[Callable[[int, bool], Iterator[Round]], int, bool]] = [
            (neighbours.swap, 2, False),
            (neighbours.there_and_back, 1, False),
            (neighbours.swap, 2, True),
            (neighbours.there_and_back, 1, True),
            (neighbours.in_place, 1, True),
        ]
        self._found: dict[int, tuple[float, ...]] = {}

    def add(self, nbytes: int, seconds: Sequence[float]) -> None:
        """Take the seconds of one round of each kind."""
        exchange, one_way, *reduced = seconds
        without = (exchange, one_way, exchange)
        gained = (max(0.0, more - less) for more, less in zip(reduced, without, strict=True))
        self._found[nbytes] = (exchange, one_way, *gained)

    def level(self) -> Level:
        """Return the level through all points."""
        by_size = sorted(self._found.items())
        return Level.measured(*([(float(n), seconds[kind]) for n, seconds in by_size] for kind in range(5)))


class MeasuredRounds:
    """The levels of the ranks of a communicator, measured in turn with schedules.

    Where all ranks are on one node, or each is on a node of its own, there is one level only, which stands for both.
    Between nodes one rank of each node takes part, as if a node had one link.

    Parameters
    ----------
    communicator : Communicator
        Of two ranks or more.
    longest_bytes : int
        The longest buffer that will be measured.
    """

    def __init__(self, communicator: Communicator, longest_bytes: int) -> None:
        self._communicator = communicator
        self._stopwatch = Stopwatch(communicator)
        self._memory = numpy.full(2 * longest_bytes, 0, dtype=numpy.uint8)
        nodes = communicator.topology.ranks_of_node
        levels = [circles for circles in (nodes, [[ranks[0] for ranks in nodes]]) if max(map(len, circles)) > 1]
        self._levels = [_Points(Neighbours.of(circles, communicator.size)) for circles in levels]
        self._call_seconds = float("inf")

    def measure(self, message_bytes: Sequence[int], schedules: Sequence[Schedule], nbytes: int) -> list[Taken]:
        """Measure messages of some sizes, in turn with schedules on `nbytes`; return what the schedules took.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        message_bytes : sequence of int
            Multiples of 4, up to the longest buffer.
        nbytes : int
            A multiple of 4.
        """
        runs = [self._rounds(lambda rank, reduce: iter(()), 1, False, 4)]
        measured = [(level, size) for level in self._levels for size in message_bytes]
        for level, size in measured:
            runs += [self._rounds(*kind, size) for kind in level.kinds]
        runs += [self._playing(schedule, nbytes) for schedule in schedules]
        taken = self._steadiest(runs)
        call, *seconds = [each.seconds for each in taken]
        self._call_seconds = min(self._call_seconds, call)
        for level, size in measured:
            level.add(size, [max(0.0, each - call) / _TURNS for each in seconds[: len(level.kinds)]])
            del seconds[: len(level.kinds)]
        return taken[-len(schedules) :]

    def _steadiest(self, runs: Sequence[Run]) -> list[Taken]:
        """Return what one call of each took, of several tries the one in which the machine changed least."""
        best: list[Taken] = []
        for _ in range(_TRIES):
            found = self._compared(runs)
            if not best or _unsteadiest(found) < _unsteadiest(best):
                best = found
            if _unsteadiest(best) <= _UNSTEADY:
                break
        return best

    def _compared(self, runs: Sequence[Run]) -> list[Taken]:
        """Return what one call of each took, as the slowest rank saw it; the same on all ranks."""
        once = self._stopwatch.slowest([[self._turn(run, 1) for run in runs] for _ in range(2)]).min(axis=0)
        calls = [max(1, min(_MOST_CALLS, int(_TURN_SECONDS / max(seconds, 1e-9)))) for seconds in once]
        turns = [[self._turn(*pair) for pair in zip(runs, calls, strict=True)] for _ in range(_REPETITIONS)]
        slowest = self._stopwatch.slowest(turns)
        parts = (slowest, slowest[: _REPETITIONS // 2], slowest[_REPETITIONS // 2 :])
        of_parts = [numpy.quantile(part, 1 - _SLOWER, axis=0).tolist() for part in parts]
        return [Taken(*each) for each in zip(*of_parts, strict=True)]

    def _turn(self, run: Run, calls: int) -> float:
        """Return the seconds of one call, not counting a first one, which finds the caches as others have left them."""
        run()
        self._communicator.barrier("barrier between measurements")
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls

    def model(self) -> CostModel:
        """Return the model of what was measured so far; the same on all ranks (Local)."""
        links = 1 if self._communicator.topology.node_count > 1 else None
        return CostModel(self._levels[0].level(), self._levels[-1].level(), links, self._call_seconds)

    def _rounds(self, rounds: Callable[[int, bool], Iterator[Round]], chunks: int, reduce: bool, nbytes: int) -> Run:
        """Return what plays rounds once on a buffer of so many chunks of `nbytes`."""
        schedule = Schedule("rounds", "all_reduce", lambda size: chunks, lambda rank, size: rounds(rank, reduce))
        return self._playing(schedule, chunks * nbytes)

    def _playing(self, schedule: Schedule, nbytes: int) -> Run:
        """Return what plays `schedule` once."""
        buffer, watch = self._memory[:nbytes].view(numpy.float32), self._communicator.control.watch
        executor: Any = Executor(schedule, self._communicator.transport, buffer)
        return lambda: executor.run(watch(f"{schedule.name}, to be measured"))


def _unsteadiest(found: Sequence[Taken]) -> float:
    return max(each.unsteady for each in found)
