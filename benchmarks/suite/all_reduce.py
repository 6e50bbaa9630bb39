"""``all-reduce``: one array, over sizes, by the public call and by each algorithm."""

from __future__ import annotations

import argparse
from functools import partial

import numpy

from benchmarks.peers.mpi import Allreduce, Iallreduce
from benchmarks.peers.table import Maker
from benchmarks.peers.tensorflow import TensorFlowRing
from benchmarks.peers.torch import GlooFlat
from benchmarks.suite.contender import Copy, OursByAlgorithm, OursOneArray
from benchmarks.suite.measured import Measured
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.rows import Row, all_reduce_factor, bound_of, heading, line
from benchmarks.suite.tensors import TensorList
from benchmarks.suite.turns import Budget
from mpidist.commands.quantities import count as count_of
from mpidist.schedules import table

WHAT = "one array of each of some sizes, also by each algorithm"

#: Above these sizes in bytes an algorithm tells nothing new.
_LARGEST = {"recursive_doubling": 1 << 24, "binomial": 1 << 24}

#: Bytes that a turn moves, about, and the most reductions it makes.
_TURN_BYTES, _MOST_CALLS = 1 << 22, 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this subcommand takes."""
    parser.add_argument("--smallest", type=count_of, default=4, metavar="BYTES", help="default: 4")
    parser.add_argument("--largest", type=count_of, default=1 << 26, metavar="BYTES", help="default: 64 MiB")
    parser.add_argument("--dtype", type=numpy.dtype, default="float32", help="default: float32")
    parser.add_argument("--algorithms", metavar="A,B", help="default: auto, and all that there are here; '' for none")
    parser.add_argument(
        "--link-mbit", type=float, metavar="MBIT", help="speed of the link between nodes: adds the time it needs"
    )


def sizes(smallest: int, largest: int) -> list[int]:
    """Return the sizes in bytes, each four times the one before."""
    found = [smallest]
    while found[-1] * 4 <= largest:
        found.append(found[-1] * 4)
    return found


def algorithms(ranks: Ranks) -> list[str]:
    """Return ``"auto"`` and every algorithm for the nodes of this launch.  Local."""
    levels = ["two_level", "hierarchical"] if ranks.node_count > 1 else ["shared_memory"]
    return ["auto", "native", *levels, *table.names("all_reduce")]


def makers(options: argparse.Namespace, nbytes: int, ranks: Ranks) -> list[Maker]:
    """Return who takes part at a size."""
    asked = options.algorithms
    every = algorithms(ranks) if asked is None else asked.split(",")
    names = [name for name in every if name and nbytes <= _LARGEST.get(name, nbytes)]
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
        chosen = makers(options, nbytes, ranks)
        rows = measured.add("all_reduce", chosen, tensors, ranks, budget, Allreduce.name, factor)
        if options.link_mbit:
            rows.append(link_bound(rows, options.link_mbit))
            measured.rows.append(rows[-1])
        ranks.say("\n".join(map(line, rows)))
    ranks.say(f"# ratio and more: against {Allreduce.name}")
    return measured


def link_bound(rows: list[Row], link_mbit: float) -> Row:
    """Return the time that a link between nodes needs: each must send and receive the buffer once.  Local, pure."""
    (base,) = [row for row in rows if row.who == Allreduce.name]
    return bound_of(base.work, base.size, base.type, (base.who, base.time_us / 1e6), link_mbit * 1e6)
