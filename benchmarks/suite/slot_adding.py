"""``slot-adding``: the adding of a short all-reduce alone, in one process, against ``numpy.add.reduce``."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy

from benchmarks.suite.cache_mode import UNKNOWN
from benchmarks.suite.results import Launch
from benchmarks.suite.rows import Row, row_of, table
from benchmarks.suite.targets import Target, report_of, time_of
from mpidist.commands.machine import machine

WHAT = "the adding of a short all-reduce alone"

#: Slots, one a rank, and bytes of each.
_SLOTS, _BYTES = (8, 16, 64), (4, 4096)

#: Calls of a turn, and turns.
_CALLS, _TURNS = 1000, 15

OURS, NUMPY = "mpidist", "numpy.add.reduce"

TARGETS = tuple(
    Target(
        "slot-adding", f"{slots} slots", 1, f"by numpy, {nbytes} B", time_of(OURS, NUMPY), 1.5, size=(nbytes, nbytes)
    )
    for slots in _SLOTS
    for nbytes in _BYTES
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this subcommand takes what all take."""


def start(options: argparse.Namespace) -> list[Launch]:
    """Measure in this process, print the table, and return the launch.  Local."""
    rows = [row for slots in _SLOTS for nbytes in _BYTES for row in measured(slots, nbytes, options.rounds or _TURNS)]
    for work in dict.fromkeys(row.work for row in rows):
        print(f"# {work}\n{table([row for row in rows if row.work == work])}", flush=True)
    found = [Launch("slot-adding", ["slot-adding"], 1, "no MPI", "1 process", {}, rows, {}, machine())]
    print(f"\n{report_of(TARGETS, found)}", flush=True)
    return found


def measured(slots: int, nbytes: int, turns: int) -> list[Row]:
    """Return the rows of so many slots; both take turns.  Local."""
    values, adding = of_engine(slots, nbytes)
    values[...] = numpy.random.default_rng(0).random(values.shape, "float32")
    expected = values[0].copy()
    for each in values[1:]:
        expected += each
    out, strided = numpy.empty_like(expected), numpy.empty_like(expected)
    runs = {OURS: lambda: adding(out), NUMPY: lambda: numpy.add.reduce(values, axis=0, out=strided)}
    seconds: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(turns):
        for who, run in runs.items():
            seconds[who].append(_once(run))
    base = NUMPY, float(numpy.median(seconds[NUMPY]))
    wrong = {OURS: int(numpy.count_nonzero(out != expected)), NUMPY: None}  # numpy adds one element in pairs
    kinds = {OURS: "ours", NUMPY: "reference"}
    work = f"{slots} slots"
    return [
        row_of(work, nbytes, "float32", who, kinds[who], seconds[who], base, 0.0, wrong[who], UNKNOWN) for who in runs
    ]


def _once(run: Callable[[], Any]) -> float:
    """Return the seconds of one call."""
    start = time.perf_counter()
    for _ in range(_CALLS):
        run()
    return (time.perf_counter() - start) / _CALLS


def of_engine(slots: int, nbytes: int) -> tuple[Any, Callable[[Any], None]]:
    """Return the engine's slots as one strided array by rank, and the function that adds them up into an array.

    The only place of the suite that knows how the engine adds short arrays.
    """
    from mpidist.collectives.ways.shared_memory import SegmentAllReduce
    from mpidist.transports.node_memory import SharedSegments

    segment_bytes = 64 * 1024
    memory = bytearray(SharedSegments.nbytes(slots, segment_bytes, 64))
    segments = SharedSegments(memory, slots, segment_bytes, 64)
    bound = SegmentAllReduce(segments, 0, (nbytes // 4,), numpy.dtype("float32"), "sum")
    watch: Any = SimpleNamespace(call=0)
    return _strided(segments.segments[0], nbytes), lambda out: bound.run(watch, (), (out,))


def _strided(rooms: Sequence[Any], nbytes: int) -> Any:
    """Return the beginnings of rooms that lie at even distances in one memory, as one array."""
    distance = rooms[1].__array_interface__["data"][0] - rooms[0].__array_interface__["data"][0]
    first = rooms[0][:nbytes].view("float32")
    return numpy.lib.stride_tricks.as_strided(first, (len(rooms), len(first)), (distance, 4))
