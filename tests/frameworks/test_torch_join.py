"""Replicas that run out of rows before others, and PyTorch's own class with mpidist's hook."""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

import mpidist.torch  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    assert_alike,
    assert_same_bits,
    batches,
    cross_entropy,
    last,
    momentum,
    part,
    rows,
    tanh_model,
    trained_alone,
    world,
)

pytestmark = pytest.mark.mpi


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("order", [1, -1])
def test_those_that_run_out_follow_the_others(by_all, order):
    """Rank r has r + 1 batches, or the other way round; the mean is over all, or over those that have rows."""
    size, rank = world().size, world().rank
    counts = [each + 1 for each in range(size)][::order]
    bare = tanh_model()
    expected = copy.deepcopy(bare)
    alone = sgd(expected.parameters())
    for turn in range(size):
        having = [each for each in range(size) if counts[each] > turn]
        alone.zero_grad()
        for each in having:
            x, y = rows(6, seed=10 * each + turn)
            (cross_entropy(expected(x), y) / (size if by_all else len(having))).backward()
        alone.step()
    model = mpidist.torch.DistributedDataParallel(bare)
    optimizer = sgd(model.parameters())
    with model.join(divide_by_initial_world_size=by_all):
        for turn in range(counts[rank]):
            x, y = rows(6, seed=10 * rank + turn)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    assert_alike(bare, expected)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("make", [momentum, lambda parameters: torch.optim.Adam(parameters, lr=0.01)])
def test_optimizers_that_keep_something_go_on_alike(make, order):
    """A rank that runs out first in one epoch has rows last in the next, with what it has seen of the others' steps."""
    size, rank = world().size, world().rank
    counts = [[each + 1 for each in range(size)][:: order * (-1) ** epoch] for epoch in range(3)]
    bare = tanh_model()
    expected = copy.deepcopy(bare)
    alone = make(expected.parameters())
    for epoch in range(3):
        for turn in range(size):
            alone.zero_grad()
            for each in (each for each in range(size) if counts[epoch][each] > turn):
                x, y = rows(6, seed=100 * epoch + 10 * each + turn)
                (cross_entropy(expected(x), y) / size).backward()
            alone.step()
    model = mpidist.torch.DistributedDataParallel(bare, check_every=1)
    optimizer = make(model.parameters())
    for epoch in range(3):
        with model.join():
            for turn in range(counts[epoch][rank]):
                x, y = rows(6, seed=100 * epoch + 10 * rank + turn)
                optimizer.zero_grad()
                cross_entropy(model(x), y).backward()
                optimizer.step()
    assert_alike(bare, expected, 1e-10)


@pytest.mark.mpi(min_size=2)
def test_an_optimizer_that_has_made_no_step_is_told_of():
    model = mpidist.torch.DistributedDataParallel(tanh_model(), check_every=1)
    optimizer = momentum(model.parameters())

    def step(seed):
        optimizer.zero_grad()
        x, y = rows(6, seed=seed)
        cross_entropy(model(x), y).backward()
        optimizer.step()

    is_last = world().rank == last()
    with pytest.warns(RuntimeWarning, match="rank 0 has made no step") if is_last else nullcontext():
        with model.join():
            for turn in range(world().rank):
                step(turn)
    mpidist.torch.broadcast_optimizer_state(optimizer, last())
    for turn in range(4):
        step(turn)
    assert_same_bits(*model.parameters())


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("order", [1, -1])
def test_means_weighted_by_the_rows_of_those_that_have_some(order, passes):
    """Rank r has r + 1 steps, or the other way round, and r + 2 rows in each pass."""
    size, rank = world().size, world().rank
    counts = [each + 1 for each in range(size)][::order]
    bare = tanh_model()
    expected = copy.deepcopy(bare)
    alone = momentum(expected.parameters())

    def batch(each, turn, number):
        return rows(each + 2, seed=100 * each + 10 * turn + number)

    for turn in range(size):
        parts = [batch(each, turn, number) for each in range(size) if counts[each] > turn for number in range(passes)]
        alone.zero_grad()
        cross_entropy(expected(torch.cat([x for x, _ in parts])), torch.cat([y for _, y in parts])).backward()
        alone.step()
    model = mpidist.torch.DistributedDataParallel(bare)
    optimizer = momentum(model.parameters())
    with model.join():
        for turn in range(counts[rank]):
            optimizer.zero_grad()
            model.rows = rank + 2
            for number in range(passes):
                x, y = batch(rank, turn, number)
                with model.no_sync() if number + 1 < passes else nullcontext():
                    (cross_entropy(model(x), y) / passes).backward()
            optimizer.step()
    assert_alike(bare, expected)


@pytest.mark.mpi(min_size=2)
def test_rows_where_ranks_weigh_alike():
    """Refused before anything is sent: a rank that is out of rows would wait for the others' gradients."""
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    with model.join(divide_by_initial_world_size=False):
        if world().rank == 0:
            with pytest.raises(ValueError, match="rows=6 is for means weighted by rows, not for join"):
                model.rows = 6


def test_a_rank_that_had_no_rows_is_as_the_others_afterwards():
    """Its optimizer has made no step yet; hyperparameters are compared from the next steps on."""
    model = mpidist.torch.DistributedDataParallel(tanh_model(), check_every=1)
    optimizer = sgd(model.parameters())

    def step(seed):
        optimizer.zero_grad()
        x, y = rows(6, seed=seed)
        cross_entropy(model(x), y).backward()
        optimizer.step()

    with model.join():
        for turn in range(world().rank):
            step(turn)
    for turn in range(4):
        step(turn)
    assert_same_bits(*model.parameters())


@pytest.mark.parametrize("last", [0, 1])
def test_buffers_are_those_of_a_rank_that_has_rows(last):
    size, rank = world().size, world().rank
    bare = torch.nn.BatchNorm1d(6).double()
    alone = copy.deepcopy(bare)
    model = mpidist.torch.DistributedDataParallel(bare)
    has_more = rank == last or size == 1
    for turn in range(3):
        first = 0 if turn == 0 else (last if last < size else 0)  # whose statistics all begin the next pass with
        alone(rows(6, seed=turn + 10 * first)[0])
    with model.join():
        for turn in range(3 if has_more else 1):
            model(rows(6, seed=turn + 10 * rank)[0]).sum().backward()
    if last == 0 or size == 1:
        torch.testing.assert_close(bare.running_mean, alone.running_mean, rtol=1e-13, atol=0)
    assert_same_bits(bare.running_mean, bare.running_var)


def test_even_inputs_and_passes_without_reduction():
    bare = tanh_model()
    expected = trained_alone(bare, sgd, batches(3, 24))
    model = mpidist.torch.DistributedDataParallel(bare)
    optimizer = sgd(model.parameters())
    with model.join():
        for batch in batches(3, 24):
            x, y = part(batch, "even")
            optimizer.zero_grad()
            with model.no_sync():
                (cross_entropy(model(x[::2]), y[::2]) / 2).backward()
            (cross_entropy(model(x[1::2]), y[1::2]) / 2).backward()
            optimizer.step()
    assert_alike(bare, expected)


@pytest.mark.mpi(min_size=2)
def test_running_out_early_may_be_an_error_on_all():
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    with pytest.raises(RuntimeError, match=r"ranks \[0\] have no more rows"):
        with model.join(throw_on_early_termination=True):
            for _ in range(1 if world().rank == 0 else 2):
                x, y = rows(4)
                cross_entropy(model(x), y).backward()
    with model.join(enable=False):
        x, y = rows(4)
        cross_entropy(model(x), y).backward()


@pytest.fixture
def process_group():
    """Gloo, over the ranks of MPI."""
    distributed = torch.distributed
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    size, rank = world().size, world().rank
    store = distributed.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False) if rank == 0 else None
    port = int(world().exchange(str(store.port if store else 0).encode())[0])
    store = store or distributed.TCPStore("127.0.0.1", port, size, False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    yield
    world().barrier()
    distributed.destroy_process_group()


def test_a_hook_for_pytorch_s_own_class(process_group):
    bare = tanh_model()
    expected = trained_alone(bare, sgd, batches(4, 12))
    model = torch.nn.parallel.DistributedDataParallel(bare)
    model.register_comm_hook(None, mpidist.torch.comm_hook)
    optimizer = sgd(model.parameters())
    before = world().control.call
    for batch in batches(4, 12):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert world().size == 1 or world().control.call >= before + 4
    assert_alike(bare, expected)
