"""Training steps over hosts of this one machine with limited links: is the sum hidden by the backward pass?

    python benchmarks/torch_overlap.py                          # 2 hosts x 1 rank at 100 and at 1000 Mbit/s
    python benchmarks/torch_overlap.py --rates 100mbit --case mlp --turns 3
    python benchmarks/torch_overlap.py --save benchmarks/results

Needs root and iproute2; see ``tests/netns/up``, which makes the hosts.  The contenders are those of `torch_steps`, and
mpidist's `DistributedDataParallel` with ``overlap="none"``; they take turns in one job.  Told is the median over turns
of the time of a step on the slowest rank.  *wire* is the time in which a link carries the gradients once: each of two
hosts must send that much and receive that much.  There are none before the end of the *forward* pass, so *bound* is the
longer of that pass with the wire, and of the step without communication.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # ranks on other hosts start this file by its path

from benchmarks.torch_steps import OurModule, StockModule, TrainSteps, check  # noqa: E402, I001  - limits threads first
import numpy  # noqa: E402
import torch  # noqa: E402

import mpidist.torch  # noqa: E402
from benchmarks.peers.torch import started  # noqa: E402
from benchmarks.suite.ranks import Ranks  # noqa: E402
from benchmarks.torch_models import Case, mlp, resnet18  # noqa: E402
from benchmarks.two_levels import bits_per_second  # noqa: E402
from mpidist.commands.machine import machine  # noqa: E402

#: Steps before any is measured, one after the other: mpidist times some of both kinds, and agrees twice.
WARM_UPS = 11

#: By name: what makes the model and its batch.
CASES: dict[str, Any] = {
    "MLP, 2.2 million": lambda: mlp([128, 1024, 1024, 1024, 10], 32),
    "ResNet-18, 11 million, 8 rows": lambda: resnet18(8),
    "ResNet-18, 11 million, 32 rows": lambda: resnet18(32),
}


class WithoutOverlap(TrainSteps):
    """With `mpidist.torch.DistributedDataParallel`, and all sums after the pass."""

    name = "no overlap"

    def __init__(self, case: Case, optimizer: str) -> None:
        super().__init__(case, optimizer)
        self.model = mpidist.torch.DistributedDataParallel(self.model, broadcast_buffers=False, overlap="none")


class Forward(TrainSteps):
    """No step, but a forward pass."""

    name = "forward"

    def step(self) -> None:
        self.loss()


CONTENDERS = (TrainSteps, Forward, OurModule, WithoutOverlap, StockModule)


def main() -> None:
    """Start the hosts and the jobs; or, as a rank of such a job, measure."""
    options = parsed()
    if options.rank:
        measure(options)
        return
    from tests.netns.hosts import several_hosts

    launches = []
    print(" ".join([f"{'ms':>42}", *(f"{name:>11}" for name in [*columns(), "wire", "ours/bound"])]), flush=True)
    for rate in options.rates * options.launches:
        with several_hosts(len(options.slots), rate) as hosts:
            command = [str(Path(__file__).resolve()), "--rank", "--turns", str(options.turns), "--case", options.case]
            job = hosts.run(options.slots, command, timeout_seconds=1200)
        found = [json.loads(line[1:]) for line in job.stdout.splitlines() if line[:1] == "@"]
        if job.returncode or not found:
            raise SystemExit(f"the job ended with status {job.returncode}\n{job.stdout}\n{job.stderr}")
        launches.append({"rate": rate, "slots": options.slots, **found[0]})
        for name, row in found[0]["cases"].items():
            print(line(f"{rate:>9}, {name}", row, rate), flush=True)
    if options.save:
        save(options.save, launches)


def parsed() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(description="training steps over hosts with limited links")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 1], help="ranks by host")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1000mbit"], help="of every link")
    parser.add_argument("--case", default="", help="only cases with this in their name")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--launches", type=int, default=1, help="jobs for each rate")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="add the launches to the results there")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def columns() -> list[str]:
    """Return the names of the contenders."""
    return [each.name for each in CONTENDERS]


def measure(options: argparse.Namespace) -> None:
    """Print what the cases take.  Collective."""
    torch.set_num_threads(1)
    ranks = Ranks()
    started(ranks)
    cases = {}
    for name, make in CASES.items():
        if options.case.lower() in name.lower():
            case = make()
            contenders = [each(case, "sgd") for each in CONTENDERS]
            nbytes = sum(each.nbytes for each in contenders[0].bare.parameters())
            seconds = measured(contenders, options.turns, ranks)
            cases[name] = {"bytes": nbytes, "seconds": seconds, "has_overlapped": contenders[2].model.has_overlapped}
            check(contenders)
    about = {"mpi": ranks.library, "torch": torch.__version__, "hosts": ranks.node_count, **machine()}
    ranks.say("@" + json.dumps({"machine": about, "cases": cases}))


def measured(contenders: list[TrainSteps], turns: int, ranks: Ranks) -> dict[str, float]:
    """Return by contender the median over turns of the seconds of a step on the slowest rank.  Collective."""
    seconds: dict[str, list[float]] = {each.name: [] for each in contenders}
    for each in contenders:
        for _ in range(WARM_UPS):
            each.step()
    for _ in range(turns):
        for each in contenders:
            ranks.comm.Barrier()
            begin = time.perf_counter()
            each.step()
            seconds[each.name].append(ranks.slowest(time.perf_counter() - begin))
    return {name: float(numpy.median(found)) for name, found in seconds.items()}


def line(name: str, row: dict[str, Any], rate: str) -> str:
    """Return a row of the table, in milliseconds, and how long ours takes beside the bound."""
    seconds, wire = row["seconds"], row["bytes"] * 8 / bits_per_second(rate)
    cells = [f"{each * 1e3:11.1f}" for each in [*(seconds[who] for who in columns()), wire]]
    return " ".join([f"{name:>42}", *cells, f"{seconds[OurModule.name] / bound(seconds, wire):11.2f}"])


def bound(seconds: dict[str, float], wire: float) -> float:
    """Return the seconds that no step can be shorter than."""
    return max(seconds["nothing"], seconds["forward"] + wire)


def save(folder: Path, launches: list[dict[str, Any]]) -> None:
    """Add the launches to those of earlier runs, with the command that made them."""
    path = folder / "torch_overlap.json"
    folder.mkdir(parents=True, exist_ok=True)
    found = json.loads(path.read_text()) if path.exists() else {"launches": []}
    found["launches"] += [{"command": ["python", *sys.argv], **each} for each in launches]
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
