"""The cases of pairs of checkouts: each is one launch, by public calls only, so that it runs on older checkouts too."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmarks.pairs.public_calls import CALLS
from benchmarks.peers.mpi import Allreduce, AllreducePacked
from benchmarks.peers.table import Maker
from benchmarks.suite import first_steps, small_variables
from benchmarks.suite.contender import Ours, OursInBuffers, OursOneArray
from benchmarks.suite.measured import Measured
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.rows import all_reduce_factor
from benchmarks.suite.step import ApplyGradients, BlockedAlone
from benchmarks.suite.tensor_lists import shapes_of
from benchmarks.suite.tensors import TensorList
from benchmarks.suite.turns import Budget
from benchmarks.suite.update_rules import RULES

#: Bytes that a turn moves, about, and the most calls it makes.
_TURN_BYTES, _MOST_CALLS = 1 << 22, 200

#: The most turns of a contender.
_ROUNDS = 40

Measure = Callable[[Ranks, float], Measured]


@dataclass(frozen=True)
class Case:
    """One kind of launch.

    Attributes
    ----------
    measure : callable or None
        ``measure(ranks, seconds)``, on all ranks; None for the job of `benchmarks.suite.ps_job`.
    ranks : tuple of int
        Numbers of ranks on which it is measured.
    environ : mapping
        Variables for the ranks.
    """

    measure: Measure | None
    ranks: tuple[int, ...] = (2, 4)
    environ: Mapping[str, str] = field(default_factory=dict)


def one_array(ranks: Ranks, seconds: float, sizes: Sequence[int]) -> Measured:
    """Measure the public call on one array, and the bare ``Allreduce`` beside it.  Collective."""
    measured = Measured()
    for nbytes in sizes:
        tensors = TensorList([(nbytes // 4,)], "float32", ranks.rank, ranks.size)
        add(measured, "one array", [OursOneArray, Allreduce], tensors, ranks, seconds / len(sizes), Allreduce.name)
    return measured


def gradients(ranks: Ranks, seconds: float) -> Measured:
    """Measure lists of gradients, and gradients in buffers.  Collective."""
    measured = Measured()
    for model in ("resnet50", "small"):
        tensors = TensorList(shapes_of(model), "float32", ranks.rank, ranks.size)
        ours: list[Maker] = [Ours, *([OursInBuffers] if OursInBuffers.is_there(ranks) else [])]
        add(measured, model, [*ours, AllreducePacked], tensors, ranks, seconds / 2, AllreducePacked.name)
    return measured


def step(ranks: Ranks, seconds: float) -> Measured:
    """Measure ``apply_gradients`` of ResNet-50.  Collective."""
    measured = Measured()
    tensors = TensorList(shapes_of("resnet50"), "float32", ranks.rank, ranks.size)
    for name, rule in RULES.items():
        makers: list[Maker] = [partial(ApplyGradients, rule=rule), partial(BlockedAlone, rule=rule)]
        add(measured, f"resnet50 {name}", makers, tensors, ranks, seconds / len(RULES), BlockedAlone.name)
    return measured


def collectives(ranks: Ranks, seconds: float) -> Measured:
    """Measure broadcast, all-gather and reduce.  Collective."""
    measured, sizes = Measured(), (1 << 10, 1 << 16, 1 << 22)
    for ours, theirs in CALLS:
        for nbytes in sizes:
            tensors = TensorList([(nbytes // 4,)], "float32", ranks.rank, ranks.size)
            share = seconds / len(sizes) / len(CALLS)
            add(measured, ours.work, [ours, theirs], tensors, ranks, share, theirs.name)
    return measured


def add(
    measured: Measured,
    work: str,
    makers: Sequence[Maker],
    tensors: TensorList,
    ranks: Ranks,
    seconds: float,
    reference: str,
) -> None:
    """Measure some contenders.  Collective."""
    calls = max(1, min(_MOST_CALLS, _TURN_BYTES // tensors.nbytes))
    budget, factor = Budget(seconds, _ROUNDS, calls), all_reduce_factor(ranks.size)
    measured.add(work, makers, tensors, ranks, budget, reference, factor)


def _first_steps(ranks: Ranks, seconds: float) -> Measured:
    return first_steps.measure(argparse.Namespace(model="resnet50", rounds=None), ranks)


def _small_variables(ranks: Ranks, seconds: float) -> Measured:
    return small_variables.measure(argparse.Namespace(seconds=seconds, rounds=_ROUNDS), ranks)


#: By the name on the command line.
CASES = {
    "latency": Case(partial(one_array, sizes=(4,))),
    "arrays": Case(partial(one_array, sizes=(1 << 10, 1 << 16, 1 << 20, 1 << 24, 1 << 26))),
    "native": Case(partial(one_array, sizes=(1 << 20, 1 << 24, 1 << 26)), environ={"MPIDIST_ALGORITHM": "native"}),
    "gradients": Case(gradients),
    "step": Case(step),
    "collectives": Case(collectives),
    "first-steps": Case(_first_steps, ranks=(2,)),
    "small-variables": Case(_small_variables, ranks=(2,)),
    "ps": Case(None, ranks=(4,)),
}
