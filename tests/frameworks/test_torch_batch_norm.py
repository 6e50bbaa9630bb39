"""`SyncBatchNorm`: statistics and gradients are those of batch normalization of the global batch in one process."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import mpidist.torch  # noqa: E402
from tests.frameworks.torch_models import assert_alike, assert_same_bits, part, world  # noqa: E402

pytestmark = pytest.mark.mpi

CHANNELS = 4


def batch(seed, shape=(12, CHANNELS), dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    # a mean that is large beside the deviation, where sums of squares would cancel
    return (torch.randn(shape, generator=generator, dtype=torch.float64) + 50).to(dtype)


@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
@pytest.mark.parametrize("shape", [(12, CHANNELS), (12, CHANNELS, 3), (12, CHANNELS, 2, 3)])
@pytest.mark.parametrize("affine", [True, False])
def test_outputs_and_gradients_are_those_of_the_global_batch(kind, shape, affine):
    layer = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}[len(shape)]
    alone = layer(CHANNELS, affine=affine).double()
    if affine:
        torch.nn.init.uniform_(alone.weight, 0.5, 1.5)
    mine = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    assert type(mine) is mpidist.torch.SyncBatchNorm
    for turn in range(3):
        whole, weights = batch(turn, shape).requires_grad_(), torch.sin(batch(turn + 9, shape))
        x, w = (each.detach().clone() for each in part((whole, weights), kind))
        x.requires_grad_()
        expected, found = alone(whole), mine(x)
        (expected * weights).sum().backward()
        (found * w).sum().backward()
        (wanted_out,) = part((expected,), kind)
        (wanted_grad,) = part((whole.grad,), kind)
        torch.testing.assert_close(found, wanted_out, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(x.grad, wanted_grad, rtol=1e-10, atol=1e-10)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(mine, name), getattr(alone, name), rtol=1e-12, atol=0)
    assert_same_bits(mine.running_mean, mine.running_var)


@pytest.mark.parametrize("momentum, tracks", [(0.1, True), (None, True), (0.1, False)])
def test_momentum_and_evaluation(momentum, tracks):
    alone = torch.nn.BatchNorm1d(CHANNELS, momentum=momentum, track_running_stats=tracks).double()
    mine = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    for turn in range(3):
        whole = batch(turn)
        alone(whole)
        mine(*part((whole,), "uneven"))
    for each in (alone, mine):
        each.eval()
    (x,) = part((batch(5),), "even") if not tracks else (batch(5),)
    (expected,) = part((alone(batch(5)),), "even") if not tracks else (alone(batch(5)),)
    before = world().control.call
    torch.testing.assert_close(mine(x), expected, rtol=1e-11, atol=1e-11)
    assert not tracks or world().control.call == before  # evaluation with running statistics is local


@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
def test_a_model_with_it_equals_one_process(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(CHANNELS, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 1)
    ).double()
    alone = copy.deepcopy(model)
    model = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), op="sum")
    for turn in range(6):
        whole = batch(turn) - 50
        plain.zero_grad()
        optimizer.zero_grad()
        alone(whole).square().mean().backward()
        (x,) = part((whole,), kind)
        mpidist.torch.compute_average_loss(model(x).square()[:, 0]).backward()
        plain.step()
        optimizer.step()
    assert_alike(model, alone, 1e-10)


def test_converted_layers_share_parameters_and_names():
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.ReLU()))
    names, first = list(model.state_dict()), model[0].weight
    model.eval()
    found = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(model)
    assert found is model and list(found.state_dict()) == names and found[0].weight is first
    assert isinstance(found[1][0], mpidist.torch.SyncBatchNorm) and not found[0].training
    copy.deepcopy(found)


@pytest.mark.mpi(min_size=2)
def test_weights_by_rows_are_refused_where_gradients_cross():
    layer = mpidist.torch.SyncBatchNorm(CHANNELS).double()
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1))
    (x,) = part((batch(0),), "uneven")
    optimizer.rows = len(x)
    with pytest.raises(RuntimeError, match="SyncBatchNorm.*compute_average_loss"):
        layer(x).square().mean().backward()


@pytest.mark.mpi(min_size=2)
def test_one_value_per_channel():
    layer = mpidist.torch.SyncBatchNorm(CHANNELS).double()
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1 over"):
        layer(batch(0)[: 1 if world().rank == 0 else 0])
