"""One loop in which all contenders take turns, so that a machine whose speed drifts favours none of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.suite.cache_mode import CHANGED
from benchmarks.suite.contender import Contender
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.tensors import TensorList

#: A contender is timed at least so often, however slow it is.
FEWEST = 3

#: Seconds of a step above which a contender gets no more steps of warm-up than it needs.
SLOW_SECONDS = 0.1


@dataclass(frozen=True)
class Budget:
    """How long to measure.

    Attributes
    ----------
    seconds : float
        For all contenders together, warm-up not counted.
    rounds : int
        The most times that a contender is timed.
    calls : int
        Reductions that are timed together, for those that are too short for a clock.
    """

    seconds: float = 20.0
    rounds: int = 30
    calls: int = 1


@dataclass
class Timing:
    """What is known of one contender.

    Attributes
    ----------
    seconds : list of float
        Of one reduction, in each of its turns: see `ranks.seconds_of`.
    modes : list of str
        The cache mode in each of them.
    wrong : int or None
        Wrong elements in its first and its last result, on all ranks together; None if it reduces nothing.
    """

    seconds: list[float] = field(default_factory=list)
    modes: list[str] = field(default_factory=list)
    wrong: int | None = None

    def within(self, mode: str) -> list[float]:
        """Return the seconds of the turns in a cache mode; all of them if that is `CHANGED`.  Local, pure."""
        pairs = zip(self.seconds, self.modes, strict=True)
        return [seconds for seconds, found in pairs if mode in (found, CHANGED)]


def shares(costs: Sequence[float], budget: Budget) -> list[int]:
    """Return how often each contender is timed, when a turn of it costs so many seconds.  Local, pure.

    The seconds are dealt out evenly; what quick contenders do not need goes to the slower ones.
    """
    left, counts = budget.seconds, [0] * len(costs)
    for done, index in enumerate(sorted(range(len(costs)), key=costs.__getitem__)):
        share = left / (len(costs) - done)
        affordable = int(share / costs[index]) if costs[index] > 0 else budget.rounds
        counts[index] = max(FEWEST, min(budget.rounds, affordable))
        left = max(0.0, left - counts[index] * costs[index])
    return counts


def order(counts: Sequence[int], round_: int) -> list[int]:
    """Return whose turn it is in a round, in order.  Local, pure.

    The first of a round is another one each time.  A contender with fewer turns has them spread over all rounds.
    """
    rounds, size = max(counts), len(counts)
    rotated = [(round_ + place) % size for place in range(size)]
    return [each for each in rotated if (round_ + 1) * counts[each] // rounds > round_ * counts[each] // rounds]


class Turns:
    """The loop.

    Parameters
    ----------
    contenders : sequence of Contender
    tensors : TensorList
    ranks : Ranks
    budget : Budget
    """

    def __init__(
        self, contenders: Sequence[Contender], tensors: TensorList, ranks: Ranks, budget: Budget | None = None
    ) -> None:
        self._contenders = list(contenders)
        self._tensors = tensors
        self._ranks = ranks
        self._budget = budget or Budget()
        self._step = 0
        self._kept: list[Any] = [None] * len(self._contenders)
        self._timings = [Timing() for _ in self._contenders]

    def run(self) -> list[Timing]:
        """Measure; the timings are in the order of the contenders.  Collective."""
        start = time.perf_counter()
        self._ranks.probe.look()
        look = self._ranks.slowest(time.perf_counter() - start)
        costs = [self._warm_up(index) for index in range(len(self._contenders))]
        before = self._ranks.probe.look()
        counts = shares([cost + look for cost in costs], self._budget)
        for round_ in range(max(counts)):
            for index in order(counts, round_):
                timing = self._timings[index]
                timing.seconds.append(self._turn(index, check=len(timing.seconds) == counts[index] - 1))
                after = self._ranks.probe.look()
                timing.modes.append(after if after == before else CHANGED)
                before = after
        return self._timings

    def _warm_up(self, index: int) -> float:
        """Return what a turn costs in seconds, all that is not timed included."""
        seconds = self._turn(index, check=True) * self._budget.calls
        for done in range(1, self._contenders[index].warm_ups):
            if seconds > SLOW_SECONDS and done >= self._contenders[index].needed_warm_ups:
                break
            start = time.perf_counter()
            self._turn(index)
            seconds = self._ranks.slowest(time.perf_counter() - start)
        return seconds

    def _turn(self, index: int, check: bool = False) -> float:
        """Let a contender reduce; return the seconds of one reduction."""
        contender, calls = self._contenders[index], self._budget.calls
        self._step += 1
        batch = [contender.prepare(self._tensors.new(self._step)) for _ in range(calls)]
        self._ranks.comm.Barrier()
        start = time.perf_counter()
        result = contender.run_all(batch)
        stop = time.perf_counter()
        self._kept[index] = result
        if check:
            self._check(index, result)
        return self._ranks.elapsed(start, stop) / calls

    def _check(self, index: int, result: Any) -> None:
        timing, wrong = self._timings[index], self._contenders[index].wrong(result, self._step)
        if wrong is not None:
            timing.wrong = (timing.wrong or 0) + self._ranks.total(wrong)
