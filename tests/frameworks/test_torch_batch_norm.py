"""`SyncBatchNorm`: statistics and gradients are those of batch normalization of the global batch in one process."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
prune = pytest.importorskip("torch.nn.utils.prune")

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


@pytest.mark.parametrize("momentum, tracks", [(0.1, True), (None, True), (0.1, False), (None, False)])
def test_momentum_and_evaluation(momentum, tracks):
    alone = torch.nn.BatchNorm1d(CHANNELS, momentum=momentum, track_running_stats=tracks).double()
    mine = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    for turn in range(3):
        whole = batch(turn)
        alone(whole)
        mine(*part((whole,), "uneven"))
    for each in (alone, mine):
        each.eval()
    # without running statistics, torch.nn.SyncBatchNorm too takes those of its own rows (`need_sync` asks for training)
    (x,) = (batch(5),) if tracks else part((batch(5),), "uneven")
    before = world().control.call
    for _ in range(world().rank + 1):  # evaluation is local: each rank may have its own number of batches
        torch.testing.assert_close(mine(x), alone(x), rtol=1e-11, atol=1e-11)
    assert world().control.call == before


def test_statistics_that_are_kept_no_longer():
    alone = torch.nn.BatchNorm1d(CHANNELS).double()
    mine = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    for each in (alone, mine):
        each.track_running_stats = False
    (expected,) = part((alone(batch(0)),), "even")
    torch.testing.assert_close(mine(*part((batch(0),), "even")), expected, rtol=1e-11, atol=1e-11)
    assert mine.num_batches_tracked == alone.num_batches_tracked == 0


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


class WithReLU(torch.nn.BatchNorm1d):
    """Computes something else."""

    def forward(self, input):
        return torch.relu(super().forward(input))


def swapped(layer):
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize("make, error, match", [
    (lambda: WithReLU(3), TypeError, "'0.1', a WithReLU, has a class or a forward"),
    (lambda: swapped(torch.nn.BatchNorm1d(3)), TypeError, "'0.1', a BatchNorm1d, has a class or a forward"),
    (lambda: torch.jit.script(torch.nn.BatchNorm1d(3)), TypeError, "'0.1', a BatchNorm1d, has a class or a forward"),
    (lambda: torch.nn.LazyBatchNorm1d(), ValueError, "'0.1', a LazyBatchNorm1d, does not know its channels yet"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_layers_that_may_compute_something_else_are_refused(make, error, match):
    first = torch.nn.BatchNorm1d(3)
    model = torch.nn.Sequential(torch.nn.Sequential(first, make()))
    with pytest.raises(error, match=match):
        mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(first) is torch.nn.BatchNorm1d  # nothing was converted


def test_lazy_layers_are_converted_after_a_forward_pass():
    model = torch.nn.Sequential(torch.nn.LazyBatchNorm1d())
    model(torch.ones(2, 3))
    mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(model)
    assert type(model[0]) is mpidist.torch.SyncBatchNorm


class ManyNames(torch.nn.Module):
    """One layer under two names in one parent, in another parent, and in a plain list."""

    def __init__(self):
        super().__init__()
        self.a = self.b = torch.nn.BatchNorm1d(CHANNELS)
        self.inner = torch.nn.ModuleDict({"c": self.a})
        self.plain = [self.a]
        self.a.register_forward_hook(lambda layer, args, out: out * 3)
        self.removed = self.a.register_forward_pre_hook(lambda layer, args: args[0] + 100)

    def forward(self, x):
        return self.plain[0](self.inner["c"](self.b(self.a(x) * 2) ** 2) ** 2)


@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
@pytest.mark.parametrize("prunes", [False, True])
def test_every_place_and_every_hook_of_a_layer(kind, prunes):
    alone = ManyNames().double()
    alone.removed.remove()
    mine = ManyNames().double()
    for each in (alone, mine):
        if prunes:
            prune.custom_from_mask(each.a, "weight", torch.tensor([1.0, 0.0, 1.0, 1.0]))
    names = list(mine.state_dict())
    mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(mine)
    mine.removed.remove()
    assert list(mine.state_dict()) == names
    whole = batch(1)
    expected = alone(whole)
    (x,), (wanted,) = part((whole,), kind), part((expected,), kind)
    torch.testing.assert_close(mine(x), wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine.a.running_var, alone.a.running_var, rtol=1e-11, atol=0)


@pytest.mark.parametrize("momentum, tracks", [(0.1, True), (None, True), (0.1, False), (None, False)])
@pytest.mark.parametrize("shape", [(0, CHANNELS), (3, CHANNELS, 0)])
def test_no_rows_on_any_rank_are_what_they_are_in_one_process(momentum, tracks, shape):
    alone = torch.nn.BatchNorm1d(CHANNELS, momentum=momentum, track_running_stats=tracks)
    mine = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    for layer in (alone, mine):
        x = torch.ones(shape, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.shape == shape
    for name, wanted in {**alone.state_dict(), "weight": alone.weight.grad, "bias": alone.bias.grad}.items():
        found = getattr(mine, name)
        assert torch.equal(found.grad if name in ("weight", "bias") else found, wanted), name


@pytest.mark.parametrize("affine", [True, False])
def test_an_output_may_be_changed_in_place(affine):
    alone = torch.nn.BatchNorm1d(CHANNELS, affine=affine).double()
    mine = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    whole = batch(0).requires_grad_()
    x = part((whole.detach().clone(),), "even")[0].requires_grad_()
    alone(whole).relu_().square().sum().backward()
    mine(x).relu_().square().sum().backward()
    torch.testing.assert_close(x.grad, *part((whole.grad,), "even"), rtol=1e-10, atol=1e-10)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("affine", [True, False])
def test_second_derivatives_are_refused(affine):
    """As for a penalty on gradients: without an error it would lack a part, as the rest of it has a graph."""
    layer = mpidist.torch.SyncBatchNorm(CHANNELS, affine=affine).double()
    x = part((batch(0),), "even")[0].requires_grad_()
    with pytest.raises(RuntimeError, match="SyncBatchNorm in training mode has no second derivatives"):
        torch.autograd.grad((layer(x) * torch.sin(x.detach())).sum(), x, create_graph=True)
    layer.eval()
    (first,) = torch.autograd.grad((layer(x) ** 2).sum(), x, create_graph=True)
    first.sum().backward()
    wanted = (2 / (layer.running_var + layer.eps)).expand_as(x)
    torch.testing.assert_close(x.grad, wanted, rtol=1e-10, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_short_floats_are_not_rounded_to_them(dtype):
    whole = (batch(0, (48, CHANNELS)) * 1000).to(dtype)
    whole[::4] *= -1  # further from the mean than the largest float16
    alone = torch.nn.BatchNorm1d(CHANNELS)
    mine = mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    alone(whole.float())
    mine(*part((whole,), "even"))
    torch.testing.assert_close(mine.running_var, alone.running_var, rtol=1e-5, atol=0)


def test_no_channels():
    with pytest.raises(ValueError, match="no channels"):
        mpidist.torch.SyncBatchNorm(0)(torch.ones(2, 0))


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
