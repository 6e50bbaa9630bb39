"""``mpidist bench all-reduce``: one array, over sizes, by the public call and by each algorithm."""

from __future__ import annotations

import argparse
from functools import partial

import numpy

from mpidist.commands.bench.contender import Copy, OursByAlgorithm, OursOneArray
from mpidist.commands.bench.measured import Measured
from mpidist.commands.bench.mpi_peers import Allreduce, Iallreduce
from mpidist.commands.bench.peers import Maker
from mpidist.commands.bench.ranks import Ranks
from mpidist.commands.bench.rows import Row, all_reduce_factor, heading, line
from mpidist.commands.bench.tensorflow_peers import TensorFlowRing
from mpidist.commands.bench.tensors import TensorList
from mpidist.commands.bench.torch_peers import GlooFlat
from mpidist.commands.bench.turns import Budget

WHAT = "one array of each of some sizes, also by each algorithm"

#: Measured beside the public call if nothing else is said.
ALGORITHMS = ("auto", "shared_memory", "remote_read", "native", "ring", "recursive_doubling", "rabenseifner")

#: Above these sizes in bytes an algorithm tells nothing new.
_LARGEST = {"recursive_doubling": 1 << 24, "binomial": 1 << 24}

#: Bytes that a turn moves, about, and the most reductions it makes.
_TURN_BYTES, _MOST_CALLS = 1 << 22, 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this subcommand takes."""
    parser.add_argument("--smallest", type=int, default=4, metavar="BYTES", help="default: 4")
    parser.add_argument("--largest", type=int, default=1 << 26, metavar="BYTES", help="default: 64 MiB")
    parser.add_argument("--dtype", type=numpy.dtype, default="float32", help="default: float32")
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), metavar="A,B", help="'' for none")
    parser.add_argument(
        "--link-mbit", type=float, metavar="MBIT", help="speed of the link between nodes: adds the time it needs"
    )


def sizes(smallest: int, largest: int) -> list[int]:
    """Return the sizes in bytes, each four times the one before."""
    found = [smallest]
    while found[-1] * 4 <= largest:
        found.append(found[-1] * 4)
    return found


def makers(options: argparse.Namespace, nbytes: int) -> list[Maker]:
    """Return who takes part at a size."""
    names = [name for name in options.algorithms.split(",") if name and nbytes <= _LARGEST.get(name, nbytes)]
    found: list[Maker] = [Copy, Allreduce, OursOneArray]
    found += [partial(OursByAlgorithm, algorithm=name) for name in names]
    return [*found, *((Iallreduce, GlooFlat, TensorFlowRing) if options.peers else ())]


def measure(options: argparse.Namespace, ranks: Ranks) -> Measured:
    """Measure in this launch.  Collective."""
    measured, all_sizes = Measured(), sizes(options.smallest, options.largest)
    ranks.say(heading())
    for nbytes in all_sizes:
        count = max(1, nbytes // options.dtype.itemsize)
        tensors = TensorList([(count,)], options.dtype, ranks.rank, ranks.size)
        calls = max(1, min(_MOST_CALLS, _TURN_BYTES // tensors.nbytes))
        budget = Budget((options.seconds or 30.0) / len(all_sizes), options.rounds or 21, calls)
        factor = all_reduce_factor(ranks.size)
        chosen = makers(options, nbytes)
        rows = measured.add("all_reduce", chosen, tensors, ranks, budget, Allreduce.name, factor)
        if options.link_mbit:
            rows.append(link_bound(rows, options.link_mbit))
            measured.rows.append(rows[-1])
        ranks.say("\n".join(map(line, rows)))
    ranks.say(f"# ratio and more: against {Allreduce.name}")
    for sentence in auto_against_best(measured.rows):
        ranks.say(f"# {sentence}")
    return measured


def link_bound(rows: list[Row], link_mbit: float) -> Row:
    """Return the time that a link between nodes needs: each must send and receive the buffer once.  Local, pure."""
    (base,) = [row for row in rows if row.who == Allreduce.name]
    seconds = base.size * 8 / (link_mbit * 1e6)
    return Row(
        work=base.work,
        size=base.size,
        count=base.count,
        type=base.type,
        who="bound of the link",
        kind="reference",
        time_us=seconds * 1e6,
        quartiles_us=(seconds * 1e6, seconds * 1e6),
        turns=0,
        algbw=base.size / seconds / 1e9,
        busbw=0.0,
        reference=base.reference,
        ratio=seconds * 1e6 / base.time_us,
        more_us=seconds * 1e6 - base.time_us,
        wrong=None,
    )


def auto_against_best(rows: list[Row]) -> list[str]:
    """Return how far the automatic choice is from the best fixed one, at the size where that is worst.  Local, pure."""
    found = []
    for size in dict.fromkeys(row.size for row in rows):
        fixed = [row for row in rows if row.size == size and row.kind == "ours" and row.who in ALGORITHMS[1:]]
        auto = [row for row in rows if row.size == size and row.who == "auto"]
        if fixed and auto:
            best = min(fixed, key=lambda row: row.time_us)
            allowed = max(1.10 * best.time_us, best.time_us + 5)
            found.append((auto[0].time_us / allowed, size, auto[0].time_us, best))
    if not found:
        return []
    excess, size, time_us, best = max(found, key=lambda each: each[0])
    verdict = "within" if excess <= 1 else "beyond"
    return [
        f"auto is furthest from the best fixed choice at {size} B: {time_us:.1f} us against {best.time_us:.1f} by "
        f"{best.who}, {verdict} max(1.10x, +5 us)"
    ]
