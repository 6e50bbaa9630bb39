"""Random steps of two optimizers: N ranks end with the bits of one rank that has the sums of their gradients.

``CASES`` (default 60) says how many, ``SEED`` (default 0) with which they begin; ``make fuzz CASES=500`` runs many.
"""

from __future__ import annotations

import os

import numpy
import pytest

from mpidist.collectives.reductions import update
from mpidist.testing import run_ranks
from tests.helpers.random_steps import PlainPlayer, Play, plain, play

CASES, SEED = int(os.environ.get("CASES", "60")), int(os.environ.get("SEED", "0"))


@pytest.mark.filterwarnings("ignore:gradients are None", "ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("seed", range(SEED, SEED + CASES))
def test_n_ranks_end_with_the_bits_of_one(seed, monkeypatch):
    case = Play.of(seed)
    (expected,) = run_ranks(1, play, case)
    assert all(numpy.isfinite(value).all() for value in expected.values()), f"diverges: {case}"
    monkeypatch.setattr(update, "LEAST_BYTES", 1 if case.is_fused else update.LEAST_BYTES)
    wrong = []
    for rank, found in enumerate(run_ranks(case.size, play, case)):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            if value.dtype != expected[name].dtype or not numpy.array_equal(value, expected[name]):
                wrong.append(f"rank {rank} of {case.size}: {name} is {value}, expected {expected[name]}")
    assert not wrong, "\n".join([*wrong, f"run it alone: make fuzz CASES=1 SEED={seed}", repr(case)])


@pytest.mark.filterwarnings("ignore:gradients are None", "ignore:overflow", "ignore:invalid value")
@pytest.mark.parametrize("seed", range(SEED, SEED + CASES))
def test_one_rank_and_all_end_as_by_the_rule_alone_variable_by_variable(seed, monkeypatch):
    """A fault in runs or slots that is the same on any number of ranks is found too."""
    case = plain(Play.of(seed))
    (expected,) = run_ranks(1, play, case, PlainPlayer)
    monkeypatch.setattr(update, "LEAST_BYTES", 1 if case.is_fused else update.LEAST_BYTES)
    for size in (1, case.size):
        for rank, found in enumerate(run_ranks(size, play, case)):
            assert found.keys() == expected.keys()
            for name, value in found.items():
                where = f"rank {rank} of {size}: {name}; alone: make fuzz CASES=1 SEED={seed}\n{case}"
                assert value.dtype == expected[name].dtype and numpy.array_equal(value, expected[name]), where
