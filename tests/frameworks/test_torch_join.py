"""Replicas that run out of rows before others, and PyTorch's own class with mpidist's hook."""

from __future__ import annotations

import copy
import os
import random
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")

import mpidist.torch  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    CLEARED,
    assert_alike,
    assert_same_bits,
    batches,
    cross_entropy,
    last,
    momentum,
    one_row_model,
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


@pytest.mark.parametrize("clears", CLEARED.values(), ids=CLEARED)
@pytest.mark.parametrize("make", [tanh_model, one_row_model])
def test_those_with_rows_set_gradients_to_zero_in_any_way(make, clears):
    """Rank r has r + 1 batches; what was reduced is no part of the next pass."""
    size, rank = world().size, world().rank
    bare = make()
    expected = copy.deepcopy(bare)
    alone = sgd(expected.parameters())
    for turn in range(size):
        alone.zero_grad()
        for each in range(turn, size):
            x, y = rows(6, seed=10 * each + turn)
            (cross_entropy(expected(x), y) / size).backward()
        alone.step()
    model = mpidist.torch.DistributedDataParallel(bare)
    optimizer = sgd(model.parameters())
    with model.join():
        for turn in range(rank + 1):
            if turn:
                clears(model)
            x, y = rows(6, seed=10 * rank + turn)
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
            model.zero_grad()
            model(rows(6, seed=turn + 10 * rank)[0]).sum().backward()
    if last == 0 or size == 1:
        torch.testing.assert_close(bare.running_mean, alone.running_mean, rtol=1e-13, atol=0)
    assert_same_bits(bare.running_mean, bare.running_var)


def own_gradients(model, each, turn):
    """Put rank `each`'s own gradients in place of what the parameters have."""
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.01 * (number + 1) * (each + 1) + 0.001 * turn)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("is_asked", [False, True])
def test_own_gradients_behind_the_block(order, is_asked):
    """Those that ran out before others have made no step since gradients were reduced, and reduce all the same."""
    size, rank = world().size, world().rank
    bare = tanh_model()
    model = mpidist.torch.DistributedDataParallel(bare)
    optimizer = sgd(model.parameters())
    with model.join():
        for turn in range([each + 1 for each in range(size)][::order][rank]):
            x, y = rows(6, seed=10 * rank + turn)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
    expected = copy.deepcopy(bare)
    own_gradients(model, rank, 0)
    if is_asked:
        model.synchronize()
    optimizer.step()
    own_gradients(expected, (size - 1) / 2, 0)  # what is linear in the rank has this mean
    sgd(expected.parameters()).step()
    assert_alike(bare, expected)


@pytest.mark.parametrize("is_none", [False, True])
def test_gradients_set_to_zero_at_the_end_of_each_step(is_none):
    """Those that ran out before begin the next pass without what was reduced, as others do; momentum needs zeros."""
    size, rank = world().size, world().rank
    bare = tanh_model()
    bare.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    model = mpidist.torch.DistributedDataParallel(bare)
    optimizer = momentum(model.parameters())
    own_gradients(model, 0, 0)
    optimizer.step()  # the parameter without a pass has momentum
    optimizer.zero_grad(is_none)

    def step(seed):
        cross_entropy(model.module[:3](rows(6, seed=seed)[0]), rows(6, seed=seed)[1]).backward()
        optimizer.step()
        optimizer.zero_grad(is_none)

    with model.join():
        for turn in range(rank + 1):
            step(10 * rank + turn)
    expected = copy.deepcopy(bare)
    alone = momentum(expected.parameters())
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter in expected.parameters():
        parameter.grad = None if is_none else torch.zeros_like(parameter)
    for each in range(size):
        x, y = rows(6, seed=100 + each)
        (cross_entropy(expected(x), y) / size).backward()
    alone.step()
    step(100 + rank)
    assert_alike(bare, expected)


def drawn(draw, may_add):
    """Return what ranks do in a turn, of which the gradients have one meaning; passes may add to them."""
    kind = draw.choice(["pass", "pass", "passes", "own", "again"])
    if kind in ("own", "again"):
        return kind, "none" if kind == "own" else "kept", None, draw.choice(["none", "zeros", "kept"])
    scale = draw.choice([None, None, "in place", "anew"])
    # nobody adds to gradients that were changed, nor steps with them again
    end = draw.choice(["none", "zeros", "kept"][: 3 if scale is None else 2])
    return kind, draw.choice(["none", "zeros", "kept"][: 3 if may_add else 2]), scale, end


def turned(turn, optimizer, model, give):
    """Make a turn: gradients, which `give` gives, and a step."""
    kind, zeros, scale, end = turn
    if zeros != "kept":
        optimizer.zero_grad(zeros == "none")
    if kind != "again":
        give(kind)
    for each in model.parameters():
        if each.grad is not None and scale == "in place":
            each.grad.mul_(0.5)
        elif each.grad is not None and scale == "anew":
            each.grad = each.grad * 0.5
    optimizer.step()
    if end != "kept":
        optimizer.zero_grad(end == "none")


@pytest.mark.parametrize("seed", range(12))
def test_random_trainings(seed):
    """Blocks in which ranks run out, and passes behind them: gradients of any kind, scaled, set to zero or not."""
    size, rank, draw = world().size, world().rank, random.Random(seed)
    bare = tanh_model()
    expected = copy.deepcopy(bare)
    alone = momentum(expected.parameters())
    model = mpidist.torch.DistributedDataParallel(bare, check_every=1)
    optimizer = momentum(model.parameters())
    for block in range(6):
        by_all, is_uneven = draw.random() < 0.6, block % 2 == 1
        counts = [draw.randint(0, 3) if is_uneven else 1 for _ in range(size)]
        turns = [drawn(draw, not (by_all and is_uneven)) for _ in range(max(counts))]
        if block == 0:
            turns[0] = "pass", "none", None, "kept"
        with model.join(divide_by_initial_world_size=by_all) if is_uneven else nullcontext():
            for number, turn in enumerate(turns):
                having = [each for each in range(size) if counts[each] > number]
                parts = size if by_all or not is_uneven else len(having)

                def give_all(kind, seed=10 * block + number, having=having, parts=parts):
                    if kind == "own":
                        own_gradients(expected, sum(having) / len(having), seed)
                        for each in expected.parameters():
                            each.grad *= len(having) / parts
                        return
                    for each in having:
                        for again in range(1 if kind == "pass" else 2):
                            x, y = rows(5, seed=1000 * each + 100 * again + seed)
                            (cross_entropy(expected(x), y) / parts).backward()

                def give_own(kind, seed=10 * block + number):
                    if kind == "own":
                        own_gradients(model, rank, seed)
                        return
                    for again in range(1 if kind == "pass" else 2):
                        x, y = rows(5, seed=1000 * rank + 100 * again + seed)
                        with model.no_sync() if (kind, again) == ("passes", 0) else nullcontext():
                            cross_entropy(model(x), y).backward()

                turned(turn, alone, expected, give_all)
                if number < counts[rank]:
                    turned(turn, optimizer, model, give_own)
        assert_alike(bare, expected, 1e-11)


@pytest.mark.parametrize("compression", [None, mpidist.compression.Float16()])
@pytest.mark.parametrize("is_in_place", [True, False])
def test_gradients_that_were_changed_when_the_block_ends(is_in_place, compression):
    """All replicas have them, also values that the compression would round, and a step takes them as they are."""
    bare = tanh_model()
    model = mpidist.torch.DistributedDataParallel(bare, compression=compression)
    optimizer = sgd(model.parameters())
    with model.join():
        for turn in range(world().rank + 1):
            x, y = rows(6, seed=turn)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            for each in model.parameters():
                if is_in_place:
                    each.grad.copy_(torch.full_like(each, 1 + 2.0**-30 * (turn + 1)))
                else:
                    each.grad = torch.full_like(each, 1 + 2.0**-30 * (turn + 1))
    expected = copy.deepcopy(bare)
    with torch.no_grad():
        for each in expected.parameters():
            each -= 0.1 * (1 + 2.0**-30 * world().size)
    optimizer.step()
    assert_alike(bare, expected, 1e-15)


@pytest.mark.mpi(min_size=3)
def test_gradients_changed_in_place_on_some_ranks_when_the_block_ends():
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    with pytest.raises(RuntimeError, match=r"changed in place since they were reduced.*rank 0 of \d had run out"):
        with model.join():
            for turn in range(1 if world().rank == 0 else 2):
                x, y = rows(6, seed=turn)
                model.zero_grad()
                cross_entropy(model(x), y).backward()
            model.module[0].bias.grad.mul_(world().rank + 2)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("end", ["none", "zeros", "scaled"])
def test_gradients_of_frozen_parameters_behind_the_block(end):
    """An optimizer with momentum moves them, too, unless they are None; rank 0 runs out at once."""
    bare = tanh_model()
    model = mpidist.torch.DistributedDataParallel(bare)
    optimizer = momentum(model.parameters())
    x, y = rows(6)
    cross_entropy(model(x), y).backward()
    optimizer.step()
    bare[0].weight.requires_grad_(False)
    expected = copy.deepcopy(bare)
    for each, other in zip(expected.parameters(), bare.parameters(), strict=True):
        each.grad = other.grad.clone()
    alone = momentum(expected.parameters())
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def step(model, optimizer, x, y, part=1):
        for each in model.parameters():
            if end == "scaled" and each.requires_grad:
                each.grad = None
            elif end == "scaled":
                each.grad.mul_(0.5)
        if end != "scaled":
            optimizer.zero_grad(end == "none")
        (cross_entropy(model(x), y) * part).backward()
        optimizer.step()

    with model.join():
        for _ in range(world().rank > 0):
            step(model, optimizer, x, y)
    step(expected, alone, x, y, (world().size - 1) / world().size)
    optimizer.step()
    alone.step()
    assert_alike(bare, expected)


def kept(model):
    pass


def scaled_in_part(model):
    with torch.no_grad():
        model.module[2].weight.grad.mul_(0.5)


def scaled_unseen(model):
    for each in model.parameters():
        each.grad.data.mul_(0.5)


def scaled_anew(model):
    for each in model.parameters():
        each.grad = each.grad * 0.5


def all_but_the_last_cleared(model):
    for each in model.parameters():
        if each is not model.module[-1].weight:
            each.grad = None


def all_but_the_last_set_to_zero(model):
    for each in model.parameters():
        if each is not model.module[-1].weight:
            each.grad.zero_()


def scaled_and_half_cleared(model):
    for each in model.parameters():
        each.grad.mul_(0.5)
    model.module[0].zero_grad()


def one_scaled_and_others_set_to_zero(model):
    all_but_the_last_set_to_zero(model)
    model.module[-1].weight.grad.mul_(0.5)


def all_but_the_last_cleared_unseen(model):
    for each in model.parameters():
        if each is not model.module[-1].weight:
            each.grad.data.zero_()


CHANGES = [
    kept,
    scaled_in_part,
    scaled_unseen,
    scaled_anew,
    all_but_the_last_cleared,
    all_but_the_last_set_to_zero,
    all_but_the_last_cleared_unseen,
    one_scaled_and_others_set_to_zero,
    scaled_and_half_cleared,
]


def small_model():
    """The last parameter, which has the first gradient of a pass, is the only one of its layer."""
    torch.manual_seed(5)
    layers = torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3), torch.nn.Linear(3, 3, bias=False)
    return torch.nn.Sequential(*layers).double()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("before", ["nothing", "pass", "change"])
@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_passes_that_add_to_reduced_gradients(change, by_all, before):
    """Rank 0 runs out before; a mean of those with rows needs its gradients not, and one over all is an error.

    The others' are c + n, of what was reduced, and what they have changed, and each one's own new ones.  What was
    reduced, or that and the change, may be from before the block.
    """
    size, rank = world().size, world().rank
    bare = small_model()
    model = mpidist.torch.DistributedDataParallel(bare)
    wanted = mpidist.torch.DistributedDataParallel(copy.deepcopy(bare))

    def turn(number):
        if number and before != "change":
            change(model)
        x, y = rows(6, seed=10 * rank + number)
        cross_entropy(model(x), y).backward()

    if before != "nothing":
        turn(0)
    if before == "change":
        change(model)
    others = ", ".join(map(str, range(1, size)))
    refused = pytest.raises(RuntimeError, match=rf"rank {others} of {size} reduces gradients again.*rank 0 had run out")
    with refused if by_all else nullcontext():
        with model.join(divide_by_initial_world_size=by_all):
            for number in range(before != "nothing", 1 if rank == 0 else 2):
                turn(number)
    if by_all:
        return
    for number in range(2):
        if number:
            change(wanted)
        for each in range(number, size):
            x, y = rows(6, seed=10 * each + number)
            with wanted.no_sync():
                (cross_entropy(wanted(x), y) / (size - number)).backward()
    for found, expected in zip(bare.parameters(), wanted.module.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("keeps", [True, False])
def test_the_only_gradient_of_an_optimizer_is_kept(keeps):
    """It is changed in place as often as if it were set to zero; those of the other optimizer are None, and tell."""
    model = mpidist.torch.DistributedDataParallel(small_model())
    *others, only = model.parameters()
    optimizers = [momentum(others), momentum([only])]
    with pytest.raises(RuntimeError, match="reduces gradients again.*rank 0 had run out") if keeps else nullcontext():
        with model.join():
            for turn in range(1 if world().rank == 0 else 3):
                for each in optimizers[: 1 if keeps else 2]:
                    each.zero_grad(set_to_none=keeps)
                x, y = rows(6, seed=turn)
                cross_entropy(model(x), y).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters() if keeps else others, 1e9)
                for each in optimizers:
                    each.step()
    assert_same_bits(*model.parameters())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("end", ["changed", "cleared", "own"])
def test_a_second_step_with_gradients_that_were_reduced(end):
    """What is changed is perhaps the ranks' own; with an optimizer's own, or none, go those of the other."""
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    optimizers = [sgd(model.module[0].parameters()), sgd(model.module[2].parameters())]
    with pytest.raises(RuntimeError, match="reduces gradients again.*before a second step; rank 0 had run out"):
        with model.join():
            for turn in range(1 if world().rank == 0 else 2):
                x, y = rows(6, seed=turn)
                model.zero_grad()
                cross_entropy(model(x), y).backward()
                for each in optimizers:
                    each.step()
            if world().rank:
                if end == "changed":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                else:
                    optimizers[0].zero_grad()
                if end == "own":
                    own_gradients(model.module[0], world().rank, 0)
                optimizers[0].step()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("by_all", [True, False])
def test_passes_that_add_without_a_reduction_when_the_block_ends(by_all):
    """To gradients that they may have changed before, and rank 0 has as they were."""
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    with pytest.raises(RuntimeError, match=r"passes under no_sync\(\) have added to them.*rank 0 of \d had run out"):
        with model.join(divide_by_initial_world_size=by_all):
            for turn in range(1 if world().rank == 0 else 3):
                x, y = rows(6, seed=turn)
                with model.no_sync() if turn == 2 else nullcontext():
                    if turn == 1:
                        model.zero_grad()
                    cross_entropy(model(x), y).backward()


@pytest.mark.mpi(min_size=2)
def test_a_rank_runs_out_with_passes_that_were_not_reduced():
    """They do not count, and its gradients have them in."""
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    x, y = rows(6)
    with pytest.raises(RuntimeError, match="reduces gradients again.*rank 0 had run out"):
        with model.join():
            cross_entropy(model(x), y).backward()
            with model.no_sync() if world().rank == 0 else nullcontext():
                cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("by_all", [True, False])
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_closures_of_ranks_that_still_have_rows(line_search, by_all):
    """LBFGS looks at the loss, which those that ran out reduce, too."""
    size, rank = world().size, world().rank

    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=4, line_search_fn=line_search)

    bare = tanh_model()
    expected = copy.deepcopy(bare)
    model = mpidist.torch.DistributedDataParallel(bare)

    def turn(model, optimizer, ranks, number, part):
        def closure():
            optimizer.zero_grad()
            losses = [cross_entropy(model(x), y) for x, y in (rows(6, seed=10 * each + number) for each in ranks)]
            loss = sum(losses) * part
            loss.backward()
            return loss

        optimizer.step(closure)

    optimizer, alone = make(model.parameters()), make(expected.parameters())
    turn(model, optimizer, [rank], 9, 1)
    turn(expected, alone, range(size), 9, 1 / size)
    with model.join(divide_by_initial_world_size=by_all):
        for number in range(rank):
            turn(model, optimizer, [rank], number, 1)
    for number in range(size - 1):
        turn(expected, alone, range(number + 1, size), number, 1 / (size if by_all else size - 1 - number))
    assert_alike(bare, expected, 1e-8)
    turn(model, optimizer, [rank], 9, 1)
    turn(expected, alone, range(size), 9, 1 / size)
    assert_alike(bare, expected, 1e-7)


@pytest.mark.mpi(min_size=2)
def test_synchronized_statistics_need_rows_on_all_ranks():
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), mpidist.torch.SyncBatchNorm(3)).double()
    model = mpidist.torch.DistributedDataParallel(model, broadcast_buffers=False)
    cure = r"join\(\), where ranks that ran out make no SyncBatchNorm.*give all ranks as many batches"
    with pytest.raises(CollectiveMismatchError, match=cure):
        with model.join():
            for turn in range(1 if world().rank == 0 else 2):
                x, y = rows(6, seed=turn)
                model.zero_grad()
                cross_entropy(model(x), y).backward()


def test_a_block_inside_of_another():
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    other = mpidist.torch.DistributedDataParallel(tanh_model())
    for inner in (model, other):
        with pytest.raises(RuntimeError, match=r"join\(\) inside of join\(\).*Leave the first block before the second"):
            with model.join():
                with inner.join():
                    raise AssertionError
    with model.join(), other.join(enable=False):
        x, y = rows(4)
        cross_entropy(model(x), y).backward()
    with other.join():
        cross_entropy(other(x), y).backward()


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
