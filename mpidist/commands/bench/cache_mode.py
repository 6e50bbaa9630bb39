"""Whether the cores of this launch share one last-level cache or not, found out by a ping-pong of flags.

Two ranks answer each other through a word of shared memory each.  A round trip is two messages, and each takes one or
two transfers of a cache line: 20 to 50 ns inside a last-level cache, 100 to 200 ns from one to another.  The rest of it
is what a loop in Python costs, which a rank measures by answering itself; it is subtracted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from mpidist.commands.bench.ranks import Ranks
from mpidist.transports.shared import map_together

#: Between the two kinds there is a wide gap.  On a virtual machine of two cores (AMD EPYC) a round trip took 110 to 150
#: ns more than the loop itself where both cores had one cache, and more than 450 where they had two.
THRESHOLD_NANOSECONDS = 280.0

#: Round trips in one try, and tries; the least disturbed try counts.
_TRIPS, _TRIES = 500, 9

#: With more ranks on a node than this, each is tried with the first one only.
_ALL_PAIRS = 8

#: Words of a cache line pair: flags of two ranks are never fetched together.
_STRIDE = 16


@dataclass(frozen=True)
class CacheMode:
    """What a launch's cores share.

    Attributes
    ----------
    mode : str
        ``"one cache"``, ``"two caches"`` (or more), ``"changed"`` during the launch, or ``"unknown"``.
    round_trip_nanoseconds : tuple of float
        Of each pair of cores, the loop's own cost subtracted.
    why : str
        Why it is unknown, or how it was found out.
    """

    mode: str
    round_trip_nanoseconds: tuple[float, ...] = ()
    why: str = ""

    def describe(self) -> str:
        """Return one line for people."""
        trips = ", ".join(f"{each:.0f}" for each in sorted(self.round_trip_nanoseconds))
        told = f" (round trip of a flag {trips} ns, threshold {THRESHOLD_NANOSECONDS:.0f})" if trips else ""
        return f"{self.mode}{told}{f'; {self.why}' if self.why else ''}"

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)


def classify(round_trip_nanoseconds: Sequence[float], why: str = "") -> CacheMode:
    """Return the mode that these round trips mean.  Local, pure."""
    if not round_trip_nanoseconds:
        return CacheMode("unknown", (), why or "no two ranks of a node run on different cores")
    one = max(round_trip_nanoseconds) < THRESHOLD_NANOSECONDS
    return CacheMode("one cache" if one else "two caches", tuple(round_trip_nanoseconds), why)


def both(before: CacheMode, after: CacheMode) -> CacheMode:
    """Return the mode of a launch, from what was found at its start and at its end.  Local, pure."""
    if before.mode == after.mode:
        trips = zip(before.round_trip_nanoseconds, after.round_trip_nanoseconds, strict=True)
        return CacheMode(before.mode, tuple(min(pair) for pair in trips), before.why)
    trips_of_both = (*before.round_trip_nanoseconds, *after.round_trip_nanoseconds)
    return CacheMode("changed", trips_of_both, f"{before.mode} at the start, {after.mode} at the end")


def measure(ranks: Ranks) -> CacheMode:
    """Return the mode of this launch now, the same on all ranks.  Collective."""
    node = ranks.comm.Split_type(ranks.mpi.COMM_TYPE_SHARED)
    try:
        with _on_one_core(node.rank) as (core, why):
            trips = _ping_pongs(node, core)
    finally:
        node.Free()
    everywhere = [trip for trips_of_rank in ranks.comm.allgather(trips) for trip in trips_of_rank]
    return classify(everywhere, why)


@contextmanager
def _on_one_core(local_rank: int) -> Iterator[tuple[int, str]]:
    """Stay on one core inside the block, also where the launcher has not tied this rank to one."""
    if not hasattr(os, "sched_getaffinity"):
        yield local_rank, "cores unknown on this system"
        return
    allowed = sorted(os.sched_getaffinity(0))
    core = allowed[0] if len(allowed) == 1 else allowed[local_rank % len(allowed)]
    os.sched_setaffinity(0, {core})
    try:
        yield core, "" if len(allowed) == 1 else "ranks are not tied to cores; they were for the ping-pong"
    finally:
        os.sched_setaffinity(0, allowed)


def _ping_pongs(node: Any, core: int) -> list[float]:
    """Return the round trips of this rank's pairs of which it is the first."""
    pairs = _pairs(node.allgather(core))
    nbytes = 8 * _STRIDE * (2 * len(pairs) + node.size)
    words = memoryview(map_together(nbytes, node.rank, node.allgather)).cast("Q")
    own = _alone(words, (2 * len(pairs) + node.rank) * _STRIDE)
    found = []
    for number, pair in enumerate(pairs):
        node.Barrier()
        if node.rank in pair:
            flags = 2 * number * _STRIDE, (2 * number + 1) * _STRIDE
            trip = _ping_pong(words, *flags) if node.rank == pair[0] else _ping_pong(words, *flags[::-1], serve=False)
            if node.rank == pair[0]:
                found.append(max(0.0, trip - own))
    node.Barrier()
    return found


def _pairs(cores: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of local ranks that are tried: each pair of different cores once."""
    ranks = [cores.index(core) for core in dict.fromkeys(cores)]
    return [pair for pair in combinations(ranks, 2) if len(ranks) <= _ALL_PAIRS or pair[0] == ranks[0]]


def _ping_pong(words: Any, mine: int, theirs: int, serve: bool = True) -> float:
    """Return nanoseconds of a round trip: the quickest of some tries.  Both words are 0 before."""
    tries = []
    for first in range(1, 1 + _TRIES * _TRIPS, _TRIPS):
        start = time.perf_counter_ns()
        for value in range(first, first + _TRIPS):
            if serve:
                words[mine] = value
            while words[theirs] != value:
                pass
            if not serve:
                words[mine] = value
        tries.append(time.perf_counter_ns() - start)
    return float(min(tries)) / _TRIPS


def _alone(words: Any, mine: int) -> float:
    """Return what the loop itself costs: this rank answers its own flag."""
    tries = []
    for _ in range(_TRIES):
        start = time.perf_counter_ns()
        for value in range(1, 1 + _TRIPS):
            words[mine] = value
            while words[mine] != value:
                pass
        tries.append(time.perf_counter_ns() - start)
    return float(min(tries)) / _TRIPS
