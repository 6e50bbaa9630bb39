"""All-reduce over several hosts of this one machine whose links are limited: mpidist's two levels against the others.

    python benchmarks/two_levels.py                     # 2 hosts x 2 ranks, 100 Mbit/s, 5 MB, block and cyclic
    python benchmarks/two_levels.py --slots 3 1 --rate 50mbit --bytes 1000000
    python benchmarks/two_levels.py --save benchmarks/results

Needs root and iproute2; see ``tests/netns/up``, which makes the hosts.  The *bound* is the time in which a link carries
the buffer once: in any all-reduce of two hosts or more, each must send that much and receive that much, or nearly so
with many hosts.  All contenders take turns in one job; a time is the slowest rank's, and the median of all rounds.
`link` is how many times the buffer left the first host, counted by the kernel, headers included.  The model's times are
those of the schedules in the simulator, with the link's rate and nothing else.  The targets are for what is measured if
nothing else is said; ``python -m benchmarks show FILE --targets`` holds against them what was saved.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # ranks on other hosts start this file by its path

import mpidist  # noqa: E402
from benchmarks.suite import results, targets  # noqa: E402
from benchmarks.suite.results import Launch  # noqa: E402
from benchmarks.suite.rows import Row, bound_of, row_of  # noqa: E402
from mpidist.commands.machine import machine  # noqa: E402

#: What `mpidist.collectives` calls them; `Allreduce` is mpi4py's, and `list` the public call on a list of tensors.
OURS = ("two_level", "hierarchical", "ring")


def main() -> None:
    """Start the hosts and the jobs; or, as a rank of such a job, measure."""
    options = parsed()
    if options.rank:
        measure(options)
        return
    from tests.netns.hosts import several_hosts

    launches: list[Launch] = []
    with several_hosts(len(options.slots), options.rate) as hosts, tempfile.TemporaryDirectory() as tuning:
        env = {"MPIDIST_TUNING_FOLDER": tuning}
        for placement in options.placements * options.launches:
            names = ("bytes", "rounds", "rate")
            forwarded = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
            command = [str(Path(__file__).resolve()), "--rank", *forwarded, "--placements", placement]
            job = hosts.run(options.slots, command, placement == "cyclic", env, timeout_seconds=600)
            found = [Launch.from_json(json.loads(line[1:])) for line in job.stdout.splitlines() if line[:1] == "@"]
            if job.returncode or not found:
                raise SystemExit(f"the job ended with status {job.returncode}\n{job.stdout}\n{job.stderr}")
            launches += found
            print(table(found[0]), flush=True)
    print(f"\n{targets.report(launches)}")
    if options.save:
        print(save(options.save, launches))


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
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- on the ranks ------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    """Print the rows of this placement.  Collective."""
    from mpi4py import MPI

    from mpidist.world import world_communicator

    communicator, comm = world_communicator(), MPI.COMM_WORLD
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
    if comm.rank == 0:
        work = f"{communicator.topology.node_count} hosts, {options.placements[0]}, {options.rate}"
        what, reference = (work, buffer.nbytes, "float32"), ("two_level", float(numpy.median(seconds["two_level"])))
        found = [row_of(*what, name, kind(name), seconds[name], reference, wrong=wrong[name]) for name in running]
        found.append(bound_of(*what, reference, bits_per_second(options.rate)))
        facts = {
            **machine(),
            "times over the link": {name: float(numpy.median(times)) for name, times in sent.items()},
            "model_ms": model(communicator.topology, buffer.nbytes, found[-1].time_us * 1e-6),
        }
        described = communicator.topology.describe()
        launch = Launch("two-levels", sys.argv, comm.size, vendor(MPI), described, {}, found, {}, facts)
        print("@" + json.dumps(launch.as_json()), flush=True)


def kind(name: str) -> str:
    """Return the kind of a contender."""
    return "peer" if name == "Allreduce" else "ours"


def contenders(buffer: Any, communicator: Any, comm: Any) -> dict[str, Callable[[], Any]]:
    """Return what is measured, by name: each returns the sum of `buffer` over all ranks."""
    cuts = numpy.linspace(0, buffer.size, 162).astype(int)[1:-1]
    strategy, out = mpidist.MultiWorkerMirroredStrategy(), numpy.empty_like(buffer)

    def by(name: str) -> Callable[[], Any]:
        def run() -> Any:
            work = buffer.copy()
            communicator.all_reduce(work, algorithm=name)
            return work

        return run

    def fused() -> Any:
        return mpidist.get_replica_context().all_reduce("SUM", numpy.split(buffer, cuts))

    def allreduce() -> Any:
        comm.Allreduce(buffer, out)
        return out

    found = {name: by(name) for name in OURS}
    return {**found, "list of 161": lambda: numpy.concatenate(strategy.run(fused)), "Allreduce": allreduce}


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
    """Return the milliseconds of the schedules with one link a node, and memory that takes no time."""
    from mpidist.schedules.cost import CostModel, Level
    from mpidist.schedules.simulator import simulate
    from mpidist.schedules.table import algorithm, hierarchical

    free, link = Level(0.0, 0.0), Level(1e-4, bound / nbytes)
    schedules = {"ring": algorithm("all_reduce", "ring"), "hierarchical": hierarchical(topology)}
    prices = CostModel(intra=free, inter=link, links_per_node=1)
    found = {name: simulate(each, topology.size, nbytes, prices, topology) for name, each in schedules.items()}
    return {name: each.seconds * 1e3 for name, each in found.items()}


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


def table(launch: Launch) -> str:
    """Return what a launch found."""
    (bound,) = [row for row in launch.rows if row.kind == "reference"]
    lines = [f"# {launch.mpi}, {launch.topology}; {bound.work}, {bound.size} bytes"]
    lines.append(f"{'who':>14} {'ms':>9} {'of bound':>9} {'ratio':>6} {'link':>6} {'model ms':>9} {'#wrong':>6}")
    lines += [_line(row, bound, launch.machine) for row in launch.rows if row is not bound]
    return "\n".join(lines)


def _line(row: Row, bound: Row, facts: dict[str, Any]) -> str:
    predicted = f"{facts['model_ms'][row.who]:.1f}" if row.who in facts["model_ms"] else ""
    return (
        f"{row.who:>14} {row.time_us / 1e3:>9.1f} {bound.time_us / row.time_us:>9.1%} {row.ratio:>6.2f} "
        f"{facts['times over the link'][row.who]:>6.2f} {predicted:>9} {row.wrong:>6}"
    )


def save(folder: Path, launches: Sequence[Launch]) -> Path:
    """Add the launches to those of earlier runs, with the command that made them; return where they are."""
    for launch in launches:
        launch.command = ["python", *sys.argv]
    mpi = launches[0].mpi.rpartition(" ")[0].lower().replace(" ", "")
    path = folder / f"{'pair' if launches[0].ranks == 2 else 'two_hosts'}-{mpi}.json"
    folder.mkdir(parents=True, exist_ok=True)
    results.write(path, [*(results.read(path) if path.exists() else ()), *launches])
    return path


if __name__ == "__main__":
    main()
