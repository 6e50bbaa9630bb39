"""Parts of ``python -m benchmarks gpu-steps`` that need ranks, on the host."""

from __future__ import annotations

import argparse

import pytest

torch = pytest.importorskip("torch")

import mpidist.torch  # noqa: E402
from benchmarks.suite.gpu_steps import Steps, Trial, wrong_gradients  # noqa: E402
from benchmarks.suite.ranks import Ranks  # noqa: E402
from benchmarks.torch_models import GPU_CASES  # noqa: E402


@pytest.mark.mpi(min_size=2)
def test_gradients_that_are_not_the_mean_are_counted():
    ranks = Ranks()
    options = argparse.Namespace(steps=1, seconds=None, rounds=None)
    trial, case = Trial(torch, torch.device("cpu"), ranks, options), GPU_CASES["tiny"](ranks.rank)

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
