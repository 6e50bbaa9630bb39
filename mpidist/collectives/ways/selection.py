"""Which all-reduce to use for how many bytes: a table, and the rules around it.

An explicit choice wins.  AUTO takes what `mpidist tune` stored, if a user asked for that (`Choices`, worked out on rank
0 and sent to all), else a row of `TABLE`.  `deterministic` takes the table, without MPI's own all-reduce.  A choice is
the same from the first step to the last.  Every algorithm of the table gives the same bits on all ranks: the checker
proves it for schedules, a parallel test shows it for shared memory and for MPI's own all-reduce.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpidist.cluster.topology import Topology
from mpidist.schedules.figures import Figures
from mpidist.schedules.rounds import Schedule
from mpidist.schedules.table import algorithm, hierarchical, names

#: The all-reduces that `choose` may return: all ranks get the same bits.
AUTOMATIC = ("shared_memory", "two_level", "native", "recursive_doubling", "hierarchical", "ring", "rabenseifner")

#: What may be asked for besides an algorithm: a choice by what was measured, or by the fixed table.
AUTO, PINNED = "auto", "pinned"

#: From this size in bytes on, moving every byte once counts more than the number of messages; and from this one on two
#: ranks that exchange all they have, with several messages under way, are quicker than a ring.
_LARGE_BYTES, _PAIR_BYTES = 1 << 16, 1 << 19

#: A unit from this size in bytes on goes through memory in segments of `SEGMENT_BYTES`; a shorter one in shorter
#: segments: one or two MiB in a single segment would be out of cache when they are added.
LONG_BYTES, SEGMENT_BYTES, _SHORT_SEGMENT_BYTES = 1 << 21, 1 << 20, 1 << 19

#: The algorithms that work on segments of tensors, which need not be packed.
SEGMENTED = ("shared_memory", "two_level")


#: What may be asked for where arrays lie in device memory: the device's own collectives, or the host's on copies.  For
#: arrays of the host both stand for `AUTO`.
NCCL, STAGED = "nccl", "staged"

#: What leaves the host's algorithm to the table and to what was measured.
FREE = (AUTO, NCCL, STAGED)

#: The former of both where these ranks can use it, else the latter.
_DEVICE = "device"


class Row(NamedTuple):
    """What AUTO takes for units of at least so many bytes.

    Attributes
    ----------
    place : str
        ``"node"``: one node whose ranks share memory; ``"nodes"``: several nodes, with shared memory in each;
        ``"pair"``: the same, of two nodes with one rank each; ``"levels"``: several nodes, without; ``"flat"``: one
        rank a node, or one node without shared memory;
        ``"device"``: arrays lie in device memory that the transport does not move by itself.
    ranks : int
        On so many ranks at most it was measured; 0: not at all.
    files : str
        Those in ``benchmarks/results`` that the row follows from, if any.
    """

    place: str
    least_bytes: int
    algorithm: str
    ranks: int = 0
    files: str = ""

    def evidence(self, ranks: int) -> str:
        """Return what the row follows from, and for so many ranks whether that is more than was measured (Local)."""
        if not self.ranks:
            return "not measured"
        return self.files if ranks <= self.ranks else f"not measured on more than {self.ranks} ranks: {self.files}"


#: The rows of a place ascend by size.
TABLE = (
    Row("node", 0, "shared_memory", 16, "all-reduce-openmpi-2.json, gradients-2.json, all-reduce-16-cores-16.json"),
    Row("nodes", 0, "native", 4, "two_hosts-openmpi.json"),
    Row("nodes", _LARGE_BYTES, "two_level", 4, "two_hosts-openmpi.json"),
    Row("pair", 0, "native", 2, "pair-openmpi.json"),
    Row("pair", _LARGE_BYTES, "ring", 2, "pair-openmpi.json"),
    Row("pair", _PAIR_BYTES, "two_level", 2, "pair-openmpi.json"),
    Row("levels", 0, "native"),
    Row("levels", _LARGE_BYTES, "hierarchical"),
    Row("flat", 0, "native"),
    Row("flat", _LARGE_BYTES, "ring"),
    Row("device", 0, _DEVICE),
)

#: From so many nodes on the 2 (nodes - 1) messages of a ring between them cost more than they save.
_MANY_NODES = 8

#: What must be measured before the fixed table is left: this part of its time, and so many seconds less.  Then times
#: differ by more than the noise of a measurement.
GAIN, _GAIN_SECONDS = 0.92, 2e-6

#: Sizes in bytes for which a choice is worked out: two for each doubling, up to 4 GiB.
_SIZES = tuple(size for power in range(32) for size in (1 << power, (3 << power) >> 1) if size != 1 or power == 0)

#: Sizes of units between nodes, in bytes, and how far above the least a unit's seconds a byte may be.
_BUCKETS = tuple(1 << power for power in range(18, 27))
_BUCKET_SLACK = 1.1


class Way(NamedTuple):
    """An algorithm, and the bytes of a segment where it has segments, else 0."""

    algorithm: str
    segment_bytes: int = 0

    @property
    def label(self) -> str:
        """What ranks must have in common: those that cut differently would read what is not there."""
        size = self.segment_bytes
        return f"{self.algorithm} in segments of {size >> 10} KiB" if size else self.algorithm


@dataclass(frozen=True)
class Facts:
    """What the choice depends on.

    `native` are collectives that the transport has of its own; `has_segments`: the ranks of each node share memory.
    `choices` follow from measurements; None for the table.  `on_device`: the buffer lies in device memory that the
    transport does not move by itself.
    """

    topology: Topology
    native: tuple[str, ...]
    has_segments: bool
    choices: Choices | None = None
    on_device: bool = False

    @property
    def place(self) -> str:
        """Which rows of the table are for these ranks and this kind of memory."""
        if self.on_device:
            return "device"
        if self.has_segments and self.topology.node_count == 1:
            return "node"
        if self.topology.node_count == 1 or max(self.topology.local_size_of) == 1:
            return "pair" if self.has_segments and self.topology.node_count == 2 else "flat"
        return "nodes" if self.has_segments else "levels"


@dataclass(frozen=True)
class Choices:
    """What to choose for how many bytes, with and without shared memory; the same on all ranks.

    From so many bytes on, `shared` and `messages` name the algorithm; `shared` is empty where the ranks share no
    memory.  `bucket_bytes` is the size of a unit that messages are fused into, `segment_bytes` that of segments of long
    units through the memory of one node; None for that of the table.
    """

    shared: tuple[tuple[int, str], ...]
    messages: tuple[tuple[int, str], ...]
    bucket_bytes: int
    segment_bytes: int | None = None

    def algorithm(self, nbytes: int, has_segments: bool) -> str:
        """Return the algorithm for so many bytes (Local)."""
        rows = self.shared if has_segments and self.shared else self.messages
        return rows[max(0, bisect_right(rows, nbytes, key=lambda row: row[0]) - 1)][1]

    def to_bytes(self) -> bytes:
        """Return what `from_bytes` reads (Local)."""
        return json.dumps([self.shared, self.messages, self.bucket_bytes, self.segment_bytes]).encode()

    @classmethod
    def from_bytes(cls, raw: bytes) -> Choices:
        """Return what `to_bytes` wrote (Local)."""
        shared, messages, bucket_bytes, segment_bytes = json.loads(raw)
        rows = [tuple((int(least), str(name)) for least, name in table) for table in (shared, messages)]
        return cls(rows[0], rows[1], int(bucket_bytes), segment_bytes)


def way(nbytes: int, asked: str, facts: Facts) -> Way:
    """Return the way of an all-reduce of one unit of `nbytes` (Local).

    `asked` is ``"auto"``, ``"pinned"``, ``"nccl"``, ``"staged"``, or an algorithm by name.  ValueError where there is
    no such algorithm, or not for these ranks and this kind of memory.
    """
    chosen = asked_for(nbytes, asked, facts)
    if chosen not in SEGMENTED:
        return Way(chosen)
    if nbytes < LONG_BYTES:
        return Way(chosen, _SHORT_SEGMENT_BYTES)
    choices = facts.choices if asked in FREE and chosen == "shared_memory" else None
    tuned = None if choices is None else choices.segment_bytes
    return Way(chosen, tuned or SEGMENT_BYTES)


def choose(nbytes: int, facts: Facts) -> str:
    """Return the algorithm for so many bytes, by what was measured or by the table (Local)."""
    return by_table(nbytes, facts) if facts.choices is None else facts.choices.algorithm(nbytes, facts.has_segments)


def by_table(nbytes: int, facts: Facts) -> str:
    """Return the algorithm by the table (Local)."""
    row = row_of(nbytes, facts)
    is_missing = row.algorithm == "native" and "all_reduce" not in facts.native
    return "recursive_doubling" if is_missing else row.algorithm


def row_of(nbytes: int, facts: Facts) -> Row:
    """Return the row of the table for so many bytes (Local)."""
    return [row for row in TABLE if row.place == facts.place and row.least_bytes <= nbytes][-1]


def pinned(nbytes: int, facts: Facts) -> str:
    """Return the algorithm of a deterministic all-reduce: by the table, but never MPI's own (Local).

    MPI only recommends that the same values give the same sum in each launch.
    """
    chosen = by_table(nbytes, facts)
    if facts.on_device:
        return f"{chosen}:{PINNED}"
    return instead_of_native(nbytes) if chosen == "native" else chosen


def instead_of_native(nbytes: int) -> str:
    """Return the schedule for what MPI's own all-reduce cannot do: few messages, or every byte once (Local)."""
    return "recursive_doubling" if nbytes < _LARGE_BYTES else "ring"


def eligible(facts: Facts) -> tuple[str, ...]:
    """Return the algorithms that may be chosen here; of those that do the same, the first of the table (Local)."""
    topology = facts.topology
    has_levels = topology.node_count > 1 and max(topology.local_size_of) > 1
    usable = {
        "shared_memory": facts.has_segments and topology.node_count == 1,
        "two_level": facts.has_segments and topology.node_count > 1,
        "native": "all_reduce" in facts.native,
        "hierarchical": has_levels and not facts.has_segments,  # two_level does the same, and more at a time
        "rabenseifner": topology.size > 2,  # of two ranks it is the ring
    }
    return tuple(name for name in AUTOMATIC if usable.get(name, True))


def worked_out(figures: Figures, facts: Facts) -> Choices:
    """Return what follows from measured figures; for rank 0, which sends it to all (Local)."""
    messages = Facts(facts.topology, facts.native, has_segments=False)
    shared = _rows(figures, facts) if facts.has_segments else ()
    return Choices(shared, _rows(figures, messages), _bucket_bytes(figures, messages), figures.segment_bytes)


def predictions(figures: Figures, nbytes: int, facts: Facts) -> dict[str, float]:
    """Return the seconds of an all-reduce by every eligible algorithm of which something is known (Local)."""
    topology = facts.topology
    found = {name: figures.seconds(name, nbytes, topology, _schedule(name, topology)) for name in eligible(facts)}
    return {name: seconds for name, seconds in found.items() if seconds is not None}


def is_gain(seconds: float, default_seconds: float) -> bool:
    """Return whether the one is so much quicker than the default that the default is left (Local)."""
    return seconds <= min(GAIN * default_seconds, default_seconds - _GAIN_SECONDS)


def _rows(figures: Figures, facts: Facts) -> tuple[tuple[int, str], ...]:
    rows: list[tuple[int, str]] = []
    for nbytes in _SIZES:
        chosen = _best(predictions(figures, nbytes, facts), by_table(nbytes, facts))
        if not rows or rows[-1][1] != chosen:
            rows.append((nbytes, chosen))
    return tuple(rows)


def _best(seconds: dict[str, float], default: str) -> str:
    """Return the quickest, or `default` unless another one is clearly quicker."""
    best = min(seconds, key=lambda name: (seconds[name], name), default=default)
    return default if default in seconds and not is_gain(seconds[best], seconds[default]) else best


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
    known = [AUTO, PINNED, *names("all_reduce"), "hierarchical", "two_level", "shared_memory", "native", NCCL, STAGED]
    if name not in known:
        raise _unknown(name, [name for name in known if name not in (AUTO, PINNED)])


def _unknown(name: str, known: list[str]) -> ValueError:
    return ValueError(f"no all_reduce algorithm is called {name!r} here; known ones: auto, {', '.join(known)}")


def asked_for(nbytes: int, asked: str, facts: Facts) -> str:
    """Return the algorithm for what was asked: ``"auto"``, ``"pinned"``, or one by name (Local).

    In device memory it is `NCCL`, `STAGED` or one of both, and behind a colon what the host's part was asked for.
    Raises ValueError as `check` does.
    """
    if asked in (NCCL, STAGED) and not facts.on_device:
        asked = AUTO
    known: dict[str, Any] = {AUTO: choose, PINNED: pinned}
    if asked in known:
        return known[asked](nbytes, facts)
    if not facts.on_device:
        return check(asked, facts)
    return asked if asked in (NCCL, STAGED) else f"{STAGED}:{check(asked, facts)}"
