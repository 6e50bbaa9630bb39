"""Which all-reduce to use for how many bytes: policy, in one place.

An explicit choice always wins.  Left to itself, mpidist takes what was measured (`Choices`, worked out on rank 0 and
sent to all) or, where nothing was or `deterministic` asks for it, a fixed table whose thresholds are what
`mpidist bench all-reduce` showed on one node.  Every algorithm that may be chosen here gives the same bits on all
ranks: for schedules the checker proves it, for shared memory and MPI's own all-reduce a parallel test does.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from mpidist.cluster.topology import Topology
from mpidist.schedules.figures import Figures
from mpidist.schedules.rounds import Schedule
from mpidist.schedules.table import algorithm, hierarchical, names

#: The all-reduces that `choose` may return: all ranks get the same bits.
AUTOMATIC = ("shared_memory", "two_level", "native", "recursive_doubling", "hierarchical", "ring", "rabenseifner")

#: What may be asked for besides an algorithm: a choice by what was measured, or by the fixed table.
AUTO, PINNED = "auto", "pinned"

#: From this size in bytes on, moving every byte once counts more than the number of messages.
_LARGE_BYTES = 1 << 16

#: From so many nodes on the 2 (nodes - 1) messages of a ring between them cost more than they save.
_MANY_NODES = 8

#: What must be measured before the fixed table is left: this part of its time, and so many seconds less.  Then times
#: differ by more than the noise of a measurement.
_GAIN, _GAIN_SECONDS = 0.92, 2e-6

#: Others whose predicted time is at most so many times the best one are worth trying in real steps.
_NEAR, _MOST_NEAR = 2.0, 4

#: Sizes in bytes for which a choice is worked out: two for each doubling, up to 4 GiB.
_SIZES = tuple(size for power in range(32) for size in (1 << power, (3 << power) >> 1) if size != 1 or power == 0)

#: Sizes of units between nodes, in bytes, and how far above the least a unit's seconds a byte may be.
_BUCKETS = tuple(1 << power for power in range(18, 27))
_BUCKET_SLACK = 1.1


@dataclass(frozen=True)
class Facts:
    """What the choice depends on.

    Attributes
    ----------
    topology : Topology
    native : tuple of str
        Collectives that the transport has of its own.
    has_segments : bool
        Whether the ranks of each node share memory, and the buffer is the host's.
    choices : Choices or None
        What follows from measurements; None for the fixed table.
    """

    topology: Topology
    native: tuple[str, ...]
    has_segments: bool
    choices: Choices | None = None


@dataclass(frozen=True)
class Choices:
    """What to choose for how many bytes, with and without shared memory; the same on all ranks.

    Attributes
    ----------
    shared, messages : tuple of (bytes, algorithms)
        From so many bytes on, the algorithm to choose, and behind it those that are not far behind.  `shared` is empty
        where the ranks share no memory.
    bucket_bytes : int
        The size of a unit that messages are fused into.
    """

    shared: tuple[tuple[int, tuple[str, ...]], ...]
    messages: tuple[tuple[int, tuple[str, ...]], ...]
    bucket_bytes: int

    def near(self, nbytes: int, has_segments: bool) -> tuple[str, ...]:
        """Return the algorithm for so many bytes, and those not far behind it, the quickest first (Local)."""
        rows = self.shared if has_segments and self.shared else self.messages
        return rows[max(0, bisect_right(rows, nbytes, key=lambda row: row[0]) - 1)][1]

    def to_bytes(self) -> bytes:
        """Return the choices as bytes that can be sent (Local)."""
        return json.dumps([self.shared, self.messages, self.bucket_bytes]).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Choices:
        """Return the choices that `to_bytes` gave (Local)."""
        shared, messages, bucket_bytes = json.loads(raw)
        rows = [tuple((start, tuple(algorithms)) for start, algorithms in rows) for rows in (shared, messages)]
        return cls(rows[0], rows[1], bucket_bytes)


def choose(nbytes: int, facts: Facts) -> str:
    """Return the name of the algorithm for an all-reduce of `nbytes`; the same on all ranks (Local)."""
    return fixed(nbytes, facts) if facts.choices is None else facts.choices.near(nbytes, facts.has_segments)[0]


def near(nbytes: int, facts: Facts) -> tuple[str, ...]:
    """Return what `choose` does, and the algorithms that are not far behind by what was measured (Local)."""
    return (fixed(nbytes, facts),) if facts.choices is None else facts.choices.near(nbytes, facts.has_segments)


def fixed(nbytes: int, facts: Facts) -> str:
    """Return the algorithm by the fixed table (Local)."""
    topology = facts.topology
    if facts.has_segments and topology.node_count == 1:
        return "shared_memory"
    if nbytes < _LARGE_BYTES:
        return "native" if "all_reduce" in facts.native else "recursive_doubling"
    if topology.node_count > 1 and max(topology.local_size_of) > 1:
        return "two_level" if facts.has_segments else "hierarchical"
    return "ring"


def pinned(nbytes: int, facts: Facts) -> str:
    """Return the algorithm of a deterministic all-reduce: by the fixed table, but never MPI's own (Local).

    MPI only recommends that the same values give the same sum in each launch.
    """
    chosen = fixed(nbytes, facts)
    return "recursive_doubling" if chosen == "native" else chosen


def eligible(facts: Facts) -> tuple[str, ...]:
    """Return the algorithms that may be chosen here; of those that do the same, the first of the table (Local)."""
    topology = facts.topology
    has_levels = topology.node_count > 1 and max(topology.local_size_of) > 1
    usable = {
        "shared_memory": facts.has_segments and topology.node_count == 1,
        "two_level": facts.has_segments and has_levels,
        "native": "all_reduce" in facts.native,
        "hierarchical": has_levels and not facts.has_segments,  # two_level does the same, and more at a time
        "rabenseifner": topology.size > 2,  # of two ranks it is the ring
    }
    return tuple(name for name in AUTOMATIC if usable.get(name, True))


def least_bytes(facts: Facts) -> int:
    """Return from what size in bytes on it matters enough what is chosen that it is worth measuring (Local)."""
    return _LARGE_BYTES << 2 if facts.has_segments and facts.topology.node_count == 1 else _LARGE_BYTES


def worked_out(figures: Figures, facts: Facts) -> Choices:
    """Return what follows from measured figures; for rank 0, which sends it to all (Local)."""
    messages = Facts(facts.topology, facts.native, has_segments=False)
    shared = _rows(figures, facts) if facts.has_segments else ()
    return Choices(shared, _rows(figures, messages), _bucket_bytes(figures, messages))


def predictions(figures: Figures, nbytes: int, facts: Facts) -> dict[str, float]:
    """Return the seconds of an all-reduce by every eligible algorithm of which something is known (Local)."""
    topology = facts.topology
    found = {name: figures.seconds(name, nbytes, topology, _schedule(name, topology)) for name in eligible(facts)}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def is_gain(seconds: float, default_seconds: float) -> bool:
    """Return whether the one is so much quicker than the default that the default is left (Local)."""
    return seconds <= min(_GAIN * default_seconds, default_seconds - _GAIN_SECONDS)


def _rows(figures: Figures, facts: Facts) -> tuple[tuple[int, tuple[str, ...]], ...]:
    rows: list[tuple[int, tuple[str, ...]]] = []
    for nbytes in _SIZES:
        ranking = _ranking(predictions(figures, nbytes, facts), fixed(nbytes, facts))
        if not rows or rows[-1][1] != ranking:
            rows.append((nbytes, ranking))
    return tuple(rows)


def _ranking(seconds: dict[str, float], default: str) -> tuple[str, ...]:
    """Return what is to be chosen, which is `default` unless another one is clearly quicker, and what is near it."""
    order = sorted(seconds, key=lambda name: (seconds[name], name))
    if not order:
        return (default,)
    best = order[0]
    if default in seconds and not is_gain(seconds[best], seconds[default]):
        best = default
    others = [name for name in order if name != best and seconds[name] <= _NEAR * seconds[order[0]]]
    return (best, *others[: _MOST_NEAR - 1])


def _bucket_bytes(figures: Figures, facts: Facts) -> int:
    """Return the least size whose seconds a byte are hardly above those of the best: short units overlap better."""
    rates = [min(predictions(figures, nbytes, facts).values(), default=0.0) / nbytes for nbytes in _BUCKETS]
    return next(nbytes for nbytes, rate in zip(_BUCKETS, rates, strict=True) if rate <= _BUCKET_SLACK * min(rates))


def _schedule(name: str, topology: Topology) -> Schedule | None:
    if name in ("hierarchical", "two_level"):  # of the latter, what the model knows: the steps one after the other
        return hierarchical(topology, between_nodes(topology))
    return algorithm("all_reduce", name) if name in names("all_reduce") else None


def between_nodes(topology: Topology) -> str:
    """Return the algorithm that a hierarchical all-reduce uses between nodes: few messages where nodes are many."""
    return "ring" if topology.node_count <= _MANY_NODES else "rabenseifner"


def between_carriers(topology: Topology) -> str:
    """Return the algorithm between nodes for a two-level all-reduce: its units are small, so messages count.

    Two nodes exchange all they have, which is no more than a ring would send.  Of halving and doubling, unlike a ring,
    the bits do not depend on how the buffer is cut; but where nodes are no power of two some send twice as much.
    """
    nodes = topology.node_count
    if nodes == 2:
        return "recursive_doubling"
    return "rabenseifner" if nodes & (nodes - 1) == 0 or nodes > _MANY_NODES else "ring"


def check(name: str, facts: Facts) -> str:
    """Return the name of the algorithm that was asked for, if it can be used here.

    Raises
    ------
    ValueError
        There is no such algorithm, or not for these ranks and this kind of memory; the message lists those there are.
    """
    known = [*names("all_reduce"), "hierarchical"]
    if facts.has_segments:
        known.append("shared_memory" if facts.topology.node_count == 1 else "two_level")
    known += ["native"] if "all_reduce" in facts.native else []
    if name not in known:
        raise _unknown(name, known)
    return name


def check_name(name: str) -> None:
    """Raise ValueError unless there is an algorithm of this name somewhere, be it that one rank needs none."""
    known = [AUTO, PINNED, *names("all_reduce"), "hierarchical", "two_level", "shared_memory", "native"]
    if name not in known:
        raise _unknown(name, [name for name in known if name not in (AUTO, PINNED)])


def _unknown(name: str, known: list[str]) -> ValueError:
    return ValueError(f"no all_reduce algorithm is called {name!r} here; known ones: auto, {', '.join(known)}")


def asked_for(nbytes: int, asked: str, facts: Facts) -> str:
    """Return the algorithm for what was asked: ``"auto"``, ``"pinned"``, or one by name (Local).

    Raises ValueError as `check` does.
    """
    known: dict[str, Any] = {AUTO: choose, PINNED: pinned}
    return known[asked](nbytes, facts) if asked in known else check(asked, facts)
