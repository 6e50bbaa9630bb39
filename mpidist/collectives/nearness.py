"""Whether the cores of two ranks share a last-level cache at this moment: found out by a few flags sent to and fro.

A host may move the cores of a virtual machine every few seconds.  Which way through memory is the quickest changes with
that at once, so two ranks look anew in every long call, which takes a few microseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from mpidist.runtime.control import Watch
from mpidist.transports.node_memory import SharedSegments

#: What two ranks may be to each other: their cores share a last-level cache, or do not.
NEAR, FAR = 0, 1

#: Between the two there is a wide gap.  In 40 launches on a virtual machine of two cores (AMD EPYC), idle and busy, a
#: round trip of a flag took 100 to 195 ns more than the loop itself, or 450 to 510; it is their geometric mean.
THRESHOLD_NANOSECONDS = 300.0

#: At most so many round trips are made in one look.  One that is quick is enough: that does not happen by accident, as
#: slow ones do.  The first one also waits for the other rank to come here.
_TRIPS = 8

#: Flags of trips are multiples of it; what comes on top is 0, or 1 + the verdict.
_STEP = 4

#: How often a rank looks at a flag before it also looks at what else may have happened: that takes as long as a trip.
_SPINS = range(200)

#: Tries to find out what the loop itself takes.
_TRIES = 64


class Nearness:
    """Looks whether two ranks of a node are near, as both of them come to a call.

    Rank 0 sends flags that rank 1 answers, and then sends what it makes of the times: both go by the same.

    Parameters
    ----------
    segments : SharedSegments
        Of two ranks.
    rank : int
    clock : callable, optional
        Returns nanoseconds.
    """

    def __init__(self, segments: SharedSegments, rank: int, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._segments = segments
        self._rank = rank
        self._clock = clock
        self._own = own_nanoseconds(clock) if rank == 0 else 0

    def look(self, watch: Watch) -> int:
        """Return `NEAR` or `FAR`, the same on both ranks.

        Collective: both ranks call it in the same order, within a begun call.  Errors as for `Watch.tick`.
        """
        return self._ask(watch) if self._rank == 0 else self._answer(watch)

    def _ask(self, watch: Watch) -> int:
        segments, clock, verdict = self._segments, self._clock, FAR
        flags, (mine, theirs), value = segments.flags, segments.ping_words, segments.pings
        for _ in range(_TRIPS):
            value += _STEP
            if round_trip(flags, mine, theirs, value, clock, watch) - self._own < THRESHOLD_NANOSECONDS:
                verdict = NEAR
                break
        segments.pings = value + _STEP
        flags[mine] = segments.pings + 1 + verdict
        return verdict

    def _answer(self, watch: Watch) -> int:
        segments = self._segments
        flags, (theirs, mine), value = segments.flags, segments.ping_words, segments.pings
        while True:
            value += _STEP
            more = wait_for(flags, theirs, value, watch) - value
            if more:
                segments.pings = value
                return more - 1
            flags[mine] = value


class Waiting(Protocol):
    """What somebody who waits for a flag asks now and then: a `Watch`, for example."""

    def tick(self) -> None:
        """Raise if there is no use in waiting."""


def own_nanoseconds(clock: Callable[[], int]) -> int:
    """Return what the loop itself takes of a round trip: this rank answers its own flag.  Local."""
    own = memoryview(bytearray(8)).cast("Q")
    return min(round_trip(own, 0, 0, value, clock, None) for value in range(1, 1 + _TRIES))


def round_trip(flags: Any, mine: int, theirs: int, value: int, clock: Callable[[], int], watch: Waiting | None) -> int:
    """Return the nanoseconds until a flag is answered."""
    start = clock()
    flags[mine] = value
    wait_for(flags, theirs, value, watch)
    return clock() - start


def wait_for(flags: Any, word: int, value: int, watch: Waiting | None) -> int:
    """Wait until a flag stands at `value` or later, and return where it stands; without a watch it does already."""
    for _ in _SPINS:
        found: int = flags[word]
        if found >= value:
            return found
    while flags[word] < value:
        assert watch is not None
        watch.tick()
    return flags[word]
