"""What ranks change by themselves: hyperparameters, parameters, the optimizer's state; an error on all names it."""

from __future__ import annotations

import contextlib

import numpy
import pytest

torch = pytest.importorskip("torch")

import mpidist  # noqa: E402
import mpidist.torch as hvd  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    assert_alike,
    assert_same_bits,
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


def trained(change, steps=4, make=momentum, owner="optimizer", **options):
    """Return a model after some steps; rank by rank something is changed after the second."""
    model = tanh_model()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = make(groups)
    if owner == "module":
        model = hvd.DistributedDataParallel(model, **options)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    for number in range(steps):
        x, y = part(rows(12, seed=number), "even")
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        if number == 1:
            change(model, optimizer)
    return model


def entry(key, value, group=1):
    """Change an entry of `param_groups` on the last rank."""

    def change(model, optimizer):
        if world().rank == last():
            optimizer.param_groups[group][key] = value

    return change


ADAM = torch.optim.Adam
TENSORS = {"make": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.1))}


def in_place(model, optimizer):
    optimizer.param_groups[1]["lr"].mul_(1 + world().rank)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change, options, name", [
    (entry("lr", 0.05), {}, "'lr' of group 1: 0.05 on rank"),
    (entry("momentum", 0.5, 0), {}, "'momentum' of group 0: 0.5 on rank"),
    (entry("nesterov", True), {}, "'nesterov' of group 1: 1.0 on rank"),
    (entry("weight_decay", numpy.float32(0.5)), {}, "'weight_decay' of group 1: 0.5 on rank"),
    (entry("betas", (0.9, 0.5)), {"make": ADAM}, r"'betas' of group 1: \(0.9, 0.5\) on rank"),
    (in_place, TENSORS, "'lr' of group 1: "),
    (entry("lr", 0.05), {"compression": hvd.Compression.fp16}, "'lr' of group 1: 0.05 on rank"),
])  # fmt: skip
@pytest.mark.parametrize("has_strategy", [False, True])
def test_an_entry_of_the_groups_that_one_rank_changes(change, options, name, has_strategy):
    scope = mpidist.MultiWorkerMirroredStrategy().scope() if has_strategy else contextlib.nullcontext()
    with scope, pytest.raises(CollectiveMismatchError, match=name) as caught:
        trained(change, check_every=0, **options)
    assert f"rank {last()}" in str(caught.value) and "scheduler" in str(caught.value)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("has_strategy", [False, True])
def test_an_entry_that_one_rank_changes_of_the_optimizer_of_a_module(has_strategy):
    scope = mpidist.MultiWorkerMirroredStrategy().scope() if has_strategy else contextlib.nullcontext()
    with scope, pytest.raises(CollectiveMismatchError, match="'lr' of group 1: 0.05 on rank"):
        trained(entry("lr", 0.05), owner="module", check_every=0)


def test_several_optimizers_of_a_module():
    def trained(model, optimizers, batches):
        for number, (x, y) in enumerate(batches):
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            for optimizer in optimizers[number % 3 == 1 :]:
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.5

    def made(model):
        return [momentum(model[0].parameters()), torch.optim.Adam(model[2].parameters(), lr=0.01)]

    alone, model = tanh_model(), tanh_model()
    whole = [rows(12, seed=seed) for seed in range(5)]
    trained(alone, made(alone), whole)
    mine = made(model)
    trained(hvd.DistributedDataParallel(model), mine, [part(batch, "even") for batch in whole])
    assert_alike(model, alone)


def test_an_optimizer_that_another_takes_the_place_of():
    """The first is dropped when its hyperparameters are still to be compared."""

    def trained(model, batches):
        optimizer = momentum(model.parameters())
        for number, (x, y) in enumerate(batches):
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            if number == 2:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            optimizer.step()

    alone, model = tanh_model(), tanh_model()
    whole = [rows(12, seed=seed) for seed in range(5)]
    trained(alone, whole)
    trained(hvd.DistributedDataParallel(model), [part(batch, "even") for batch in whole])
    assert_alike(model, alone)


@pytest.mark.mpi(min_size=2)
def test_hyperparameters_that_differ_from_the_start():
    optimizer = torch.optim.SGD(tanh_model().parameters(), lr=0.1 * (1 + world().rank))
    with pytest.raises(CollectiveMismatchError, match="'lr' of group 0: 0"):
        hvd.DistributedOptimizer(optimizer)


@pytest.mark.mpi(min_size=2)
def test_a_scheduler_that_gets_the_loss_of_its_own_rank():
    model = tanh_model()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with pytest.raises(CollectiveMismatchError, match="'lr' of group 0: 0.*mpidist.torch.allreduce"):
        for number in range(3):
            x, y = part(rows(12), "even")
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            scheduler.step(1.0 + number * (1 if world().rank else -1))


def test_a_scheduler_that_gets_the_loss_of_all():
    """As in one process."""

    def steps(model, optimizer, kind, mean):
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        for _ in range(5):
            x, y = rows(12) if kind is None else part(rows(12), kind)
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step(mean(loss.detach()))
        return optimizer.param_groups[0]["lr"]

    alone, model = tanh_model(), tanh_model()
    wanted = steps(alone, momentum(alone.parameters()), None, lambda loss: loss)
    found = steps(model, hvd.DistributedOptimizer(momentum(model.parameters())), "even", hvd.allreduce)
    assert found == wanted < 0.1
    assert_alike(model, alone)


def changed_weight(model, optimizer):
    if world().rank == last():
        with torch.no_grad():
            list(model.parameters())[2][1, 1] += 1.0


def changed_momentum(model, optimizer):
    if world().rank == last():
        optimizer.state[list(model.parameters())[2]]["momentum_buffer"].fill_(1.0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change", [changed_weight, changed_momentum])
@pytest.mark.parametrize("owner", ["optimizer", "module"])
@pytest.mark.parametrize("every", [1, 2])
def test_a_weight_or_a_momentum_that_one_rank_changes(change, owner, every):
    with pytest.raises(CollectiveMismatchError, match=r"parameter '2.weight' has other values on rank") as caught:
        trained(change, 8, owner=owner, check_every=every)
    # the ranks that most are unlike; of two the second
    assert f"on rank {last()} than on rank 0, by up to" in str(caught.value)


@pytest.mark.mpi(min_size=3)
def test_the_rank_that_most_are_unlike_is_named():
    def change(model, optimizer):
        if world().rank == 0:
            with torch.no_grad():
                list(model.parameters())[0][0, 0] = torch.nan

    with pytest.raises(CollectiveMismatchError, match="'0.weight' has other values on rank 0 than on rank 1"):
        trained(change, check_every=1)


def test_without_the_comparison_of_parameters():
    trained(changed_weight, check_every=0)


def test_changes_that_all_ranks_make_alike():
    """Among them entries that are equal in value, the user's own keys, and objects."""

    def change(model, optimizer):
        rank = world().rank
        with torch.no_grad():
            list(model.parameters())[2][1, 1] += 1.0
        own = {"mine": rank, "fn": lambda: rank, "values": torch.full((3,), rank)}
        optimizer.param_groups[0].update(
            own, lr=[0.05, numpy.float64(0.05), torch.tensor(0.05, dtype=torch.float64)][rank % 3]
        )
        optimizer.defaults["fn"] = lambda: rank

    model = trained(change, 6, check_every=1)
    assert_same_bits(*model.parameters())


@pytest.mark.parametrize("owner", ["optimizer", "module"])
@pytest.mark.parametrize("way", ["foreach", "fused"])
def test_the_way_in_which_a_step_is_computed_may_differ(owner, way):
    def make(groups):
        return torch.optim.Adam(groups, **{way: world().rank == last()})

    assert_same_bits(*trained(lambda model, optimizer: None, make=make, owner=owner, check_every=1).parameters())


@pytest.mark.parametrize("owner", ["optimizer", "module"])
def test_an_entry_of_each_rank_s_own(owner):
    def make(groups):
        optimizer = torch.optim.SGD(groups, lr=0.1)
        optimizer.defaults["rank"] = optimizer.param_groups[1]["rank"] = world().rank
        del optimizer.defaults["rank"]
        return optimizer

    trained(lambda model, optimizer: None, make=make, owner=owner)


@pytest.mark.parametrize("owner", ["optimizer", "module"])
def test_parameters_that_are_moved_for_one_backward_pass(owner):
    """Sharpness-aware steps, in which each rank moves the parameters by its own gradients."""
    model = tanh_model()
    optimizer = momentum(model.parameters())
    wrapped = optimizer = hvd.DistributedOptimizer(optimizer, check_every=1) if owner == "optimizer" else optimizer
    if owner == "module":
        wrapped = model = hvd.DistributedDataParallel(model, check_every=1)
    for number in range(4):
        x, y = part(rows(12, seed=number), "even")
        optimizer.zero_grad()
        with wrapped.no_sync():
            cross_entropy(model(x), y).backward()
        with torch.no_grad():
            before = [each.clone() for each in model.parameters()]
            for each in model.parameters():
                each.add_(0.1 * each.grad)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for each, value in zip(model.parameters(), before, strict=True):
                each.copy_(value)
        optimizer.step()
    assert_same_bits(*model.parameters())


@pytest.mark.mpi(min_size=2)
def test_a_weight_of_a_model_without_an_optimizer():
    model = hvd.DistributedDataParallel(tanh_model(), check_every=1)
    x, y = part(rows(12), "even")
    changed_weight(model, None)
    with pytest.raises(CollectiveMismatchError, match="parameter '2.weight' has other values on rank"):
        for _ in range(2):
            model.zero_grad()
            cross_entropy(model(x), y).backward()


def test_differences_of_rounding_are_mended():
    def change(model, optimizer):
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(1 + world().rank * 2.0**-52)

    model = trained(change, 4, check_every=3)
    expected = trained_alone(tanh_model(), momentum, [rows(12, seed=seed) for seed in range(4)])
    assert_alike(model, expected)


@pytest.mark.parametrize("every", [-1, 1.5, True, None])
def test_numbers_of_steps_that_are_none(every):
    plain = momentum(tanh_model().parameters())
    with pytest.raises(ValueError, match="check_every="):
        hvd.DistributedOptimizer(plain, check_every=every)
    assert type(plain) is torch.optim.SGD
