"""All-reduce: mpidist's algorithms against MPI's own, in one run, as a table like that of nccl-tests.

    mpidist run -n 2 benchmarks/all_reduce.py                     # the table, on two ranks
    mpidist run -n 2 benchmarks/all_reduce.py --save results      # and as results/all_reduce-<mpi>-2.json
    python benchmarks/all_reduce.py --plot results                # results/*.json as one picture

Each row: size in bytes, elements, dtype, reduction, who, time of one call (median over the rounds of the slowest rank
in each), algbw = size / time, busbw = algbw * 2 (P - 1) / P, the ratio to the blocking ``Allreduce`` of the same round
and how many microseconds more (medians over the rounds), and how many elements were wrong.  The contenders take turns
within each round, so that a machine whose speed drifts does not favour one of them.  Every contender but raw MPI checks
each call on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

#: Algorithms measured beside ``Allreduce``, ``Iallreduce`` and the fused list of one tensor.
ALGORITHMS = ("auto", "shared_memory", "native", "ring", "recursive_doubling", "rabenseifner")
#: Slower than these sizes in bytes tell nothing new about an algorithm.
LARGEST = {"shared_memory": 1 << 15, "recursive_doubling": 1 << 24, "binomial": 1 << 24}
ROUNDS = 21
#: Bytes that one round moves per contender, about, and the most calls it makes.
ROUND_BYTES, MOST_CALLS = 1 << 22, 200

Row = dict[str, Any]


def main() -> None:
    """Measure, or plot what was measured."""
    options = arguments()
    if options.plot:
        plot(options.plot)
        return
    from mpi4py import MPI

    import mpidist
    from mpidist.collectives.communicator import Communicator

    strategy = mpidist.MultiWorkerMirroredStrategy()
    communicator = Communicator.world()
    comm = MPI.COMM_WORLD.Dup()
    rows: list[Row] = []
    if comm.rank == 0:
        print(heading(communicator, MPI), flush=True)
    for nbytes in sizes(options.smallest, options.largest):
        rows += strategy.run(measure_size, (nbytes, options.dtype, communicator, comm, MPI))
    if comm.rank == 0 and options.save:
        save(options.save, rows, communicator, MPI)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smallest", type=int, default=4, metavar="BYTES")
    parser.add_argument("--largest", type=int, default=1 << 26, metavar="BYTES")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the rows as JSON")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="plot the JSON files of DIR, and measure nothing")
    return parser.parse_args()


def sizes(smallest: int, largest: int) -> list[int]:
    """Return the sizes in bytes, each four times the one before."""
    found = [smallest]
    while found[-1] * 4 <= largest:
        found.append(found[-1] * 4)
    return found


def contenders(buffer: Any, communicator: Any, comm: Any, mpi: Any) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name: each reduces `buffer` once, in place or into memory of its own."""
    import mpidist
    from mpidist.fusion.pipeline import FusedAllReduce

    out = numpy.empty_like(buffer)

    def iallreduce() -> None:
        request = comm.Iallreduce(buffer, out)
        while not request.Test():
            pass

    fused = FusedAllReduce(communicator)
    found: dict[str, Callable[[], object]] = {
        "Allreduce": lambda: comm.Allreduce(buffer, out),
        "Iallreduce": iallreduce,
        "fused list of 1": lambda: fused([buffer]),
        "in strategy.run": lambda: mpidist.get_replica_context().all_reduce("SUM", buffer),
    }
    for name in ALGORITHMS:
        if buffer.nbytes <= LARGEST.get(name, buffer.nbytes):
            found[name] = lambda name=name: communicator.all_reduce(buffer, algorithm=name)
    return found


def measure_size(nbytes: int, dtype: str, communicator: Any, comm: Any, mpi: Any) -> list[Row]:
    """Return one row for each contender at this size, and print it on rank 0.  Collective."""
    count = max(1, nbytes // numpy.dtype(dtype).itemsize)
    buffer = numpy.zeros(count, dtype)
    calls = max(1, min(MOST_CALLS, ROUND_BYTES // nbytes))
    running = contenders(buffer, communicator, comm, mpi)
    times: dict[str, list[float]] = {name: [] for name in running}
    for round_ in range(ROUNDS + 2):
        for name, run in running.items():
            seconds = slowest(run, calls, comm, mpi)
            if round_ >= 2:  # the first two warm up
                times[name].append(seconds)
    rows = []
    for name in running:
        wrong = count_wrong(name, count, dtype, communicator, comm, mpi)
        rows.append(row(name, nbytes, count, dtype, times, wrong, comm.size))
        if comm.rank == 0:
            print(line(rows[-1]), flush=True)
    return rows


def slowest(run: Callable[[], object], calls: int, comm: Any, mpi: Any) -> float:
    """Return the seconds of one call on the slowest rank, averaged over `calls`.  Collective."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    mine = numpy.array([(time.perf_counter() - start) / calls])
    comm.Allreduce(mpi.IN_PLACE, mine, mpi.MAX)
    return float(mine[0])


def count_wrong(name: str, count: int, dtype: str, communicator: Any, comm: Any, mpi: Any) -> int:
    """Return how many elements of a reduction of known sum come out wrong, on all ranks together.  Collective."""
    size, rank = comm.size, comm.rank
    buffer = (numpy.arange(count) % 11 + rank).astype(dtype)
    expected = ((numpy.arange(count) % 11) * size + size * (size - 1) // 2).astype(dtype)
    if name == "fused list of 1":
        from mpidist.fusion.pipeline import FusedAllReduce

        (buffer,) = FusedAllReduce(communicator)([buffer])
    elif name == "in strategy.run":
        import mpidist

        buffer = mpidist.get_replica_context().all_reduce("SUM", buffer)
    elif name in ("Allreduce", "Iallreduce"):
        comm.Allreduce(mpi.IN_PLACE, buffer)
    else:
        communicator.all_reduce(buffer, algorithm=name)
    wrong = numpy.array([(buffer != expected).sum()])
    comm.Allreduce(mpi.IN_PLACE, wrong)
    return int(wrong[0])


def row(name: str, nbytes: int, count: int, dtype: str, times: dict[str, list[float]], wrong: int, size: int) -> Row:
    """Return what is known about one contender at one size."""
    seconds = float(numpy.median(times[name]))
    algbw = nbytes / seconds / 1e9
    ratios = numpy.array(times[name]) / numpy.array(times["Allreduce"])
    return {
        "size": nbytes,
        "count": count,
        "type": dtype,
        "redop": "sum",
        "who": name,
        "time_us": seconds * 1e6,
        "algbw_GBps": algbw,
        "busbw_GBps": algbw * 2 * (size - 1) / size,
        "ratio_to_Allreduce": float(numpy.median(ratios)),
        "more_than_Allreduce_us": float(numpy.median(numpy.array(times[name]) - numpy.array(times["Allreduce"]))) * 1e6,
        "wrong": wrong,
    }


def heading(communicator: Any, mpi: Any) -> str:
    """Return the lines above the table."""
    vendor, version = mpi.get_vendor()
    return (
        f"# {vendor} {'.'.join(map(str, version))}, {communicator.topology.describe()}, {os.cpu_count()} cores\n"
        f"#{'size':>11} {'count':>10} {'type':>8} {'redop':>6} {'who':>19} {'time':>10} {'algbw':>8} {'busbw':>8} "
        f"{'ratio':>7} {'more':>8} {'#wrong':>6}\n"
        f"#{'(B)':>11} {'(elements)':>10} {'':>8} {'':>6} {'':>19} {'(us)':>10} {'(GB/s)':>8} {'(GB/s)':>8} "
        f"{'':>7} {'(us)':>8}"
    )


def line(row: Row) -> str:
    """Return a row of the table."""
    return (
        f"{row['size']:>12} {row['count']:>10} {row['type']:>8} {row['redop']:>6} {row['who']:>19} "
        f"{row['time_us']:>10.1f} {row['algbw_GBps']:>8.3f} {row['busbw_GBps']:>8.3f} "
        f"{row['ratio_to_Allreduce']:>7.2f} {row['more_than_Allreduce_us']:>8.1f} {row['wrong']:>6}"
    )


def save(folder: Path, rows: list[Row], communicator: Any, mpi: Any) -> None:
    """Write the rows, with what they were measured on."""
    vendor, version = mpi.get_vendor()
    folder.mkdir(parents=True, exist_ok=True)
    machine = {
        "mpi": f"{vendor} {'.'.join(map(str, version))}",
        "ranks": communicator.size,
        "topology": communicator.topology.describe(),
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "rounds": ROUNDS,
    }
    name = f"all_reduce-{vendor.lower().replace(' ', '')}-{communicator.size}.json"
    (folder / name).write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


def plot(folder: Path) -> None:
    """Draw time against size for each file of `folder`, as folder/all_reduce.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    files = sorted(folder.glob("all_reduce-*.json"))
    if not files:
        raise SystemExit(f"no all_reduce-*.json in {folder}: measure first, with --save {folder}")
    figure, axes = pyplot.subplots(1, len(files), figsize=(6 * len(files), 5), sharey=True, squeeze=False)
    for axis, file in zip(axes[0], files, strict=True):
        draw(axis, json.loads(file.read_text()))
    figure.tight_layout()
    figure.savefig(folder / "all_reduce.png", dpi=110)
    print(folder / "all_reduce.png")


def draw(axis: Any, measured: dict[str, Any]) -> None:
    """Draw one file's rows."""
    machine = measured["machine"]
    for name in dict.fromkeys(row["who"] for row in measured["rows"]):
        rows = [row for row in measured["rows"] if row["who"] == name]
        own = name in ("Allreduce", "Iallreduce")
        style = {"color": "black", "linestyle": "-" if name == "Allreduce" else ":"} if own else {"marker": "."}
        axis.loglog([row["size"] for row in rows], [row["time_us"] for row in rows], label=name, **style)
    axis.set_title(f"{machine['mpi']}, {machine['topology']}, {machine['cores']} cores")
    axis.set_xlabel("size (bytes)")
    axis.set_ylabel("time of one all-reduce (us)")
    axis.grid(True, which="major", alpha=0.3)
    axis.legend()


if __name__ == "__main__":
    main()
