"""AUTO against every fixed choice of an all-reduce: what leaving it to mpidist costs, at any size, in one launch.

    mpidist run -n 2 benchmarks/auto_choice.py                                 # 4 B to 256 MB
    mpidist run -n 4 benchmarks/auto_choice.py --save benchmarks/results       # and .../auto_choice-4.json

Every call is the one that a training step makes: a list of one new array is reduced, and the result is kept for one
step.  Contenders take turns within each round, in an order that changes from round to round; of a round the slowest
rank counts.  A row shows the median seconds of AUTO, of the best fixed choice, by what AUTO is above it (ratio of
medians, and microseconds), and whether that is within the target: at most 1.10 times the best, or 5 us more.  AUTO has
settled before it is timed: what it tries in the first steps of a launch is not part of it.  ``mpidist bench show``
reads what is saved.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from mpidist.collectives.communicator import Communicator
from mpidist.collectives.fused import FusedAllReduce
from mpidist.commands.bench import results
from mpidist.commands.bench.all_reduce import sizes
from mpidist.commands.bench.auto_choice import AUTO, fixed_choices, heading, held, line, verdict
from mpidist.commands.bench.cache_mode import CHANGED
from mpidist.commands.bench.contender import Ours
from mpidist.commands.bench.ranks import Ranks
from mpidist.commands.bench.results import Launch
from mpidist.commands.bench.rows import Row, all_reduce_factor, row_of
from mpidist.commands.machine import machine

#: Seconds that a contender's part of a round takes at least, and the most calls in it.
ROUND_SECONDS, MOST_CALLS = 4e-3, 200

#: Arrays of so many bytes are too large for all contenders to keep buffers at a time; they warm up in every turn then.
LARGE_BYTES = 1 << 28

#: Fixed choices that take so many times what the best does in the first round are not timed further.
HOPELESS, HOPELESS_IF_LARGE = 4.0, 2.5


def main() -> None:
    """Measure; rank 0 prints the table.  Collective."""
    options, ranks = arguments(), Ranks()
    communicator = ranks.communicator
    names = [AUTO, *fixed_choices(communicator)]
    topology, facts = communicator.topology.describe(), machine()
    ranks.say(f"# {ranks.library}, {topology}, {facts['cores']} cores\n{heading()}")
    rows: list[Row] = []
    hopeless: dict[str, str] = {}
    for nbytes in sizes(options.smallest, options.largest):
        found, left_out = measure(nbytes, options.rounds, ranks, names)
        rows, hopeless = rows + found, hopeless | left_out
        ranks.say(f"{line(held(rows)[-1]):<80} AUTO takes {communicator.way(nbytes, AUTO).label}")
    ranks.say(f"{verdict(held(rows))}\n# cache mode: {ranks.probe.describe()}")
    if options.save and ranks.rank == 0:
        options.save.mkdir(parents=True, exist_ok=True)
        command = ["run", "-n", str(ranks.size), *sys.argv]
        launch = Launch(
            "auto-choice", command, ranks.size, ranks.library, topology, ranks.probe.looks, rows, hopeless, facts
        )
        results.write(options.save / f"auto_choice-{ranks.size}.json", [launch])


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", type=int, default=4, metavar="BYTES")
    parser.add_argument("--largest", type=int, default=1 << 28, metavar="BYTES")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the rows as JSON")
    return parser.parse_args()


def measure(nbytes: int, rounds: int, ranks: Ranks, names: Sequence[str]) -> tuple[list[Row], dict[str, str]]:
    """Return the rows of one size, and by name and size why a choice has none.  Collective."""
    contenders, before = {name: Contender(ranks.communicator, name, nbytes) for name in names}, ranks.probe.look()
    is_large = nbytes >= LARGE_BYTES
    gc.collect()  # what is bound to buffers refers to itself
    once = {name: ranks.slowest(contender.seconds(1 if is_large else 2)) for name, contender in contenders.items()}
    best = min(once[name] for name in names if name != AUTO)
    limit = (HOPELESS_IF_LARGE if is_large else HOPELESS) * max(1e-4, best)
    contenders = {name: each for name, each in contenders.items() if name == AUTO or once[name] <= limit}
    hopeless = {
        f"{name}, {nbytes} B": f"took {once[name] * 1e6:.0f} us a call in the first round, the best {best * 1e6:.0f} us"
        for name in names
        if name not in contenders
    }
    contenders[AUTO].seconds(Ours.warm_ups)
    if not is_large:
        once = {name: ranks.slowest(contender.seconds(2)) for name, contender in contenders.items()}
    calls = {name: 1 if is_large else max(1, min(MOST_CALLS, int(ROUND_SECONDS / once[name]))) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for round_ in range(rounds):
        for name in order[round_ % len(order) :] + order[: round_ % len(order)]:
            ranks.communicator.barrier()
            times[name].append(contenders[name].seconds(calls[name]))
    agreed = {name: [ranks.slowest(seconds) for seconds in listed] for name, listed in times.items()}
    mode = before if ranks.probe.look() == before else CHANGED
    auto, factor = (AUTO, float(numpy.median(agreed[AUTO]))), all_reduce_factor(ranks.size)
    what = "one array", nbytes, "float32"
    rows = [row_of(*what, name, "ours", seconds, auto, factor, cache=mode) for name, seconds in agreed.items()]
    return rows, hopeless


class Contender:
    """One way to reduce arrays of one size, new ones every time."""

    def __init__(self, communicator: Communicator, algorithm: str, nbytes: int) -> None:
        self._communicator, self._algorithm, self._nbytes = communicator, algorithm, nbytes
        self._reduce: FusedAllReduce | None = None
        self._kept: Any = None

    def seconds(self, calls: int) -> float:
        """Return the seconds of one call, without those of making the arrays.  Collective."""
        reduce = self._reduce or FusedAllReduce(self._communicator, algorithm=self._algorithm)
        if self._reduce is None:
            for _ in range(2):  # a result is kept while the next one is made: there is memory for both then
                self._once(reduce)
        taken = sum(self._once(reduce) for _ in range(calls))
        if self._nbytes >= LARGE_BYTES:
            self._reduce = self._kept = reduce = None
            gc.collect()
        else:
            self._reduce = reduce
        return taken / calls

    def _once(self, reduce: FusedAllReduce) -> float:
        gradients = [numpy.full(max(1, self._nbytes // 4), 0.0, dtype=numpy.float32)]
        start = time.perf_counter()
        result = reduce(gradients)
        taken = time.perf_counter() - start
        self._kept = result
        return taken


if __name__ == "__main__":
    main()
