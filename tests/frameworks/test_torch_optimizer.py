"""`DistributedOptimizer`: ranks together do what one process does on the global batch, whatever the optimizer."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest

torch = pytest.importorskip("torch")

import mpidist  # noqa: E402
import mpidist.compression  # noqa: E402
import mpidist.torch  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    COLUMNS,
    assert_alike,
    assert_same_bits,
    batches,
    cross_entropy,
    part,
    rows,
    tanh_model,
    trained_alone,
    world,
)

pytestmark = pytest.mark.mpi

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}


def step(model, optimizer, batch, kind="even", weight=True):
    x, y = part(batch, kind)
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    if weight:
        optimizer.rows = len(x)
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_ranks_equal_one_process_on_the_global_batch(make, kind, dtype, tolerance):
    model = tanh_model(dtype=dtype)
    expected = trained_alone(model, make, batches(10, 12, dtype))
    optimizer = mpidist.torch.DistributedOptimizer(make(model.parameters()), model.named_parameters())
    for batch in batches(10, 12, dtype):
        step(model, optimizer, batch, kind)
    assert_alike(model, expected, tolerance)


def test_the_mean_over_even_parts_needs_no_rows():
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["momentum"], batches(5, 12))
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["momentum"](model.parameters()))
    for batch in batches(5, 12):
        step(model, optimizer, batch, weight=False)
    assert_alike(model, expected)


@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
def test_sums_of_losses_that_are_divided_by_the_global_batch(kind):
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["adam"], batches(5, 12))
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), op="sum")
    for number, batch in enumerate(batches(5, 12)):
        x, y = part(batch, kind)
        optimizer.zero_grad()
        losses = cross_entropy(model(x), y, reduction="none")
        size = {} if number % 2 else {"global_batch_size": 12}
        mpidist.torch.compute_average_loss(losses, **size).backward()
        optimizer.step()
    assert_alike(model, expected)


@pytest.mark.parametrize(
    ("losses", "weights", "expected"),
    [
        ((3, 1), [1.0, 2.0, 3.0], 2.0),
        ((3, 2), [1.0, 2.0, 3.0], 4.0),
        ((3,), [[1.0], [2.0], [3.0]], 2.0),
        ((3,), 2.0, 2.0),
        ((3, 2), [[1.0, 2.0]] * 3, 3.0),
    ],
)
def test_a_weight_for_each_row(losses, weights, expected):
    given = torch.tensor(weights)
    assert mpidist.torch.compute_average_loss(torch.ones(losses), given, global_batch_size=3).item() == expected


@pytest.mark.parametrize("weights", [(2,), (3, 2), (3, 1, 1)])
def test_weights_that_do_not_fit(weights):
    with pytest.raises(ValueError, match="does not fit the losses' .3,."):
        mpidist.torch.compute_average_loss(torch.ones(3), torch.ones(weights), global_batch_size=3)


def test_a_rank_without_rows_may_have_gradients_that_are_no_numbers():
    """A masked mean of nothing: the others' mean counts."""
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["sgd"], batches(1, 12))
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    (batch,) = batches(1, 12)
    x, y = part(batch, "empty")
    optimizer.rows = len(x)
    if len(x):
        loss = cross_entropy(model(x), y)
    else:
        losses = cross_entropy(model(batch[0]), batch[1], reduction="none")
        loss = (losses * 0).sum() / torch.zeros(1).sum()
    loss.backward()
    optimizer.step()
    assert_alike(model, expected)


def test_rows_with_a_sum():
    model = tanh_model()
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op="sum")
    with pytest.raises(ValueError, match="rows=4 is for means weighted by rows, not for op='sum'"):
        optimizer.rows = 4


def test_all_begin_with_the_parameters_and_the_state_of_rank_0():
    model = tanh_model(seed=world().rank)
    plain = torch.optim.Adam(model.parameters(), lr=0.1 / (1 + world().rank))
    if world().rank == 0:  # as after loading a checkpoint on one rank
        cross_entropy(model(rows(4)[0]), rows(4)[1]).backward()
        plain.step()
    optimizer = mpidist.torch.DistributedOptimizer(plain)
    assert_same_bits(*model.parameters(), *(each["exp_avg"] for each in optimizer.state.values()))
    assert optimizer.param_groups[0]["lr"] == 0.1 and len(optimizer.state) == 4


def test_it_is_the_optimizer_that_was_given():
    model = tanh_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups, state = plain.param_groups, copy.deepcopy(plain.state_dict())
    optimizer = mpidist.torch.DistributedOptimizer(plain)
    assert optimizer is plain and isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups is groups
    assert isinstance(optimizer, mpidist.torch.DistributedOptimizer) and type(optimizer).__name__ == "SGD"
    assert optimizer.state_dict() == state
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(copied) is torch.optim.SGD


@pytest.mark.parametrize("is_made_first", [True, False])
def test_a_scheduler_made_before_or_after(is_made_first):
    def made(parameters):
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    model = tanh_model()
    expected = copy.deepcopy(model)
    alone = made(expected.parameters())
    alone_scheduler = torch.optim.lr_scheduler.StepLR(alone, 2, 0.1)
    optimizer = made(model.parameters())
    if is_made_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    optimizer = mpidist.torch.DistributedOptimizer(optimizer)
    if not is_made_first:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)
    for x, y in batches(6, 12):
        alone.zero_grad()
        cross_entropy(expected(x), y).backward()
        alone.step()
        alone_scheduler.step()
        step(model, optimizer, (x, y))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
    assert_alike(model, expected)


def test_gradients_are_clipped_after_the_sum():
    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["sgd"], batches(5, 12), before_step=clip)
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    for batch in batches(5, 12):
        x, y = part(batch, "uneven")
        optimizer.zero_grad()
        optimizer.rows = len(x)
        cross_entropy(model(x), y).backward()
        clip(model)
        optimizer.step()
    assert_alike(model, expected)


def test_horovod_s_way_of_clipping():
    model = tanh_model()
    expected = trained_alone(
        model,
        OPTIMIZERS["sgd"],
        batches(5, 12),
        before_step=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05),
    )
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    for batch in batches(5, 12):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_alike(model, expected)


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_several_backward_passes_before_a_step(op):
    """Two halves of a batch, reduced once."""
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["adam"], batches(4, 24))
    optimizer = mpidist.torch.DistributedOptimizer(
        OPTIMIZERS["adam"](model.parameters()), op=op, backward_passes_per_step=2
    )
    before = world().control.call
    for batch in batches(4, 24):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        for half in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            divided = 2 * (world().size if op == "sum" else 1)
            (cross_entropy(model(x[half]), y[half]) / divided).backward()
        optimizer.step()
    assert world().control.call - before == (4 if world().size > 1 else 0)
    assert_alike(model, expected)


def test_passes_that_only_accumulate():
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["adam"], batches(4, 24))
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()))
    for batch in batches(4, 24):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        with optimizer.no_sync():
            (cross_entropy(model(x[::2]), y[::2]) / 2).backward()
        (cross_entropy(model(x[1::2]), y[1::2]) / 2).backward()
        optimizer.step()
    assert_alike(model, expected)


def test_more_passes_than_were_announced():
    """Means stay right, since they are linear; sums would count what was summed once for each replica."""
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["sgd"], batches(3, 24))
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    for batch in batches(3, 24):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        for half in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            (cross_entropy(model(x[half]), y[half]) / 2).backward()
        optimizer.step()
    assert_alike(model, expected)
    other = tanh_model()
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](other.parameters()), op="sum")
    x, y = part(batches(1, 12)[0], "even")
    cross_entropy(other(x), y).backward()
    with pytest.raises(RuntimeError, match="added to gradients that were summed .* backward_passes_per_step=2"):
        cross_entropy(other(x), y).backward()
    for set_to_none in (True, False):
        optimizer.zero_grad(set_to_none=set_to_none)
        cross_entropy(other(x), y).backward()  # of another loss, as of the other net of two


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_two_steps_with_the_same_gradients(op):
    model = tanh_model()
    expected = copy.deepcopy(model)
    alone = OPTIMIZERS["sgd"](expected.parameters())
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), op=op)
    x, y = rows(12)
    cross_entropy(expected(x), y).backward()
    x, y = part((x, y), "even")
    (cross_entropy(model(x), y) / (world().size if op == "sum" else 1)).backward()
    for each in (alone, alone, optimizer, optimizer):
        each.step()
    assert_alike(model, expected)


class Branches(torch.nn.Module):
    """A model of which each batch takes one branch."""

    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Embedding(11, 4, sparse=sparse)
        self.a, self.b, self.unused = (torch.nn.Linear(4, 2) for _ in range(3))
        self.double()

    def forward(self, numbers, branch):
        x = self.table(numbers).mean(1) if numbers is not None else torch.ones(1, 4, dtype=torch.float64)
        return (self.a if branch == "a" else self.b)(x)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_some_ranks_do_not_have(sparse, set_to_none):
    """Momentum and weight decay move a parameter that has a gradient of zeros, and not one that has none."""

    def made(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0 if sparse else 0.9, weight_decay=0 if sparse else 0.1)

    model = Branches(sparse)
    start = copy.deepcopy(model.state_dict())
    expected = copy.deepcopy(model)
    alone, optimizer = made(expected.parameters()), mpidist.torch.DistributedOptimizer(made(model.parameters()))
    size = world().size
    numbers = [torch.arange(2 * rank, 2 * rank + 4).reshape(2, 2) % 11 for rank in range(size)]

    def loss(model, rank, turn):
        if turn == 3 and rank == 0:  # no embedding on this rank
            return model(None, "a").square().sum()
        return model(numbers[rank], "a" if rank == 0 and turn else "b").square().sum()

    for turn in range(5):
        alone.zero_grad(set_to_none)
        optimizer.zero_grad(set_to_none)
        sum(loss(expected, rank, turn) / size for rank in range(size)).backward()
        loss(model, world().rank, turn).backward()
        for (name, found), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
            assert (found.grad is None) == (wanted.grad is None), (turn, name)
            if wanted.grad is not None:
                assert found.grad.is_sparse == wanted.grad.is_sparse or size > 1, (turn, name)
        alone.step()
        optimizer.step()
    assert_alike(model, expected)
    assert torch.equal(model.unused.weight, start["unused.weight"])


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense):
    model, expected = Branches(True), Branches(True)
    optimizer = mpidist.torch.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), sparse_as_dense=as_dense
    )
    alone = torch.optim.SGD(expected.parameters(), lr=0.1)
    size = world().size
    for turn in range(4):
        numbers = [torch.arange(turn + rank, turn + rank + 6).reshape(3, 2) % 11 for rank in range(size)]
        for each in (alone, optimizer):
            each.zero_grad()
        expected(torch.cat(numbers), "a").square().mean().backward()
        model(numbers[world().rank], "a").square().mean().backward()
        assert model.table.weight.grad.is_sparse != as_dense
        for each in (alone, optimizer):
            each.step()
    assert_alike(model, expected)


def test_a_gradient_that_is_sparse_on_one_rank_and_dense_on_another():
    table = torch.nn.Embedding(5, 2).double()
    torch.nn.init.ones_(table.weight)
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), op="sum")
    for _ in range(2):
        optimizer.zero_grad()
        if world().rank == 0:
            torch.nn.functional.embedding(torch.tensor([1, 1]), table.weight, sparse=True).sum().backward()
        else:
            table.weight.sum().backward()
        expected = torch.full((5, 2), float(world().size - 1), dtype=torch.float64)
        expected[1] += 2
        assert torch.equal(table.weight.grad.to_dense(), expected)
        optimizer.step()


@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_short_floats_are_summed_in_long_ones_and_rounded_once(dtype, unit):
    size, rank = world().size, world().rank
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=dtype))
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), op="sum")
    (parameter * (1.0 if rank == 0 else unit)).sum().backward()
    # added one by one in 16 bits each half unit in the last place would be lost
    wanted = torch.tensor(1 + (size - 1) * unit, dtype=torch.float32).to(dtype)
    assert parameter.grad.dtype is dtype and bool((parameter.grad == wanted).all())
    optimizer.step()
    assert bool((parameter == -wanted).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_short_floats_stay_alike_on_all_ranks(dtype):
    model = tanh_model(dtype=torch.float32).to(dtype)
    expected = trained_alone(model, OPTIMIZERS["sgd"], batches(3, 12, dtype))
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    for batch in batches(3, 12, dtype):
        step(model, optimizer, batch, "uneven")
    assert_same_bits(*model.parameters())
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        numpy.testing.assert_allclose(found.detach().float(), wanted.detach().float(), rtol=0.05, atol=0.02)


def test_a_grad_scaler_skips_the_same_steps_on_all_ranks():
    """One rank's gradient is infinite: no rank makes the step, and all halve the scale."""
    model = tanh_model(dtype=torch.float32)
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    expected = trained_alone(model, OPTIMIZERS["sgd"], batches(2, 12, torch.float32))
    for number, batch in enumerate([batches(1, 12, torch.float32)[0], *batches(2, 12, torch.float32)]):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        if number == 0 and world().rank == world().size - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512.0
    assert_alike(model, expected, 2e-6)


@pytest.mark.parametrize("is_unscaled", [True, False])
def test_clipping_with_a_grad_scaler(is_unscaled):
    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    model = tanh_model(dtype=torch.float32)
    expected = trained_alone(model, OPTIMIZERS["sgd"], batches(3, 12, torch.float32), before_step=clip)
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for batch in batches(3, 12, torch.float32):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        scaler.unscale_(optimizer)
        clip(model)
        scaler.step(optimizer)
        scaler.update()
    assert_alike(model, expected, 2e-6)


def test_a_closure_is_called_with_reduced_gradients_and_gives_the_loss_of_all():
    """LBFGS looks at the loss: where it differed, ranks would take other steps."""

    def made(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    x, y = rows(12)
    model, expected = tanh_model(), tanh_model()
    alone, optimizer = made(expected.parameters()), mpidist.torch.DistributedOptimizer(made(model.parameters()))
    mine = part((x, y), "even")

    def closure(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        wanted = alone.step(lambda: closure(expected, alone, x, y))
        found = optimizer.step(lambda: closure(model, optimizer, *mine))
        assert float(found) == pytest.approx(wanted.item(), rel=1e-9)
    assert_alike(model, expected, 1e-8)


@pytest.mark.parametrize("is_frozen_first", [False, True])
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_a_step_does_nothing_while_all_parameters_are_frozen(op, is_frozen_first):
    """As in one process; what is thawed again is trained again."""
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["adam"], [rows(12), rows(12, seed=4)][is_frozen_first:])
    model.requires_grad_(not is_frozen_first)
    made = OPTIMIZERS["adam"](model.parameters())
    optimizer = mpidist.torch.DistributedOptimizer(made, model.named_parameters(), op=op)
    turns = [] if is_frozen_first else [rows(12)]
    for batch in turns:
        train(model, optimizer, batch, op)
    model.requires_grad_(False)
    for _ in range(2):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        optimizer.step()
        assert_alike(model, before, 0)
    model.requires_grad_(True)
    train(model, optimizer, rows(12, seed=4), op)
    assert_alike(model, expected)


def train(model, optimizer, batch, op):
    """Make a step by this rank's rows of a batch."""
    x, y = part(batch, "even")
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y, reduction="sum")
    (loss / (len(batch[0]) if op == "sum" else len(x))).backward()
    optimizer.step()


def test_parameters_that_are_added_frozen_and_thawed():
    first, second = tanh_model(), tanh_model(seed=5)
    expected = copy.deepcopy([first, second])
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD(first.parameters(), lr=0.1))
    alone = torch.optim.SGD(expected[0].parameters(), lr=0.1)

    def turn(models, optimizer, batch):
        x, y = batch
        optimizer.zero_grad()
        cross_entropy(models[0](x) + models[1](x), y).backward()
        optimizer.step()

    def both(batch):
        turn(expected, alone, batch)
        turn([first, second], optimizer, part(batch, "even"))

    both(rows(12))
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.2})
    alone.add_param_group({"params": expected[1].parameters(), "lr": 0.2})
    both(rows(12, seed=2))
    for model in (first, expected[0]):
        model[0].weight.requires_grad_(False)
        model[0].weight.grad = None
    both(rows(12, seed=3))
    for model in (first, expected[0]):
        model[0].weight.requires_grad_(True)
    both(rows(12, seed=4))
    assert_alike(torch.nn.ModuleList([first, second]), torch.nn.ModuleList(expected))


@pytest.mark.parametrize("kind", ["zeroed", "replaced", "flat", "channels_last"])
def test_gradients_that_lie_elsewhere_than_before(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 5, 3, padding=1), torch.nn.Tanh(), torch.nn.Flatten(1)).double()
    if kind == "channels_last":
        model = model.to(memory_format=torch.channels_last)
    expected = copy.deepcopy(model)
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    alone = torch.optim.SGD(expected.parameters(), lr=0.1)
    for turn in range(3):
        x = torch.randn(6, 4, 3, 3, generator=torch.Generator().manual_seed(turn), dtype=torch.float64)
        if kind == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        for each in (alone, optimizer):
            each.zero_grad(set_to_none=kind != "zeroed")
        if kind == "replaced":
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        if kind == "flat":  # all gradients are views of one tensor, backwards
            flat, at = torch.zeros(sum(each.numel() for each in model.parameters()), dtype=torch.float64), 0
            for parameter in reversed(list(model.parameters())):
                parameter.grad = flat[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
        expected(x).square().mean().backward()
        (mine,) = part((x,), "even")
        model(mine).square().mean().backward()
        for each in (alone, optimizer):
            each.step()
    assert_alike(model, expected)


@pytest.mark.parametrize("way", [mpidist.torch.DistributedOptimizer, mpidist.torch.DistributedDataParallel])
@pytest.mark.parametrize("first, then", [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_a_model_that_is_cast(way, first, then):
    """As a whole, or one layer of it: the parameters stay the same objects."""
    model = tanh_model(dtype=first)
    expected = copy.deepcopy(model)
    optimizer, alone = (OPTIMIZERS["sgd"](each.parameters()) for each in (model, expected))
    owner = way(optimizer) if way is mpidist.torch.DistributedOptimizer else way(model)
    for count, number in enumerate([0, 0, 2, 1, 1]):
        for each in (model, expected):
            each[:number].to(then)
            each.zero_grad()
        batch = rows(12, seed=count)
        for each, stepper, (x, y) in ((model, optimizer, part(batch, "even")), (expected, alone, batch)):
            cross_entropy(each[2](each[:2](x.to(each[0].weight.dtype)).to(each[2].weight.dtype)), y).backward()
            stepper.step()
    assert_alike(model, expected, 2e-6)
    del owner


def test_weights_that_layers_share():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(COLUMNS, COLUMNS), torch.nn.Tanh(), torch.nn.Linear(COLUMNS, COLUMNS))
    model[2].weight = model[0].weight
    model.double()
    expected = trained_alone(model, OPTIMIZERS["adam"], batches(4, 12))
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()), model.named_parameters())
    for batch in batches(4, 12):
        step(model, optimizer, batch, "uneven")
    assert model[2].weight is model[0].weight
    assert_alike(model, expected)


def test_complex_parameters():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.complex128))
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.5), op="sum")
    ((parameter * (1 + world().rank)).abs() ** 2).sum().backward()
    total = sum((1 + rank) ** 2 for rank in range(world().size))
    assert parameter.grad.tolist() == [2 * total] * 3
    optimizer.step()
    assert parameter.tolist() == [1 - total] * 3


def test_a_checkpoint_is_a_plain_file_of_the_bare_model(tmp_path):
    model = tanh_model()
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["adam"](model.parameters()))
    step(model, optimizer, rows(12))
    path = tmp_path / "model.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    found = torch.load(path, weights_only=True)
    other = tanh_model(seed=9)
    alone = OPTIMIZERS["adam"](other.parameters())
    other.load_state_dict(found["model"])
    alone.load_state_dict(found["optimizer"])
    assert_alike(other, model)
    resumed = mpidist.torch.DistributedOptimizer(alone)
    for batch in batches(2, 12):
        step(model, optimizer, batch)
        step(other, resumed, batch)
    assert_alike(other, model, 0)


def test_each_strategy_distributes_a_model_and_its_optimizer():
    for strategy in (mpidist.MultiWorkerMirroredStrategy(), mpidist.MirroredStrategy()):
        model = tanh_model()
        expected = trained_alone(model, OPTIMIZERS["adam"], batches(3, 12))
        if strategy.extended.replica_id:
            torch.nn.init.zeros_(model[0].weight)
        given, plain = model, OPTIMIZERS["adam"](model.parameters())
        model, optimizer = strategy.distribute(model, plain)
        assert model is given and optimizer is plain

        def train_step(x, y, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            losses = cross_entropy(model(x), y, reduction="none")
            mpidist.torch.compute_average_loss(losses, global_batch_size=12).backward()
            optimizer.step()

        for batch in batches(3, 12):
            strategy.run(train_step, args=part(batch, "uneven"))
        assert_alike(model, expected)


def test_a_strategy_that_reduces_in_its_own_way():
    class Counted(mpidist.ReductionToOneDevice):
        def _reduce_all(self, *args):
            self.calls = getattr(self, "calls", 0) + 1
            return super()._reduce_all(*args)

    ops = Counted()
    strategy = mpidist.MirroredStrategy(cross_device_ops=ops)
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["adam"], batches(3, 12))
    model, optimizer = strategy.distribute(model, OPTIMIZERS["adam"](model.parameters()), op="mean")
    for batch in batches(3, 12):
        step(model, optimizer, batch, weight=False)
    assert_alike(model, expected)
    assert world().size == 1 or ops.calls == 3


@pytest.mark.mpi(min_size=2)
def test_an_error_on_one_rank_reaches_the_others_and_all_can_go_on():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    model, optimizer = strategy.distribute(tanh := tanh_model(), OPTIMIZERS["sgd"](tanh.parameters()), op="mean")

    def train_step(x, y, is_broken):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        if is_broken:
            model[0].weight.register_hook(broken)
        loss.backward()
        optimizer.step()

    def broken(gradient):
        raise KeyError("in the middle of the backward pass")

    expected = copy.deepcopy(model)
    is_broken = world().rank == 1
    with pytest.raises(KeyError if is_broken else mpidist.errors.RemoteReplicaError, match="middle of the backward"):
        strategy.run(train_step, args=(*part(rows(12), "even"), is_broken))
    if is_broken:
        model[0].weight._backward_hooks.clear()
    expected = trained_alone(expected, OPTIMIZERS["sgd"], batches(2, 12))
    for batch in batches(2, 12):
        strategy.run(train_step, args=(*part(batch, "even"), False))
    assert_alike(model, expected)


class Halved(mpidist.compression.Compression):
    """Sends float32, whatever the gradients are."""

    def code_bytes(self, elements, dtype):
        return 4 * elements

    def encode(self, values, code):
        code.view("f4")[...] = values

    def decode(self, code, values):
        values[...] = code.view("f4")


@pytest.mark.parametrize("stage, tolerance", [
    (mpidist.torch.Compression.fp16, 2e-3),
    (mpidist.compression.BFloat16(), 2e-2),
    (mpidist.compression.TopK(1.0), 1e-12),
    (Halved(), 1e-6),
    (mpidist.torch.Compression.none, 1e-12),
])  # fmt: skip
def test_gradients_that_are_compressed_on_the_wire(stage, tolerance):
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["sgd"], batches(5, 12))
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), compression=stage)
    for batch in batches(5, 12):
        step(model, optimizer, batch, "uneven")
    assert_alike(model, expected, tolerance)


def test_gradients_that_some_ranks_do_not_have_compressed():
    a, b, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = torch.optim.SGD([a, b, unused], lr=1.0)
    optimizer = mpidist.torch.DistributedOptimizer(optimizer, compression=mpidist.torch.Compression.fp16)
    ((a if world().rank == 0 else b) * 2.0 * world().size).sum().backward()
    assert a.grad.tolist() == [2.0] * 3 and unused.grad is None
    assert b.grad is None if world().size == 1 else b.grad.tolist() == [2.0 * (world().size - 1)] * 3


@pytest.mark.parametrize("op", ["mean", "sum"])
def test_what_waits_of_a_gradient_that_no_rank_has_goes_on_waiting(op):
    """One value in two is sent: that of `b`, then that of `a`, which nobody has now, and when it has one again."""
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    stage = mpidist.compression.TopK(0.5)
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD([a, b], lr=1.0), compression=stage, op=op)
    for turn, (of_a, of_b) in enumerate([(1.0, 4.0), (None, 0.25), (0.0, 0.0), (0.0, 0.0)]):
        optimizer.zero_grad()
        (b * of_b if of_a is None else a * of_a + b * of_b).sum().backward()
        assert (a.grad is None) == (turn == 1)
        optimizer.step()
    divisor = world().size if op == "mean" else 1
    assert [a.item(), b.item()] == pytest.approx([-1.0 * world().size / divisor, -4.25 * world().size / divisor])


def test_what_waits_of_a_gradient_goes_on_waiting_while_parameters_are_frozen():
    a, b, c = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizer = torch.optim.SGD([a, b, c], lr=1.0)
    optimizer = mpidist.torch.DistributedOptimizer(optimizer, compression=mpidist.compression.TopK(0.3))

    def step(of_a, of_b, of_c):
        optimizer.zero_grad()
        (a * of_a + b * of_b + c * of_c).sum().backward()
        optimizer.step()

    step(1.0, 2.0, 4.0)  # one value is sent: that of `c`
    b.requires_grad_(False)
    c.requires_grad_(False)
    step(0.0, 0.0, 0.0)
    assert [each.item() for each in (a, b, c)] == pytest.approx([-1.0, 0.0 if world().size > 1 else -2.0, -4.0])
    b.requires_grad_(True)
    step(0.0, 0.0, 0.0)
    assert [each.item() for each in (a, b, c)] == pytest.approx([-1.0, -2.0, -4.0])


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind, named", [("shape", "0.weight"), ("number", "2.weight"), ("frozen", "0.bias")])
def test_models_that_differ_between_ranks(kind, named):
    model = tanh_model()
    if world().rank == 1:
        if kind == "shape":
            model[0] = torch.nn.Linear(COLUMNS, 16).double()
        elif kind == "number":
            model = torch.nn.Sequential(model[0])
        else:
            model[0].bias.requires_grad_(False)
    with pytest.raises(CollectiveMismatchError, match="rank 1") as caught:
        mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
    assert named in str(caught.value)
    world().barrier()


@pytest.mark.mpi(min_size=2)
def test_a_layer_that_is_frozen_later_on_one_rank():
    model = tanh_model()
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
    step(model, optimizer, rows(12))
    if world().rank == 1:
        model[0].bias.requires_grad_(False)
    with pytest.raises(CollectiveMismatchError, match=r"0\.bias"):
        step(model, optimizer, rows(12))
    world().barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", [mpidist.torch.DistributedOptimizer, mpidist.torch.DistributedDataParallel])
def test_a_model_that_is_frozen_on_one_rank(way):
    """Its step does nothing in one process; here the others would wait for it."""
    model = tanh_model()
    if way is mpidist.torch.DistributedDataParallel:
        owner = way(model)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
    else:
        owner = optimizer = way(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
    step(model, optimizer, rows(12), weight=False)
    if world().rank == 1:
        model.requires_grad_(False)
    with pytest.raises(CollectiveMismatchError, match=r"rank 1(.|\n)*0\.weight|0\.weight(.|\n)*rank 1"):
        if world().rank == 1:
            optimizer.step()
        else:
            step(model, optimizer, rows(12), weight=False)
    world().barrier()
    del owner


@pytest.mark.mpi(min_size=2)
def test_a_loader_of_another_length_on_one_rank():
    model = tanh_model()
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), model.named_parameters())
    with pytest.raises(CollectiveMismatchError, match="all_reduce.* in place.*barrier|barrier.*all_reduce.* in place"):
        for batch in batches(2 if world().rank == 1 else 3, 12):
            step(model, optimizer, batch, weight=False)
        world().barrier()  # what comes behind the loop
    world().barrier()


def test_arguments_that_there_are_not():
    """The optimizer stays as it was, and reduces nothing."""
    optimizer = OPTIMIZERS["sgd"](tanh_model().parameters())
    with pytest.raises(TypeError, match="DistributedOptimizer: got an unexpected keyword argument 'bucket_cap_mb'"):
        mpidist.torch.DistributedOptimizer(optimizer, bucket_cap_mb=25)
    with pytest.raises(TypeError, match="DistributedOptimizer: too many positional arguments"):
        mpidist.torch.DistributedOptimizer(optimizer, *[None] * 12)
    assert type(optimizer) is torch.optim.SGD
    mpidist.torch.DistributedOptimizer(optimizer)


def test_what_is_no_optimizer():
    model = tanh_model()
    with pytest.raises(TypeError, match=r"takes a torch.optim.Optimizer, got a Sequential"):
        mpidist.torch.DistributedOptimizer(model)
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    with pytest.raises(ValueError, match="a DistributedOptimizer already"):
        mpidist.torch.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match=r"'parameter 0 of group 0' is reduced by DistributedOptimizer\(SGD\) already"):
        mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    del optimizer
    again = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))  # the other one was dropped
    step(model, again, rows(12))


@pytest.mark.parametrize("change, message", [
    (lambda named: [*named, named[0]], "has 0.bias more than once|has 0.weight more than once"),
    (lambda named: named[1:], "no name for 1 of the optimizer's parameters, of shapes"),
    (lambda named: [parameter for _, parameter in named], "takes pairs of a name and a parameter"),
])  # fmt: skip
def test_names_that_do_not_fit(change, message):
    model = tanh_model()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    with pytest.raises(ValueError, match=message):
        mpidist.torch.DistributedOptimizer(optimizer, change(list(model.named_parameters())))
    assert type(optimizer) is torch.optim.SGD
    mpidist.torch.DistributedOptimizer(optimizer)  # nothing was left behind


@pytest.mark.parametrize("arguments, error, message", [
    ({"op": "max"}, ValueError, "by the ReduceOp SUM or MEAN, got MAX"),
    ({"op": "median"}, ValueError, "'median' is not a valid ReduceOp"),
    ({"compression": "fp16"}, TypeError, "compression='fp16': pass None, or a stage"),
    ({"backward_passes_per_step": 0}, ValueError, "backward_passes_per_step=0"),
    ({"overlap": "threads"}, ValueError, "overlap='threads': it is one of 'auto', 'none'"),
    ({"staging": "device"}, ValueError, "staging='device'"),
])  # fmt: skip
def test_arguments_that_do_not_fit(arguments, error, message):
    with pytest.raises(error, match=message):
        mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](tanh_model().parameters()), **arguments)


def test_tensors_of_a_device_are_refused_unless_staging_is_asked_for(monkeypatch):
    """There is no GPU here: what PyTorch says of the device is put in its place."""
    import mpidist.frameworks.torch.tensors as tensors

    monkeypatch.setattr(tensors, "is_on_host", lambda tensor: tensor.numel() == 3)
    model = tanh_model()
    expected = trained_alone(model, OPTIMIZERS["sgd"], batches(2, 12))
    with pytest.raises(NotImplementedError, match="no path for tensors of such a device.*staging='host'"):
        mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    optimizer = mpidist.torch.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()), staging="host")
    for batch in batches(2, 12):
        step(model, optimizer, batch)
    assert_alike(model, expected)


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, which tells PyTorch's class nothing."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_that_does_not_call_pytorch_s_init():
    model = tanh_model()
    plain = OPTIMIZERS["sgd"](model.parameters())
    wrapper = Wrapper(plain)
    with pytest.raises(TypeError, match=r"Wrapper.__init__ does not call .*Wrapper\(DistributedOptimizer\(inner\)\)"):
        mpidist.torch.DistributedOptimizer(wrapper)
    assert type(wrapper) is Wrapper
    expected = trained_alone(model, OPTIMIZERS["sgd"], batches(2, 12))
    wrapper = Wrapper(mpidist.torch.DistributedOptimizer(plain))
    for batch in batches(2, 12):
        x, y = part(batch, "even")
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        wrapper.step()
    assert_alike(model, expected)
