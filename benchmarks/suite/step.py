"""``step``: a whole ``apply_gradients`` against reducing and then updating, and updating alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

import mpidist
from benchmarks.peers.mpi import AllreduceEach, AllreducePacked
from benchmarks.suite.contender import Contender, Ours
from benchmarks.suite.measured import Measured, show
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.rows import all_reduce_factor
from benchmarks.suite.tensor_lists import MODELS, shapes_of
from benchmarks.suite.tensors import PERIOD, TensorList
from benchmarks.suite.turns import Budget
from benchmarks.suite.update_rules import BLOCK, RULES, Rule

WHAT = "one whole optimizer.apply_gradients"

#: A parameter further than this from the rule in float64, against its own size or 1, is wrong.
TOLERANCE = 1e-4


class Update(Contender):
    """Parameters, all 1 before the first step, and the steps made on them.

    In what is checked, a parameter depends only on its element's number modulo `PERIOD`: so the same rule on that many
    float64 values gives what all of them should be.
    """

    def __init__(self, ranks: Ranks, tensors: TensorList, rule: Rule) -> None:
        super().__init__(ranks, tensors)
        self._rule = rule
        self._history: list[Any] = []

    @property
    def parameters(self) -> list[Any]:
        """The parameters as they are now."""
        raise NotImplementedError

    def total(self, own: Any) -> Any:
        """Return what the rule gets for a gradient that is `own` on rank 0, and one more on each further rank."""
        size = self.tensors.size
        return size * own + size * (size - 1) // 2

    def prepare(self, gradients: list[Any]) -> Any:
        own = gradients[0].reshape(-1)[:PERIOD].astype(numpy.float64) - self.tensors.rank
        self._history.append(self.total(own))
        return gradients

    def wrong(self, result: Any, step: int) -> int | None:
        expected, slots = numpy.ones(PERIOD), [numpy.zeros(PERIOD) for _ in range(self._rule.slots)]
        for number, gradient in enumerate(self._history, 1):
            self._rule.textbook(expected, gradient, slots, number)
        found, start = 0, 0
        for parameter in self.parameters:
            should = expected[numpy.arange(start, start + parameter.size) % PERIOD]
            off = numpy.abs(parameter.reshape(-1) - should)
            found += int(numpy.count_nonzero(~(off <= TOLERANCE * numpy.maximum(1, numpy.abs(should)))))
            start += parameter.size
        return found


class ApplyGradients(Update):
    """The public call, inside ``strategy.run``, which is timed too."""

    name = "apply_gradients"
    kind = "ours"
    warm_ups = needed_warm_ups = Ours.warm_ups

    def __init__(self, ranks: Ranks, tensors: TensorList, rule: Rule) -> None:
        super().__init__(ranks, tensors, rule)
        with ranks.strategy.scope():
            self._variables = [mpidist.Variable(numpy.ones(shape, tensors.dtype)) for shape in tensors.shapes]
            self._optimizer = rule.optimizer()

    @property
    def parameters(self) -> list[Any]:
        return [numpy.asarray(variable.value) for variable in self._variables]

    def run(self, prepared: Any) -> Any:
        return self.ranks.strategy.run(self._step, args=(prepared,))

    def _step(self, gradients: Any) -> None:
        self._optimizer.apply_gradients(zip(gradients, self._variables, strict=True))


class ReduceThenTextbook(Update):
    """A reduction into arrays, and when all of it is there, the update as a textbook has it, tensor by tensor."""

    def __init__(self, ranks: Ranks, tensors: TensorList, rule: Rule, reduce: type[Contender], kind: str) -> None:
        super().__init__(ranks, tensors, rule)
        self._reduction = reduce(ranks, tensors)
        self.name, self.kind = f"{reduce.name}, textbook", kind
        self.warm_ups, self.needed_warm_ups = reduce.warm_ups, reduce.needed_warm_ups
        self._parameters = [numpy.ones(shape, tensors.dtype) for shape in tensors.shapes]
        self._slots = [[numpy.zeros_like(each) for _ in range(rule.slots)] for each in self._parameters]
        self._step = 0

    @property
    def parameters(self) -> list[Any]:
        return self._parameters

    def prepare(self, gradients: list[Any]) -> Any:
        return self._reduction.prepare(super().prepare(gradients))

    def run(self, prepared: Any) -> Any:
        reduced = self._reduction.run_all([prepared])
        self._step += 1
        for parameter, gradient, slots in zip(self._parameters, reduced, self._slots, strict=True):
            self._rule.textbook(parameter, gradient, slots, self._step)
        return reduced

    def close(self) -> None:
        self._reduction.close()


class BlockedAlone(Update):
    """Only the update, of this rank's own gradients, in blocks that stay in cache: as if the all-reduce were free."""

    name = "blocked update alone"
    kind = "reference"
    is_reduction = False

    def __init__(self, ranks: Ranks, tensors: TensorList, rule: Rule) -> None:
        super().__init__(ranks, tensors, rule)
        self._parameters = [numpy.ones(shape, tensors.dtype) for shape in tensors.shapes]
        self._slots = [[numpy.zeros(each.size, each.dtype) for _ in range(rule.slots)] for each in self._parameters]
        self._scratch = [numpy.zeros(BLOCK, tensors.dtype) for _ in range(rule.scratch)]
        self._step = 0

    @property
    def parameters(self) -> list[Any]:
        return self._parameters

    def total(self, own: Any) -> Any:
        return own + self.tensors.rank

    def run(self, prepared: Any) -> Any:
        self._step += 1
        for parameter, gradient, slots in zip(self._parameters, prepared, self._slots, strict=True):
            self._rule.in_blocks(parameter.reshape(-1), gradient.reshape(-1), slots, self._scratch, self._step)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this subcommand takes."""
    parser.add_argument("--model", choices=list(MODELS), default="resnet50", help="default: resnet50")
    parser.add_argument("--optimizer", nargs="+", choices=list(RULES), default=list(RULES), help="default: all")


def makers(rule: Rule, with_peers: bool) -> list[Callable[..., Update]]:
    """Return who takes part; `REFERENCE` is the second."""
    found: list[Callable[..., Update]] = [
        partial(ApplyGradients, rule=rule),
        partial(ReduceThenTextbook, rule=rule, reduce=Ours, kind="reference"),
        partial(BlockedAlone, rule=rule),
    ]
    peers = [partial(ReduceThenTextbook, rule=rule, reduce=each, kind="peer") for each in _REDUCTIONS]
    return [*found, *(peers if with_peers else [])]


_REDUCTIONS: tuple[type[Contender], ...] = (AllreduceEach, AllreducePacked)

#: What ratios refer to: reduce into arrays by mpidist, then the textbook's update.
REFERENCE = f"{Ours.name}, textbook"


def measure(options: argparse.Namespace, ranks: Ranks) -> Measured:
    """Measure in this launch.  Collective."""
    measured = Measured()
    budget = Budget((options.seconds or 20.0) / len(options.optimizer), options.rounds or 20)
    tensors = TensorList(shapes_of(options.model), "float32", ranks.rank, ranks.size)
    for name in options.optimizer:
        ranks.say(f"# {name} on {options.model}: {len(tensors.shapes)} tensors, {tensors.elements} elements")
        chosen = makers(RULES[name], options.peers)
        factor = all_reduce_factor(ranks.size)
        rows = measured.add(f"{options.model} {name}", chosen, tensors, ranks, budget, REFERENCE, factor)
        show(rows, ranks)
    return measured
