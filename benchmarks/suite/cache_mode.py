"""Whether the cores of this launch share one last-level cache or not, found out by a ping-pong of flags.

Two ranks answer each other through a word of shared memory each.  A round trip is two messages.  Each takes one or two
transfers of a cache line: 20 to 50 ns inside a last-level cache, 100 to 200 ns from one to another.  The cost of the
loop in Python is subtracted.

A virtual machine's cores may be moved in the middle of a launch, so a benchmark looks again after every turn.  Nothing
of mpidist is used here: `benchmarks.pairs` measures checkouts of any age.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

from benchmarks.suite.mapped import mapped

#: The modes of a launch, as they are told; `UNKNOWN` where there are no two cores to ask.
MODES = ONE_CACHE, TWO_CACHES = ("one cache", "two caches")
UNKNOWN, CHANGED = "unknown", "changed"

#: Between the two there is a wide gap.  In 40 launches on a virtual machine of two cores (AMD EPYC), idle and busy, a
#: round trip of a flag took 100 to 195 ns more than the loop itself, or 450 to 510; it is their geometric mean.
THRESHOLD_NANOSECONDS = 300.0

#: Tries to find out the cost of the loop itself.
_TRIES = 64

#: Round trips in one look; the least disturbed one counts.
_TRIPS = 200

#: With more cores on a node than this, each is tried with the first one only.
_ALL_PAIRS = 8

#: Words of a cache line pair: flags of two ranks are never fetched together.
_STRIDE = 16

#: How long a rank sleeps between two looks while others play: on crowded cores it would take their turn.
_NAP_SECONDS = 50e-6

#: Looks at a flag between two yields of the core: a yield takes as long as a trip.
_SPINS = range(200)


def classify(round_trip_nanoseconds: Sequence[float]) -> str:
    """Return the mode that these round trips mean.  Local, pure."""
    if not round_trip_nanoseconds:
        return UNKNOWN
    return ONE_CACHE if max(round_trip_nanoseconds) < THRESHOLD_NANOSECONDS else TWO_CACHES


class CacheProbe:
    """Finds out the mode, as often as asked.

    Making it is collective, and so is `look`.

    Parameters
    ----------
    comm : MPI.Comm
    mpi : module

    Attributes
    ----------
    looks : Counter
        How often each mode was found.
    round_trip_nanoseconds : list of float
        Of the slowest pair of cores, at each look; the loop's own cost is subtracted.
    is_pinned : bool
        Whether every rank is tied to one core; if not, ranks are for the moment of a look.
    """

    def __init__(self, comm: Any, mpi: Any) -> None:
        self._comm = comm
        self._node = comm.Split_type(mpi.COMM_TYPE_SHARED)
        self._core, is_pinned = _core_of(self._node.rank)
        self.is_pinned = all(comm.allgather(is_pinned))
        self._pairs = _pairs(self._node.allgather(self._core))
        nbytes = 8 * _STRIDE * 2 * max(1, len(self._pairs))
        self._words = memoryview(mapped(self._node, nbytes)).cast("Q")
        self._played = 0
        self.looks: Counter[str] = Counter()
        self.round_trip_nanoseconds: list[float] = []

    def look(self) -> str:
        """Return the mode now, the same on all ranks.  Collective."""
        with _on_core(self._core):
            mine = self._trips()
        trips = [trip for trips_of_rank in self._comm.allgather(mine) for trip in trips_of_rank]
        mode = classify(trips)
        self.looks[mode] += 1
        self.round_trip_nanoseconds += [max(trips)] if trips else []
        return mode

    def describe(self) -> str:
        """Return one line for people."""
        looks, total = self.looks.most_common(), self.looks.total()
        modes = ", ".join(mode if len(looks) == 1 else f"{mode} in {count} of {total} looks" for mode, count in looks)
        if not self.round_trip_nanoseconds:
            return f"{modes}: no two ranks of a node run on different cores"
        trip = sorted(self.round_trip_nanoseconds)[len(self.round_trip_nanoseconds) // 2]
        tied = "" if self.is_pinned else "; ranks are not tied to cores, and were for this"
        return f"{modes} (round trip of a flag {trip:.0f} ns, threshold {THRESHOLD_NANOSECONDS:.0f}{tied})"

    def _trips(self) -> list[float]:
        """Return the round trips, in nanoseconds, of the pairs of which this rank is the first."""
        node, words, found, clock = self._node, self._words, [], time.perf_counter_ns
        values = range(self._played + 1, self._played + 1 + _TRIPS)
        for number, pair in enumerate(self._pairs):
            _meet(node)
            if node.rank not in pair:
                continue
            asks, answers = 2 * number * _STRIDE, (2 * number + 1) * _STRIDE
            if node.rank == pair[0]:
                trip = min(_round_trip(words, asks, answers, value, clock) for value in values)
                found.append(max(0.0, float(trip - _own_nanoseconds(clock))))
            else:
                for value in values:
                    words[answers] = _wait_for(words, asks, value)
        _meet(node)
        self._played += _TRIPS
        return found

    def close(self) -> None:
        """Give the communicator back.  Collective."""
        self._node.Free()


def _core_of(local_rank: int) -> tuple[int, bool]:
    """Return the core of this rank, and whether it is tied to that."""
    if not hasattr(os, "sched_getaffinity"):
        return local_rank, False
    allowed = sorted(os.sched_getaffinity(0))
    return allowed[local_rank % len(allowed)], len(allowed) == 1


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Stay on a core inside the block."""
    if not hasattr(os, "sched_getaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def _pairs(cores: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of local ranks that are tried: each pair of different cores once."""
    ranks = [cores.index(core) for core in dict.fromkeys(cores)]
    return [pair for pair in combinations(ranks, 2) if len(ranks) <= _ALL_PAIRS or pair[0] == ranks[0]]


def _meet(node: Any) -> None:
    """Wait for the other ranks of the node, and leave them the cores meanwhile."""
    request = node.Ibarrier()
    while not request.Test():
        time.sleep(_NAP_SECONDS)


def _own_nanoseconds(clock: Callable[[], int]) -> int:
    """Return the cost of the loop in a round trip: this rank answers its own flag."""
    own = memoryview(bytearray(8)).cast("Q")
    return min(_round_trip(own, 0, 0, value, clock) for value in range(1, 1 + _TRIES))


def _round_trip(flags: Any, mine: int, theirs: int, value: int, clock: Callable[[], int]) -> int:
    """Return the nanoseconds until a flag is answered."""
    start = clock()
    flags[mine] = value
    _wait_for(flags, theirs, value)
    return clock() - start


def _wait_for(flags: Any, word: int, value: int) -> int:
    """Wait until a flag stands at `value` or later; return its value."""
    while True:
        for _ in _SPINS:
            found: int = flags[word]
            if found >= value:
                return found
        os.sched_yield()
