"""CUDA tensors, on a pretended device: there is no GPU here."""

from __future__ import annotations

import sys
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

import mpidist
import mpidist.torch
from mpidist.collectives.reductions.plan_cache import Bindings
from mpidist.errors import CollectiveMismatchError, MissingDependencyError, RankFailedError, UnsupportedDtypeError
from mpidist.frameworks.torch import cuda, tensors
from mpidist.testing.device import pretended_device
from mpidist.world import world_communicator

from .torch_device import Device
from .torch_models import part, rows, tanh_model, trained_alone, world

pytestmark = pytest.mark.mpi


@pytest.fixture(params=["", "the device is a pretended one"], ids=["linked", "staged"])
def device(request, monkeypatch):
    monkeypatch.setattr(world_communicator(), "bindings", Bindings())  # it has those of the other device
    with pretended_device(request.param):
        yield Device(monkeypatch)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def batches(number, count):
    return [rows(count, seed=seed) for seed in range(number)]


def step(model, optimizer, batch, kind="even"):
    optimizer.zero_grad()
    x, y = part(batch, kind)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def assert_alike(model, expected, **tolerance):
    for found, each in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, each, **tolerance)


@pytest.mark.parametrize("make", [sgd, adam])
def test_an_optimizer_s_steps_are_those_of_one_process_and_nobody_waits_for_the_device(device, make):
    model = tanh_model()
    expected = trained_alone(model, make, batches(4, 12))
    optimizer = mpidist.torch.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    before = device.copies
    for batch in batches(4, 12):
        step(model, optimizer, batch)
    assert_alike(model, expected)
    assert device.copies == before
    if world().size > 1:
        made = device.arrays
        step(model, optimizer, batches(1, 12)[0])
        assert device.arrays - made <= 4  # those of gradients that lie elsewhere than in the last step


def sparse_step(model, optimizer):
    table = torch.nn.Embedding(4, 2, sparse=True)
    of_table = mpidist.torch.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1, 2])).sum().backward()
    of_table.step()


def closed_step(model, optimizer):
    def closure():
        optimizer.zero_grad()
        loss = model(batches(1, 12)[0][0]).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)


def zeroed_step(model, optimizer):
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        model(batches(1, 12)[0][0]).square().mean().backward()
        optimizer.step()


READING = {
    "compared": (1, lambda model, optimizer: step(model, optimizer, batches(1, 12)[0])),
    "zeroed": (0, zeroed_step),
    "closure": (0, closed_step),
    "sparse": (0, sparse_step),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("every", "read"), READING.values(), ids=READING)
def test_the_host_reads_nothing_before_a_wait_that_meets_the_end_of_others(device, monkeypatch, every, read):
    """Only where NCCL is: it may wait for a rank for ever, and PyTorch with it."""
    foreign = ModuleType("foreign")
    monkeypatch.setitem(sys.modules, "mpidist.device.foreign", foreign)
    monkeypatch.setattr(mpidist.device, "foreign", foreign, raising=False)
    foreign.wait = Mock(side_effect=RankFailedError("as of a rank that is gone", 1))
    model = tanh_model()
    optimizer = mpidist.torch.DistributedOptimizer(sgd(model.parameters()), check_every=every)
    read(model, optimizer)
    assert not foreign.wait.called
    monkeypatch.setattr(cuda, "has_links", lambda: True)
    before = device.copies
    with pytest.raises(RankFailedError, match="as of a rank that is gone"):
        read(model, optimizer)
    assert device.copies == before


def test_parameters_are_compared_with_one_copy(device):
    model = tanh_model()
    optimizer = mpidist.torch.DistributedOptimizer(sgd(model.parameters()), check_every=2)
    before = device.copies
    for batch in batches(4, 12):
        step(model, optimizer, batch)
    assert device.copies - before == (2 if world().size > 1 else 0)
    with torch.no_grad():
        model[2].bias += world().rank * torch.eye(3, dtype=torch.float64)[1]
    if world().size > 1:
        with pytest.raises(CollectiveMismatchError, match="parameter 3.* has other values on rank"):
            for batch in batches(2, 12):
                step(model, optimizer, batch)


def test_a_module_reduces_weighted_means_of_uneven_rows(device):
    model = tanh_model()
    expected = trained_alone(model, sgd, batches(3, 13))
    replica = mpidist.torch.DistributedDataParallel(model)
    optimizer = sgd(model.parameters())
    for batch in batches(3, 13):
        replica.rows = len(part(batch, "uneven")[0])
        step(replica, optimizer, batch, "uneven")
    assert_alike(model, expected)


def test_a_gradient_that_some_ranks_do_not_have(device):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)]).double()
    replica = mpidist.torch.DistributedDataParallel(model)
    x = torch.ones(1, 2, dtype=torch.float64)
    for _ in range(2):
        used = [0, 1] if world().rank == 0 else [1]
        sum(model[each](x).sum() for each in used).backward()
        torch.testing.assert_close(model[0].weight.grad, torch.ones_like(model[0].weight) / world().size)
        torch.testing.assert_close(model[1].weight.grad, torch.ones_like(model[1].weight))
        assert model[2].weight.grad is None
        replica.zero_grad()


def test_accumulated_passes_and_clipping(device):
    model = tanh_model()
    alone, expected = torch.nn.utils.clip_grad_norm_, tanh_model()
    own = sgd(expected.parameters())
    for first, second in zip(batches(3, 12), batches(3, 12)[::-1], strict=True):
        own.zero_grad()
        for x, y in (first, second):
            torch.nn.functional.cross_entropy(expected(x), y).backward()
        alone(expected.parameters(), 0.1)
        own.step()
    replica = mpidist.torch.DistributedDataParallel(model)
    optimizer = sgd(model.parameters())
    for first, second in zip(batches(3, 12), batches(3, 12)[::-1], strict=True):
        optimizer.zero_grad()
        with replica.no_sync():
            x, y = part(first, "even")
            torch.nn.functional.cross_entropy(replica(x), y).backward()
        x, y = part(second, "even")
        torch.nn.functional.cross_entropy(replica(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert_alike(model, expected)


def test_gradients_that_are_set_to_zero_in_place(device):
    model = tanh_model()
    expected = trained_alone(model, sgd, batches(3, 12))
    optimizer = mpidist.torch.DistributedOptimizer(sgd(model.parameters()), op="sum")
    for x, y in batches(3, 12):
        optimizer.zero_grad(set_to_none=False)
        mine = part((x, y), "even")
        (torch.nn.functional.cross_entropy(model(mine[0]), mine[1], reduction="sum") / 12).backward()
        optimizer.step()
    assert_alike(model, expected)


def test_gradients_set_to_zero_behind_pytorch_s_back_are_no_leftovers(device):
    model = tanh_model()
    expected = trained_alone(model, sgd, batches(3, 12))
    optimizer = mpidist.torch.DistributedOptimizer(sgd(model.parameters()))
    for batch in batches(3, 12):
        for each in model.parameters():
            if each.grad is not None:
                each.grad.data.zero_()
        x, y = part(batch, "even")
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_alike(model, expected)


def test_gradients_that_do_not_lie_in_order_are_copied_there_and_back(device):
    model = tanh_model()
    expected = trained_alone(model, sgd, batches(2, 12))
    optimizer = mpidist.torch.DistributedOptimizer(sgd(model.parameters()))
    for each in model.parameters():
        if each.dim() == 2:
            each.data = each.data.t().contiguous().t()
    for batch in batches(2, 12):
        step(model, optimizer, batch)
    assert_alike(model, expected)


def test_sparse_gradients_go_through_the_host(device):
    table = torch.nn.Embedding(7, 3, sparse=True).double()
    replica = mpidist.torch.DistributedDataParallel(table)
    for _ in range(2):
        table.weight.grad = None
        replica(torch.tensor([world().rank, 5])).sum().backward()
        dense = table.weight.grad.to_dense()
        torch.testing.assert_close(dense[5], torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(dense[0], torch.ones(3, dtype=torch.float64) / world().size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_short_floats_are_summed_in_32_bits(device, dtype):
    model = torch.nn.Linear(3, 2).to(dtype)
    replica = mpidist.torch.DistributedDataParallel(model, op="sum")
    replica(torch.full((1, 3), 2.0 + world().rank, dtype=dtype)).sum().backward()
    total = sum(2.0 + rank for rank in range(world().size))
    torch.testing.assert_close(model.weight.grad, torch.full((2, 3), total, dtype=dtype), rtol=0, atol=0)
    assert model.weight.grad.dtype is dtype


def test_batch_norm_over_all_rows_waits_for_nothing(device):
    torch.manual_seed(0)
    x = torch.randn(world().size * 4, 3, 2, dtype=torch.float64)
    alone, layer = torch.nn.BatchNorm1d(3).double(), mpidist.torch.SyncBatchNorm(3).double()
    given, mine = x.clone().requires_grad_(), x[world().rank :: world().size].clone().requires_grad_()
    before = device.copies
    expected, found = alone(given), layer(mine)
    expected.pow(3).sum().backward()
    found.pow(3).sum().backward()
    assert device.copies == before
    torch.testing.assert_close(found, expected[world().rank :: world().size])
    torch.testing.assert_close(mine.grad, given.grad[world().rank :: world().size])
    torch.testing.assert_close(layer.running_var, alone.running_var)
    total = mpidist.torch.all_reduce(layer.weight.grad)
    torch.testing.assert_close(total, alone.weight.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.complex64])
def test_collectives_of_tensors(device, dtype):
    rank, size = world().rank, world().size
    own = torch.full((2, 2), rank + 1, dtype=dtype)
    torch.testing.assert_close(mpidist.torch.all_reduce(own), torch.full_like(own, size * (size + 1) // 2))
    everybody = torch.cat([torch.full((2, 2), each + 1, dtype=dtype) for each in range(size)])
    torch.testing.assert_close(mpidist.torch.all_gather(own), everybody)
    torch.testing.assert_close(mpidist.torch.broadcast(own, size - 1), torch.full_like(own, size))
    many = torch.full((size, 2), rank + 1, dtype=dtype)
    total = torch.full((1, 2), size * (size + 1) // 2, dtype=dtype)
    torch.testing.assert_close(mpidist.torch.reduce_scatter(many), total)
    moved, counts = mpidist.torch.all_to_all(many)
    assert counts == [1] * size
    torch.testing.assert_close(moved, everybody[::2])


def test_gradients_flow_through_collectives(device):
    size = world().size
    x = torch.full((3,), world().rank + 1.0, requires_grad=True)
    (mpidist.torch.all_reduce(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 2.0 * size * size * (size + 1) / 2))
    x.grad = None
    mpidist.torch.all_gather(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), float(size)))


def test_all_begin_with_the_values_of_rank_0(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()
    with torch.no_grad():
        for each in [*model.parameters(), *model.buffers()]:
            each.fill_(world().rank + 2)
    before = device.copies
    mpidist.torch.broadcast_parameters(model.state_dict())
    assert all((each == 2).all() for each in [*model.parameters(), *model.buffers()])
    assert device.copies == before


def test_buffers_that_a_pass_has_noted_may_be_sent_before_its_backward(device):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()
    replica = mpidist.torch.DistributedDataParallel(model)
    x = torch.randn(5, 4, dtype=torch.float64)
    (replica(x).sum() + replica(2 * x).square().sum()).backward()
    assert model[0].weight.grad is not None


def test_what_cannot_be_done(device):
    model = tanh_model()
    coded = mpidist.compression.Float16()
    if world().size > 1:
        with pytest.raises(UnsupportedDtypeError, match="codes gradients in host memory, and 'parameter 0.*staging="):
            mpidist.torch.DistributedOptimizer(sgd(model.parameters()), compression=coded)
        with pytest.raises(UnsupportedDtypeError, match="codes values in host memory.*tensor.cpu"):
            mpidist.torch.all_reduce(torch.ones(3), compression=coded)


def test_tensors_on_several_devices_are_named():
    named = [("a", torch.ones(1)), ("b", torch.ones(1, device="meta"))]
    with pytest.raises(NotImplementedError, match="'b' lies on meta"):
        tensors.check_memory(named, None)


def test_a_model_on_two_devices_is_refused_with_names(monkeypatch):
    monkeypatch.setattr(cuda, "has", lambda tensor: tensor.is_meta)
    named = [("a", torch.ones(1)), ("b", torch.ones(1, device="meta"))]
    with pytest.raises(ValueError, match="'a' lies on cpu, and 'b' on meta: .*model.to"):
        tensors.check_memory(named, None)
    tensors.check_memory(named, "host")


def test_cuda_tensors_without_cupy_say_what_to_install(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setitem(__import__("sys").modules, "mpidist.device.foreign", None)
    with pytest.raises(MissingDependencyError, match="pip install cupy-cuda12x .*staging='host'"):
        cuda.require_cupy()


@pytest.mark.mpi(min_size=2)
def test_a_gradient_of_another_shape_where_the_last_one_lay(device):
    """What lies behind it is not reduced."""
    weight, memory = torch.nn.Parameter(torch.ones(8)), torch.full((8,), 2.0 * world().rank)
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5))
    weight.grad = memory
    optimizer.step()
    assert memory.tolist() == [2.0 * sum(range(world().size)) / world().size] * 8
    memory.fill_(world().rank)
    weight.grad = None
    weight.data = torch.ones(4)
    weight.grad = memory[:4]
    with pytest.raises(ValueError, match=r"expected float32\[8\] as number 0, got float32\[4\]"):
        optimizer.step()
    assert memory[4:].tolist() == [world().rank] * 4
