"""``gradients``: the gradients of a model, reduced as a list."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy

from benchmarks.peers.table import PEERS, Maker
from benchmarks.suite.contender import Copy, Ours, OursInBuffers
from benchmarks.suite.measured import Measured, show
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.rows import all_reduce_factor
from benchmarks.suite.tensor_lists import MODELS, shapes_of
from benchmarks.suite.tensors import TensorList
from benchmarks.suite.turns import Budget

WHAT = "the gradients of a model, reduced as a list"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this subcommand takes."""
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["resnet50"], help="default: resnet50")
    parser.add_argument("--dtype", type=numpy.dtype, default="float32", help="default: float32")


def makers(ranks: Ranks, with_peers: bool) -> Sequence[Maker]:
    """Return who takes part."""
    ours: list[Maker] = [Ours, *([OursInBuffers] if OursInBuffers.is_there(ranks) else [])]
    return [Copy, *ours, *(PEERS if with_peers else ())]


def measure(options: argparse.Namespace, ranks: Ranks) -> Measured:
    """Measure in this launch.  Collective."""
    measured = Measured()
    budget = Budget(options.seconds or 20.0, options.rounds or 30)
    for model in options.model:
        tensors = TensorList(shapes_of(model), options.dtype, ranks.rank, ranks.size)
        ranks.say(f"# {model}: {len(tensors.shapes)} tensors, {tensors.elements} elements")
        factor = all_reduce_factor(ranks.size)
        rows = measured.add(model, makers(ranks, options.peers), tensors, ranks, budget, Copy.name, factor)
        show(rows, ranks)
    return measured
