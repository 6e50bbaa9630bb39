"""Random trainings: N ranks, and ranks that go on from each other's checkpoints, do what one rank does, to rounding.

``CASES`` (default 30) says how many, ``SEED`` (default 0) with which they begin; ``make fuzz CASES=500`` runs many.
How far rounding may carry a training is found on one rank: its gradients are moved by what rounding can move them.
"""

from __future__ import annotations

import contextlib
import os

import numpy
import pytest

from mpidist.collectives.reductions import update
from mpidist.testing import run_ranks
from tests.helpers.random_training import ROUNDOFF, Case, Interrupted, train

CASES, SEED = int(os.environ.get("CASES", "30")), int(os.environ.get("SEED", "0"))

#: Trainings with moved gradients, and what their largest distance from the one without is multiplied by.
MOVED, MARGIN = 4, 8


def bounds(case, expected):
    """Return by name how far from the one-rank run a number may be.

    A step also rounds parameters, slots and sums, each by half a unit of the coarsest dtype at most.
    """
    moved = [run_ranks(1, train, case, number)[0] for number in range(MOVED)]
    found = {}
    for name, value in expected.numbers.items():
        distance = max(abs(each.numbers[name] - value).max(initial=0) for each in moved)
        roundings = (expected.counts[-1] + 1) * max(ROUNDOFF[dtype] for dtype in case.dtypes)
        found[name] = MARGIN * distance + 4 * roundings * abs(value).max(initial=0)
    return found


def differences(found, expected, allowed):
    """Return in words what is not as on one rank."""
    wrong = [] if found.counts == expected.counts else [f"counts are {found.counts}, expected {expected.counts}"]
    for name, value in found.numbers.items():
        if value.shape != expected.numbers[name].shape:
            wrong.append(f"{name} has shape {value.shape}, expected {expected.numbers[name].shape}")
        elif not (far := abs(value - expected.numbers[name]).max(initial=0)) <= allowed[name]:
            wrong.append(f"{name} is off by {far:.3g}, allowed {allowed[name]:.3g}")
    return wrong


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:the data ended")
@pytest.mark.parametrize("seed", range(SEED, SEED + CASES))
def test_n_ranks_do_what_one_rank_does(seed, tmp_path, monkeypatch):
    case = Case.of(seed)
    (expected,) = run_ranks(1, train, case)
    assert all(numpy.isfinite(value).all() for value in expected.numbers.values()), f"diverges: {case}"
    allowed = bounds(case, expected)
    monkeypatch.setattr(update, "LEAST_BYTES", 1 if case.is_fused else update.LEAST_BYTES)
    wrong = []
    for rank, found in enumerate(run_ranks(case.size, train, case)):
        assert found.numbers.keys() == expected.numbers.keys()
        wrong += [f"rank {rank} of {case.size}: {each}" for each in differences(found, expected, allowed)]
    for size, stop in case.stops:
        with contextlib.suppress(Interrupted):
            run_ranks(size, train, case, None, tmp_path, stop)
    for found in run_ranks(case.size, train, case, None, tmp_path) if case.stops else ():
        wrong += [f"resumed: {each}" for each in differences(found, expected, allowed)]
    assert not wrong, "\n".join([*wrong, f"run it alone: make fuzz CASES=1 SEED={seed}", repr(case)])
