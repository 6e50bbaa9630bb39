"""Embeddings with `max_norm`, which change their weights by the rows of their own rank."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import mpidist  # noqa: E402
import mpidist.torch  # noqa: E402

pytestmark = pytest.mark.mpi


def model(max_norm):
    return torch.nn.Sequential(torch.nn.EmbeddingBag(6, 4, max_norm=max_norm), torch.nn.Linear(4, 1))


def distributed(kind, net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if kind == "model":
        return mpidist.torch.DistributedDataParallel(net)
    if kind == "optimizer":
        return mpidist.torch.DistributedOptimizer(optimizer, net.named_parameters())
    return mpidist.MultiWorkerMirroredStrategy().distribute(net, optimizer)


KINDS = pytest.mark.parametrize("kind", ["model", "optimizer", "strategy"])


@KINDS
@pytest.mark.mpi(min_size=2)
def test_rows_that_a_rank_shrinks_by_itself_are_refused(kind):
    with pytest.raises(ValueError, match=r"'0' is EmbeddingBag with max_norm=1\.0: .*\.renorm_\(2\.0, 0, 1\.0\)"):
        distributed(kind, model(1.0))


@KINDS
def test_others_and_frozen_ones_are_not(kind):
    frozen = model(1.0)
    frozen[0].weight.requires_grad = False
    distributed(kind, frozen)
    distributed(kind, model(None))


def test_one_replica_may_shrink_its_rows():
    with mpidist.OneDeviceStrategy("/cpu:0").scope():
        distributed("model", model(1.0))
