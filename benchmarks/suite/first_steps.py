"""``first-steps``: the first steps of a launch, and later ones, of a model's gradients, against raw MPI."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy

from benchmarks.peers.mpi import AllreduceEach, AllreducePacked
from benchmarks.suite.cache_mode import CHANGED
from benchmarks.suite.contender import Contender, Ours
from benchmarks.suite.measured import Measured, show
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.rows import Row, all_reduce_factor, row_of
from benchmarks.suite.tensor_lists import MODELS, shapes_of
from benchmarks.suite.tensors import TensorList

WHAT = "the first steps of a launch against later ones"

#: The steps that count: the first and the last of each row, from 1.  With ``--rounds 20`` there are no later ones.
_SPANS = ((1, 20), (100, 120))

_CONTENDERS: tuple[type[Contender], ...] = (Ours, AllreduceEach, AllreducePacked)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model."""
    parser.add_argument("--model", choices=list(MODELS), default="resnet50", help="default: resnet50")


def measure(options: argparse.Namespace, ranks: Ranks) -> Measured:
    """Measure in this launch: no step is made before the first that is timed.  Collective."""
    tensors = TensorList(shapes_of(options.model), "float32", ranks.rank, ranks.size)
    contenders = [make(ranks, tensors) for make in _CONTENDERS]
    spans = [each for each in _SPANS if each[1] <= (options.rounds or each[1])] or _SPANS[:1]
    measured, (seconds, wrong, looks) = Measured(), _steps(contenders, tensors, ranks, spans[-1][1])
    for first, last in spans:
        mode = looks[last] if looks[first - 1] == looks[last] else CHANGED
        work = f"{options.model}, steps {first} to {last}"
        within = [each[first - 1 : last] for each in seconds]
        found = rows_of(work, contenders, within, wrong, tensors, mode)
        show(found, ranks)
        measured.rows += found
    return measured


def _steps(
    contenders: Sequence[Contender], tensors: TensorList, ranks: Ranks, count: int
) -> tuple[list[list[float]], list[int], dict[int, str]]:
    """Return for each contender the seconds of each step and its wrong elements, and cache modes by steps made.

    Collective.
    """
    edges = {edge for first, last in _SPANS for edge in (first - 1, last)}
    seconds: list[list[float]] = [[] for _ in contenders]
    wrong, kept = [0] * len(contenders), [None] * len(contenders)
    looks = {0: ranks.probe.look()}
    for step in range(count):
        for place in range(len(contenders)):
            index = (step + place) % len(contenders)
            contender: Any = contenders[index]
            batch = [contender.prepare(tensors.new(step))]
            ranks.comm.Barrier()
            start = time.perf_counter()
            kept[index] = contender.run_all(batch)
            seconds[index].append(ranks.elapsed(start, time.perf_counter()))
            if step in (0, count - 1):
                wrong[index] += ranks.total(contender.wrong(kept[index], step) or 0)
        if step + 1 in edges:
            looks[step + 1] = ranks.probe.look()
    return seconds, wrong, looks


def rows_of(
    work: str,
    contenders: Sequence[Contender],
    seconds: Sequence[Sequence[float]],
    wrong: Sequence[int],
    tensors: TensorList,
    mode: str,
) -> list[Row]:
    """Return a row for each contender: the mean of its steps, against the better of raw MPI.  Local, pure."""
    means = [float(numpy.mean(each)) for each in seconds]
    raw = [(mean, each.name) for mean, each in zip(means, contenders, strict=True) if each.kind == "peer"]
    mean, name = min(raw)
    found, factor = [], all_reduce_factor(tensors.size)
    for index, contender in enumerate(contenders):
        what = work, tensors.nbytes, tensors.dtype.name, contender.name, contender.kind
        row = row_of(*what, [means[index]], (name, mean), factor, wrong[index], mode)
        low, high = numpy.percentile(seconds[index], [25, 75]) * 1e6
        found.append(replace(row, quartiles_us=(float(low), float(high)), turns=len(seconds[index])))
    return found
