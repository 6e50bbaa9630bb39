"""Parts of ``python -m benchmarks gpu-steps`` that need ranks, on the host."""

from __future__ import annotations

import argparse

import pytest

torch = pytest.importorskip("torch")

from mpi4py import MPI  # noqa: E402

import mpidist.torch  # noqa: E402
from benchmarks.suite.gpu_steps import OURS, Steps, Trial, _contenders, wrong_gradients  # noqa: E402
from benchmarks.suite.ranks import Ranks  # noqa: E402
from benchmarks.torch_models import GPU_CASES  # noqa: E402
from mpidist.collectives import early_sums  # noqa: E402
from mpidist.frameworks.torch import overlap  # noqa: E402


def trial_of(ranks):
    options = argparse.Namespace(steps=1, seconds=0.01, rounds=3)
    return Trial(torch, torch.device("cpu"), ranks, options), GPU_CASES["tiny"](ranks.rank)


@pytest.mark.mpi(min_size=2)
def test_sums_that_begin_in_the_pass_are_timed_as_such_and_right(monkeypatch):
    """On two nodes, with short buckets; of the others none begins there."""
    monkeypatch.setattr(early_sums, "_LEAST_BUCKET_BYTES", 64)
    monkeypatch.setattr(overlap, "_STEPS_TIMED", 0)
    monkeypatch.setenv("MPIDIST_VIRTUAL_NODES", "2")
    with mpidist.new_world(MPI.COMM_WORLD):
        ranks = Ranks()
        trial, case = trial_of(ranks)
        contenders = _contenders(trial, case, with_stock=False)
        found = trial.turns(contenders)
        plain = Steps("plain", "reference", trial, case)
        for each in contenders:
            assert len(found[each.name]) == 3
            if each.is_reduced:
                assert each.overlapped == [each.name == OURS] * 3
                assert wrong_gradients(each, plain, ranks) == 0


@pytest.mark.mpi(min_size=2)
def test_gradients_that_are_not_the_mean_are_counted():
    ranks = Ranks()
    trial, case = trial_of(ranks)

    def wrong(wrap):
        made = (Steps(name, "ours", trial, case, each) for name, each in (("tried", wrap), ("plain", None)))
        return wrong_gradients(*made, ranks)

    count = sum(each.numel() for each in case.model.parameters())
    assert wrong(mpidist.torch.DistributedDataParallel) == 0
    assert wrong(lambda bare: mpidist.torch.DistributedDataParallel(bare, op="sum")) > count / 10
    assert wrong(None) > count / 10, "each rank has rows of its own"


def test_the_models_have_as_many_parameters_as_they_are_said_to_have():
    """ResNet-50 has 25,557,032 in 161 tensors; the GPT 25 million."""
    sizes = {name: [each.numel() for each in GPU_CASES[name](0).model.parameters()] for name in ("resnet50", "gpt")}
    assert (sum(sizes["resnet50"]), len(sizes["resnet50"])) == (25_557_032, 161)
    assert 24.5e6 < sum(sizes["gpt"]) < 25.5e6
