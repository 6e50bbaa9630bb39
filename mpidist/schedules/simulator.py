"""The simulator: plays a schedule with a clock for each rank, for any number of ranks.

In a round, a rank starts when it is there and its message has been sent, and is done after the round's seconds:
``clock = maximum(clock, clock of the sender) + seconds``, one vectorised line for all ranks.  No rank waits for ranks
it has no business with, so the result is at most `cost`, where every round waits for its slowest rank; where all links
are equal, the two are equal too for every algorithm of the table.

A ring on 100 000 ranks has 200 000 rounds, but only two kinds of them.  Without jitter a repeated round is played until
every rank advances at the pace of the rank it hears from; from then on nothing changes (adding the same time to both
sides of a maximum adds it to the maximum), and the remaining repetitions are one multiplication.  With jitter no two
repetitions are alike; a limited number is played, and the others continue at the mean pace of the later half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from mpidist.cluster.topology import Topology
from mpidist.schedules.cost import CostModel, priced
from mpidist.schedules.rounds import NOBODY, Schedule

#: In each of so many first rounds, and then once in as many, a simulation looks whether the paces are settled.
_LOOK_ROUNDS = 16

#: Two paces are one when they differ by no more than this, relative to the fastest...
_SAME_PACE = 1e-12
#: ...or than the rounding of the clocks they are differences of, in units of the last place.
_CLOCK_ROUNDING = 4 * numpy.finfo(float).eps


@dataclass(frozen=True)
class SimulationResult:
    """When everybody was done."""

    seconds: float  # when the last rank was done
    finish_seconds: Any  # when each rank was done
    rounds: int  # repetitions counted
    # how many of them were not worked out but continued at the mean pace; 0 without jitter
    extrapolated_rounds: int = 0


def simulate(
    schedule: Schedule,
    size: int,
    nbytes: float,
    model: CostModel,
    topology: Topology | None = None,
    jitter: float | None = None,
    seed: int = 0,
    root: int = 0,
    jitter_repetitions: int = 500,
) -> SimulationResult:
    """Play `schedule` once; all ranks start together (Local).

    Parameters
    ----------
    schedule, size, nbytes, model, topology, root
        As for `mpidist.schedules.cost.cost`.
    jitter : float or None
        Spread of the network: each rank's seconds in each round are multiplied by exp(jitter x), x standard normal.
    seed : int
        Of the jitter: the same seed gives the same result.
    jitter_repetitions : int
        How many repetitions of one round are played when there is jitter.
    """
    clock = numpy.full(size, model.call_seconds)
    rounds = extrapolated = 0
    noise = _Jitter(jitter, seed, jitter_repetitions) if jitter else None
    for round_, seconds in priced(schedule, size, nbytes, model, topology, root):
        # by rank whom it waits for: itself, if it receives from nobody
        source = numpy.where(round_.receive_from != NOBODY, round_.receive_from, numpy.arange(size))
        rounds += round_.repeat
        if noise is None:
            clock = _repeated(clock, source, seconds, round_.repeat)
        else:
            clock = noise.repeated(clock, source, seconds, round_.repeat)
            extrapolated += max(0, round_.repeat - jitter_repetitions)
    return SimulationResult(float(clock.max()), clock, rounds, extrapolated)


def _advanced(clock: Any, source: Any, seconds: Any) -> Any:
    return numpy.maximum(clock, clock[source]) + seconds


def _repeated(clock: Any, source: Any, seconds: Any, repeat: int) -> Any:
    """Return the clocks after `repeat` equal rounds, playing only those in which the pace still changes."""
    for played in range(1, repeat + 1):
        before, clock = clock, _advanced(clock, source, seconds)
        # Most settle in a few rounds; looking costs more than playing, so that the others are looked at now and then.
        if (played <= _LOOK_ROUNDS or played % _LOOK_ROUNDS == 0) and played < repeat:
            if _steady(pace := clock - before, source, clock):
                return clock + (repeat - played) * pace
    return clock


def _steady(pace: Any, source: Any, clock: Any) -> bool:
    tolerance = _SAME_PACE * pace.max() + _CLOCK_ROUNDING * clock.max()
    return bool(numpy.abs(pace - pace[source]).max() <= tolerance)


class _Jitter:
    """Rounds whose seconds vary at random."""

    def __init__(self, spread: float, seed: int, repetitions: int) -> None:
        if spread < 0 or repetitions < 2:
            raise ValueError(f"jitter must be 0 or more, repetitions 2 or more; got {spread} and {repetitions}")
        self._spread, self._repetitions = spread, repetitions
        self._random = numpy.random.default_rng(seed)

    def repeated(self, clock: Any, source: Any, seconds: Any, repeat: int) -> Any:
        played = min(repeat, self._repetitions)
        halfway = clock
        for repetition in range(played):
            clock = _advanced(
                clock, source, seconds * numpy.exp(self._spread * self._random.standard_normal(len(clock)))
            )
            if repetition == played // 2:
                halfway = clock
        if repeat == played:
            return clock
        busy = seconds > 0
        pace = (clock - halfway)[busy].mean() / (played - 1 - played // 2) if busy.any() else 0.0
        return clock + (repeat - played) * pace * busy
