"""The job of the case ``ps`` on mpidist's servers: a chief that schedules steps, two workers, and servers.

Started on all ranks, as ``python -m benchmarks.suite.ps_job``.  The chief writes what it has found to a file.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

import mpidist
from benchmarks.suite.ps_work import ADAM, LARGE, MANY, MODEL, MOMENTUM, ONE, RATE, SAME, SLOPE, WORKS, Work, timed
from benchmarks.suite.update_rules import RULES
from mpidist.optimizers import SGD


class Model:
    """The variables of a work, and their optimizer.

    Attributes
    ----------
    variables : list of Variable
    optimizer : Optimizer
    ready : list of array
        A gradient for each variable, for steps that do not compute one.
    """

    def __init__(self, work: Work) -> None:
        self.variables = [mpidist.Variable(numpy.ones(length, "float32")) for length in work.elements]
        self.optimizer = SGD(RATE) if work.rule == "plain" else RULES[work.rule].optimizer()
        self.ready = [] if work.computes else [numpy.full(length, SLOPE, "float32") for length in work.elements]


#: By the title of their work; the same on all ranks.
_models: dict[str, Model] = {}


# What is scheduled: each pulls the variables of a work, and pushes gradients through the optimizer.


def one() -> None:
    """Make a step on 1 float."""
    _compute(_models[ONE])


def momentum() -> None:
    """Make a step on 1 float with momentum."""
    _compute(_models[MOMENTUM])


def adam() -> None:
    """Make a step on 1 float with Adam."""
    _compute(_models[ADAM])


def large() -> None:
    """Make a step on 4 MB: read all of it, and push a gradient that has just been computed."""
    _compute(_models[LARGE])


def many() -> None:
    """Pull and push 200 variables."""
    _exchange(_models[MANY])


def same() -> None:
    """Pull and push one variable of their size."""
    _exchange(_models[SAME])


def whole() -> None:
    """Pull and push a model."""
    _exchange(_models[MODEL])


STEPS = {ONE: one, MOMENTUM: momentum, ADAM: adam, LARGE: large, MANY: many, SAME: same, MODEL: whole}


def _compute(model: Model) -> None:
    (variable,) = model.variables
    model.optimizer.apply_gradients([(SLOPE * variable.value, variable)])


def _exchange(model: Model) -> None:
    for variable in model.variables:
        _ = variable.value
    model.optimizer.apply_gradients(zip(model.ready, model.variables, strict=True))


def main() -> None:
    """Measure; returns on the chief only.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--works", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn")
    parser.add_argument("--turns", type=int, default=1, help="of each work; they alternate")
    parser.add_argument("--save", type=Path, required=True)
    options = parser.parse_args()
    strategy = mpidist.ParameterServerStrategy(num_ps=options.servers, placement="bytes")
    with strategy.scope():
        _models.update({title: Model(WORKS[title]) for title in options.works})
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    seconds: dict[str, list[float]] = {title: [] for title in options.works}
    made: Counter[str] = Counter()
    for _ in range(options.turns):
        for title in options.works:
            took, steps = timed(scheduling(coordinator, STEPS[title]), options.seconds)
            seconds[title].append(took)
            made[title] += steps
    lost = {title: made[title] - _models[title].optimizer.iterations for title in options.works}
    found = {"seconds": seconds, "wrong": lost, "server_bytes": server_bytes()}
    options.save.write_text(json.dumps(found))


def scheduling(coordinator: Any, step: Callable[[], None]) -> Callable[[int], None]:
    """Return what schedules so many steps and waits for all.  Local."""

    def run(steps: int) -> None:
        for _ in range(steps):
            coordinator.schedule(step)
        coordinator.join()

    return run


def server_bytes() -> dict[str, int]:
    """Return how many bytes of variables each server holds.  Local."""
    found: Counter[str] = Counter()
    for model in _models.values():
        for variable in model.variables:
            server: Any = variable  # a variable on a server tells which
            found[server.device] += 4 * math.prod(variable.shape)
    return dict(found)


if __name__ == "__main__":
    main()
