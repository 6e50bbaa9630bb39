"""All-reduce over several hosts of this one machine whose links are limited: mpidist's two levels against the others.

    python benchmarks/two_levels.py                     # 2 hosts x 2 ranks, 100 Mbit/s, 5 MB, block and cyclic
    python benchmarks/two_levels.py --slots 3 1 --rate 50mbit --bytes 1000000
    python benchmarks/two_levels.py --save benchmarks/results

Needs root and iproute2; see ``tests/netns/up``, which makes the hosts.  The *bound* is the time in which a link carries
the buffer once: in any all-reduce of two hosts or more, each must send that much and receive that much, or nearly so
with many hosts.  All contenders take turns in one job; a time is the slowest rank's, and the median of all rounds.
`link` is how many times the buffer left the first host, counted by the kernel, headers included.  The model's times are
those of the schedules in the simulator, with the link's rate and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

ROOT = Path(__file__).resolve().parent.parent

#: What `mpidist.collectives` calls them; `Allreduce` is mpi4py's, and `list` the public call on a list of tensors.
OURS = ("two_level", "hierarchical", "ring")

Row = dict[str, Any]


def main() -> None:
    """Start the hosts and the jobs; or, as a rank of such a job, measure."""
    options = parsed()
    if options.rank:
        measure(options)
        return
    sys.path.insert(0, str(ROOT))
    from tests.netns.hosts import several_hosts

    rows: list[Row] = []
    with several_hosts(len(options.slots), options.rate) as hosts, tempfile.TemporaryDirectory() as tuning:
        env = {"MPIDIST_TUNING_FOLDER": tuning, "MPIDIST_CALIBRATE": str(int(options.calibrate))}
        for placement in options.placements * options.launches:
            forwarded = [a for name in ("bytes", "rounds", "rate") for a in (f"--{name}", str(getattr(options, name)))]
            command = [str(Path(__file__).resolve()), "--rank", *forwarded]
            job = hosts.run(options.slots, command, placement == "cyclic", env, timeout_seconds=600)
            found = [json.loads(line[1:]) for line in job.stdout.splitlines() if line.startswith("@")]
            if job.returncode or not found:
                raise SystemExit(f"the job ended with status {job.returncode}\n{job.stdout}\n{job.stderr}")
            rows += found
            show(found)
    if options.launches > 1:
        summary(rows)
    if options.save:
        save(options.save, rows)


def parsed() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description="all-reduce over hosts with limited links")
    parser.add_argument("--slots", type=int, nargs="+", default=[2, 2], help="ranks by host")
    parser.add_argument("--rate", default="100mbit", help="of every link")
    parser.add_argument("--bytes", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--placements", nargs="+", default=["block", "cyclic"], choices=["block", "cyclic"])
    parser.add_argument("--save", type=Path, metavar="DIR", help="add the rows to those that are there")
    parser.add_argument("--launches", type=int, default=1, help="jobs for each placement")
    parser.add_argument("--calibrate", action="store_true", help="measure first; else AUTO is the fixed table")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- on the ranks ------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    """Print the rows of this placement.  Collective."""
    from mpi4py import MPI

    from mpidist.collectives.communicator import Communicator

    communicator, comm = Communicator.world(), MPI.COMM_WORLD
    buffer = numpy.zeros(options.bytes // 4, "f4")
    running = contenders(buffer, communicator, comm)
    seconds: dict[str, list[float]] = {name: [] for name in running}
    sent: dict[str, list[float]] = {name: [] for name in running}
    for round_ in range(options.rounds + 1):
        for name, run in running.items():
            before = bytes_sent()
            slowest = timed(run, comm, MPI)
            if round_:  # the first one warms up
                seconds[name].append(slowest)
                sent[name].append((bytes_sent() - before) / buffer.nbytes)
    wrong = {name: count_wrong(run, buffer, comm, MPI) for name, run in running.items()}
    bound = buffer.nbytes * 8 / bits_per_second(options.rate)
    if comm.rank == 0:
        place = {"mpi": vendor(MPI), "topology": communicator.topology.describe(), "rate": options.rate}
        predicted = model(communicator.topology, buffer.nbytes, bound)
        for name in running:
            ours = float(numpy.median(seconds[name]))
            row = {**place, "bytes": buffer.nbytes, "who": name, "ms": ours * 1e3, "bound": bound / ours}
            row["ratio"] = float(numpy.median(numpy.array(seconds[name]) / numpy.array(seconds["two_level"])))
            row["link"] = float(numpy.median(sent[name]))
            row["model_ms"] = predicted[name] * 1e3 if name in predicted else None
            print("@" + json.dumps({**row, "wrong": wrong[name]}), flush=True)


def contenders(buffer: Any, communicator: Any, comm: Any) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name: each returns the sum of `buffer` over all ranks."""
    from mpidist.fusion.pipeline import FusedAllReduce

    cuts = numpy.linspace(0, buffer.size, 162).astype(int)[1:-1]
    fused, out = FusedAllReduce(communicator), numpy.empty_like(buffer)

    def by(name: str) -> Callable[[], Any]:
        def run() -> Any:
            work = buffer.copy()
            communicator.all_reduce(work, algorithm=name)
            return work

        return run

    def allreduce() -> Any:
        comm.Allreduce(buffer, out)
        return out

    found = {name: by(name) for name in OURS}
    return {**found, "list of 161": lambda: numpy.concatenate(fused(numpy.split(buffer, cuts))), "Allreduce": allreduce}


def timed(run: Callable[[], Any], comm: Any, mpi: Any) -> float:
    """Return the seconds of one call on the slowest rank.  Collective."""
    comm.Barrier()
    start = time.perf_counter()
    run()
    mine = numpy.array([time.perf_counter() - start])
    comm.Allreduce(mpi.IN_PLACE, mine, mpi.MAX)
    return float(mine[0])


def count_wrong(run: Callable[[], Any], buffer: Any, comm: Any, mpi: Any) -> int:
    """Return how many elements of a sum that is known come out wrong, on all ranks together.  Collective."""
    pattern = numpy.arange(buffer.size) % 11
    buffer[...] = pattern + comm.rank
    wrong = numpy.array([(run() != pattern * comm.size + comm.size * (comm.size - 1) // 2).sum()])
    comm.Allreduce(mpi.IN_PLACE, wrong)
    return int(wrong[0])


def bytes_sent() -> int:
    """Return how many bytes have left this host by its link."""
    with open("/proc/net/dev") as file:
        (line,) = [line for line in file if line.strip().startswith("eth0:")]
    return int(line.split(":")[1].split()[8])


def model(topology: Any, nbytes: int, bound: float) -> dict[str, float]:
    """Return the seconds of the schedules with one link a node, and memory that takes no time."""
    from mpidist.collectives.algorithms import algorithm, hierarchical
    from mpidist.collectives.cost import CostModel, Level
    from mpidist.collectives.simulator import simulate

    free, link = Level(0.0, 0.0), Level(1e-4, bound / nbytes)
    schedules = {"ring": algorithm("all_reduce", "ring"), "hierarchical": hierarchical(topology)}
    prices = CostModel(intra=free, inter=link, links_per_node=1)
    return {name: simulate(each, topology.size, nbytes, prices, topology).seconds for name, each in schedules.items()}


def bits_per_second(rate: str) -> float:
    """Return what tc means by a rate: ``100mbit``."""
    match = re.fullmatch(r"([\d.]+)(k|m|g)bit", rate)
    if not match:
        raise SystemExit(f"--rate {rate}: expected a number and kbit, mbit or gbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def vendor(mpi: Any) -> str:
    """Return the MPI's name and version."""
    name, version = mpi.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


# -- what is shown -----------------------------------------------------------------------------------------------------


def show(rows: Sequence[Row]) -> None:
    """Print a table."""
    first = rows[0]
    print(f"# {first['mpi']}, {first['topology']}, links of {first['rate']}, {first['bytes']} bytes")
    print(f"{'who':>14} {'ms':>9} {'of bound':>9} {'ratio':>6} {'link':>6} {'model ms':>9} {'#wrong':>6}")
    for row in rows:
        predicted = "" if row["model_ms"] is None else f"{row['model_ms']:.1f}"
        print(
            f"{row['who']:>14} {row['ms']:>9.1f} {row['bound']:>9.1%} {row['ratio']:>6.2f} {row['link']:>6.2f} "
            f"{predicted:>9} {row['wrong']:>6}",
            flush=True,
        )


def summary(rows: Sequence[Row]) -> None:
    """Print what all launches say: medians, and from the least to the greatest."""
    print("# of bound, and ratio to two_level: medians of the launches, and their range")
    for topology in dict.fromkeys(row["topology"] for row in rows):
        for name in dict.fromkeys(row["who"] for row in rows):
            bound, ratio = (
                [row[key] for row in rows if (row["topology"], row["who"]) == (topology, name)]
                for key in ("bound", "ratio")
            )
            print(
                f"{topology:>26} {name:>14} {numpy.median(bound):>7.1%} ({min(bound):.1%} to {max(bound):.1%}) "
                f"{numpy.median(ratio):>5.2f} ({min(ratio):.2f} to {max(ratio):.2f}), {len(bound)} launches"
            )


def save(folder: Path, rows: Sequence[Row]) -> None:
    """Add the rows to those of earlier runs, with the machine that they were measured on."""
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "numpy": numpy.__version__}
    mpi = rows[0]["mpi"].rpartition(" ")[0].lower().replace(" ", "")
    path = folder / f"two_levels-{mpi}.json"
    folder.mkdir(parents=True, exist_ok=True)
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    path.write_text(json.dumps({"machine": machine, "rows": [*earlier, *rows]}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
