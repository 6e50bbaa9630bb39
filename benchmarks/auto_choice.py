"""AUTO against every fixed choice of an all-reduce: what leaving it to mpidist costs, at any size, in one launch.

    mpidist run -n 2 benchmarks/auto_choice.py                      # 4 B to 256 MB
    mpidist run -n 4 benchmarks/auto_choice.py --save results       # and results/auto_choice-<mpi>-4.json

Every call is the one that a training step makes: a list of one new array is reduced, and the result is kept for one
step.  Contenders take turns within each round, in an order that changes from round to round; of a round the slowest
rank counts.  A row shows the median seconds of AUTO, of the best fixed choice, by what AUTO is above it (ratio of
medians, and microseconds), and whether that is within the target: at most 1.10 times the best, or 5 us more.  AUTO has
settled before it is timed: what it tries in the first steps of a launch is not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy

from mpidist.collectives import selection
from mpidist.collectives.communicator import Communicator
from mpidist.fusion.pipeline import FusedAllReduce

#: The target: AUTO takes at most so many times what the best fixed choice does, or so many seconds more.
TARGET_RATIO, TARGET_SECONDS = 1.10, 5e-6

#: Seconds that a contender's part of a round takes at least, and the most calls in it.
ROUND_SECONDS, MOST_CALLS = 4e-3, 200

#: Steps before AUTO is timed: it has tried all its ways by then.
WARM_STEPS = 40

#: Fixed choices that take so many times what the best does in the first round are not timed further.
HOPELESS = 8.0

Row = dict[str, Any]


def main() -> None:
    """Measure; rank 0 prints the table.  Collective."""
    options = arguments()
    communicator = Communicator.world()
    names = ("auto", *fixed_choices(communicator))
    reducers = {name: FusedAllReduce(communicator, algorithm=name) for name in names}
    rows: list[Row] = []
    if communicator.rank == 0:
        print(heading(communicator), flush=True)
    for nbytes in sizes(options.smallest, options.largest):
        rows.append(measure(nbytes, options.rounds, communicator, reducers))
        if communicator.rank == 0:
            print(line(rows[-1]), flush=True)
    if communicator.rank == 0:
        print(verdict(rows), flush=True)
        if options.save:
            save(options.save, rows, communicator, options.rounds)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", type=int, default=4, metavar="BYTES")
    parser.add_argument("--largest", type=int, default=1 << 28, metavar="BYTES")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the rows as JSON")
    return parser.parse_args()


def sizes(smallest: int, largest: int) -> list[int]:
    """Return the sizes in bytes, each four times the one before."""
    found = [smallest]
    while found[-1] * 4 <= largest:
        found.append(found[-1] * 4)
    return found


def fixed_choices(communicator: Communicator) -> list[str]:
    """Return every algorithm that AUTO could take here, and the rest of the table."""
    facts = communicator.facts()
    names = [*selection.eligible(facts), *(["remote_read"] if facts.has_remote else [])]
    return [*names, *(name for name in ("rabenseifner", "binomial") if name not in names)]


def measure(nbytes: int, rounds: int, communicator: Communicator, reducers: dict[str, FusedAllReduce]) -> Row:
    """Return the row of one size.  Collective."""
    contenders = {name: Contender(reduce, nbytes) for name, reduce in reducers.items()}
    once = {name: slowest(communicator, [contender.seconds(2)])[0] for name, contender in contenders.items()}
    best = min(seconds for name, seconds in once.items() if name != "auto")
    contenders = {
        name: each for name, each in contenders.items() if name == "auto" or once[name] <= HOPELESS * max(best, 1e-4)
    }
    for name in contenders:
        contenders[name].seconds(WARM_STEPS if name == "auto" else 2)
    once = {name: slowest(communicator, [contender.seconds(2)])[0] for name, contender in contenders.items()}
    calls = {name: max(1, min(MOST_CALLS, int(ROUND_SECONDS / once[name]))) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    for round_ in range(rounds):
        for name in order[round_ % len(order) :] + order[: round_ % len(order)]:
            communicator.barrier()
            times[name].append(contenders[name].seconds(calls[name]))
    agreed = {name: slowest(communicator, listed) for name, listed in times.items()}
    return row(nbytes, {name: float(numpy.median(listed)) for name, listed in agreed.items()}, communicator)


class Contender:
    """One way to reduce arrays of one size, new ones every time."""

    def __init__(self, reduce: FusedAllReduce, nbytes: int) -> None:
        self._reduce = reduce
        self._count = max(1, nbytes // 4)
        self._kept: Any = None

    def seconds(self, calls: int) -> float:
        """Return the seconds of one call, without those of making the arrays."""
        taken = 0.0
        for _ in range(calls):
            gradients = [numpy.full(self._count, 0.0, dtype=numpy.float32)]
            start = time.perf_counter()
            result = self._reduce(gradients)
            taken += time.perf_counter() - start
            self._kept = result
        return taken / calls


def slowest(communicator: Communicator, seconds: list[float]) -> list[float]:
    """Return the greatest of each value over all ranks.  Collective."""
    found = numpy.array(seconds)
    communicator.all_reduce(found, "max", algorithm="pinned")
    return [float(value) for value in found]


def row(nbytes: int, medians: dict[str, float], communicator: Communicator) -> Row:
    """Return what is known about one size."""
    fixed = {name: seconds for name, seconds in medians.items() if name != "auto"}
    best = min(fixed, key=lambda name: fixed[name])
    more = medians["auto"] - fixed[best]
    ratio = medians["auto"] / fixed[best]
    return {
        "size": nbytes,
        "auto_us": medians["auto"] * 1e6,
        "best": best,
        "best_us": fixed[best] * 1e6,
        "ratio": ratio,
        "more_us": more * 1e6,
        "within": bool(ratio <= TARGET_RATIO or more <= TARGET_SECONDS),
        "chosen": communicator.ways(nbytes, "auto")[0].label,
        "fixed_us": {name: seconds * 1e6 for name, seconds in fixed.items()},
    }


def heading(communicator: Communicator) -> str:
    """Return the lines above the table."""
    return (
        f"# {communicator.transport.library}, {communicator.topology.describe()}, {os.cpu_count()} cores\n"
        f"#{'size':>11} {'AUTO':>10} {'best':>10} {'ratio':>7} {'more':>8} {'target':>7}  {'best':<20} AUTO takes\n"
        f"#{'(B)':>11} {'(us)':>10} {'(us)':>10} {'':>7} {'(us)':>8}"
    )


def line(row: Row) -> str:
    """Return a row of the table."""
    met = "met" if row["within"] else "MISSED"
    return (
        f"{row['size']:>12} {row['auto_us']:>10.1f} {row['best_us']:>10.1f} {row['ratio']:>7.2f} "
        f"{row['more_us']:>8.1f} {met:>7}  {row['best']:<20} {row['chosen']}"
    )


def verdict(rows: list[Row]) -> str:
    """Return at how many sizes the target is met, and where it is not."""
    missed = [row for row in rows if not row["within"]]
    where = ", ".join(f"{row['size']} B ({row['ratio']:.2f}x, {row['best']})" for row in missed)
    return f"# target met at {len(rows) - len(missed)} of {len(rows)} sizes" + (
        f"; missed at {where}" if missed else ""
    )


def save(folder: Path, rows: list[Row], communicator: Communicator, rounds: int) -> None:
    """Write the rows, with what they were measured on."""
    folder.mkdir(parents=True, exist_ok=True)
    library = communicator.transport.library
    machine = {
        "mpi": library,
        "ranks": communicator.size,
        "topology": communicator.topology.describe(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "rounds": rounds,
    }
    vendor = library.rpartition(" ")[0].lower().replace(" ", "") or communicator.transport.name
    path = folder / f"auto_choice-{vendor}-{communicator.size}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
