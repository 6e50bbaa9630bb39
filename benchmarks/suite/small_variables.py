"""``small-variables``: SGD with momentum on many small variables, against the same reduction and an update in NumPy."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy

from benchmarks.peers.table import Maker
from benchmarks.suite.contender import Ours
from benchmarks.suite.measured import Measured, show
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.rows import all_reduce_factor
from benchmarks.suite.step import ApplyGradients, ReduceThenTextbook, Update
from benchmarks.suite.tensors import TensorList
from benchmarks.suite.turns import Budget
from benchmarks.suite.update_rules import RULES, Rule

WHAT = "SGD with momentum on 1000 small variables"

#: Variables, and elements of each: 400 B and 2 KB.
_COUNT, _ELEMENTS = 1000, (100, 512)

#: Steps of a turn.
_CALLS = 4


class ReduceThenFlat(Update):
    """Our all-reduce of the list, one concatenation of its results, and one update of flat arrays in place."""

    name = f"{Ours.name}, flat update"
    kind = "reference"
    warm_ups = needed_warm_ups = Ours.warm_ups

    def __init__(self, ranks: Ranks, tensors: TensorList, rule: Rule) -> None:
        super().__init__(ranks, tensors, rule)
        self._reduction = Ours(ranks, tensors)
        self._flat, self._gradient = (numpy.ones(tensors.elements, tensors.dtype) for _ in range(2))
        self._slots = [numpy.zeros_like(self._flat) for _ in range(rule.slots)]
        self._scratch = [numpy.zeros_like(self._flat) for _ in range(rule.scratch)]
        self._step = 0

    @property
    def parameters(self) -> list[Any]:
        return self.tensors.cut(self._flat)

    def run(self, prepared: Any) -> Any:
        reduced = self._reduction.run_all([prepared])
        self._step += 1
        numpy.concatenate(reduced, axis=None, out=self._gradient)
        self._rule.block(self._flat, self._gradient, self._slots, self._scratch, self._step)
        return reduced


def makers(rule: Rule) -> Sequence[Maker]:
    """Return who takes part."""
    loop = partial(ReduceThenTextbook, rule=rule, reduce=Ours, kind="reference")
    return [partial(ApplyGradients, rule=rule), partial(ReduceThenFlat, rule=rule), loop]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this subcommand takes what all take."""


def measure(options: argparse.Namespace, ranks: Ranks) -> Measured:
    """Measure in this launch.  Collective."""
    measured = Measured()
    budget = Budget((options.seconds or 6.0) / len(_ELEMENTS), options.rounds or 30, _CALLS)
    for elements in _ELEMENTS:
        tensors = TensorList([(elements,)] * _COUNT, "float32", ranks.rank, ranks.size)
        work, factor = f"{_COUNT} variables of {elements * 4} B", all_reduce_factor(ranks.size)
        chosen = makers(RULES["sgd"])
        show(measured.add(work, chosen, tensors, ranks, budget, ReduceThenFlat.name, factor), ranks)
    return measured
