"""Whatever the backward passes before a step, and whoever makes them: a step takes the gradients of all ranks.

Each test is made with a `DistributedOptimizer` and a `DistributedDataParallel` that give means, and with what a
strategy makes of an optimizer and of a module, which are the same two with sums.
"""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest

torch = pytest.importorskip("torch")

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook  # noqa: E402

import mpidist  # noqa: E402
import mpidist.torch  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from mpidist.frameworks.torch.steps import _before_steps  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    CLEARED,
    assert_alike,
    assert_same_bits,
    batches,
    cross_entropy,
    momentum,
    one_row_model,
    part,
    tanh_model,
    world,
)

pytestmark = pytest.mark.mpi

MEANS = ["optimizer mean", "module mean"]
SUMS = ["strategy", "strategy's module"]
WAYS = [*MEANS, *SUMS]
OPTIMIZERS = [way for way in WAYS if "module" not in way]


class Training:
    """A model and its optimizer, distributed in one of the ways; `factor` makes of a part of a sum one of a mean."""

    def __init__(self, way, bare, passes=1, make=None):
        make = make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01))
        self.bare, self.model, self.optimizer = bare, bare, make(bare.parameters())
        self.factor = world().size if "mean" in way else 1
        self.holder = self.optimizer
        op = "mean" if "mean" in way else "sum"
        self.is_module = "module" in way
        if way.startswith("optimizer"):
            mpidist.torch.DistributedOptimizer(self.optimizer, op=op, backward_passes_per_step=passes)
        elif way == "strategy":
            strategy = mpidist.MultiWorkerMirroredStrategy()
            strategy.distribute(bare, self.optimizer, backward_passes_per_step=passes)
        elif way == "strategy's module":
            self.model = self.holder = mpidist.MultiWorkerMirroredStrategy().distribute(bare)
        else:
            self.model = self.holder = mpidist.torch.DistributedDataParallel(bare, op=op)

    def backward(self, loss, is_last=True):
        """Make a pass; a module is told which is not the last one."""
        if self.is_module and not is_last:
            with self.model.no_sync():
                (loss * self.factor).backward()
        else:
            (loss * self.factor).backward()


def alone(bare):
    """Return a copy with its own optimizer, for one process."""
    model = copy.deepcopy(bare)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def step_alone(model, optimizer, batch):
    optimizer.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def micro(batch, count, kind="even"):
    """Return this rank's rows of each micro-batch of a batch."""
    x, y = batch
    return [part((x[number::count], y[number::count]), kind) for number in range(count)]


# -- gradients that some ranks do not have ----------------------------------------------------------------------------


class Experts(torch.nn.Module):
    """Each row goes to one expert, so that a rank may reach some of them only."""

    def __init__(self, count=3):
        super().__init__()
        torch.manual_seed(2)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(count))
        self.table = torch.nn.Embedding(5, 4)
        self.double()

    def forward(self, x, expert):
        return self.experts[expert](torch.tanh(x @ self.table.weight[:4]))


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_experts_that_are_reached_on_some_ranks_only(way, set_to_none):
    """Every parameter has a gradient on some rank, and each rank lacks some."""
    size, rank = world().size, world().rank
    training = Training(way, Experts(max(size, 2)))
    expected, optimizer = alone(training.bare)
    x = torch.arange(8 * size, dtype=torch.float64).reshape(size, 2, 4) / 9
    for turn in range(4):
        for each in (training.optimizer, optimizer):
            each.zero_grad(set_to_none)
        chosen = [(other + turn) % max(size, 2) for other in range(size)]
        sum(expected(x[other], chosen[other]).square().sum() for other in range(size)).backward()
        training.backward(training.model(x[rank], chosen[rank]).square().sum())
        for (name, found), wanted in zip(training.bare.named_parameters(), expected.parameters(), strict=True):
            assert (found.grad is None) == (wanted.grad is None), (turn, name)
            assert found.grad is None or torch.allclose(found.grad, wanted.grad, rtol=1e-12, atol=1e-12), (turn, name)
        training.optimizer.step()
        optimizer.step()
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_without_rows_that_makes_no_backward_pass(way, clears):
    """All come to step(); the rank without rows may have left the gradients of the step before as they are."""
    training = Training(way, tanh_model())
    expected, optimizer = alone(training.bare)
    for turn, batch in enumerate(batches(5, 12)):
        x, y = part(batch, "empty" if turn % 2 else "even")
        if len(x) or clears:
            training.optimizer.zero_grad()
        if len(x):
            training.backward(cross_entropy(training.bare(x), y, reduction="sum") / 12)
        torch.nn.utils.clip_grad_norm_(training.bare.parameters(), 1e9)
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("way", MEANS)
def test_no_rows_and_no_pass_where_the_mean_is_weighted_by_rows(way):
    training = Training(way, tanh_model())
    expected, optimizer = alone(training.bare)
    for turn, batch in enumerate(batches(4, 12)):
        x, y = part(batch, "empty" if turn % 2 else "uneven")
        training.holder.rows = len(x)
        training.optimizer.zero_grad()
        if len(x):
            cross_entropy(training.bare(x), y).backward()
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


# -- other numbers of passes than were announced -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "announced, made, set_to_none", [(2, 1, True), (2, 3, False), (3, 4, True), (2, 4, False), (1, 3, True)]
)
@pytest.mark.parametrize("way", MEANS)
def test_any_number_of_passes_before_a_step(way, announced, made, set_to_none):
    training = Training(way, tanh_model(), announced)
    expected, optimizer = alone(training.bare)
    for batch in batches(3, 12 * made):
        training.optimizer.zero_grad(set_to_none)
        for number, (x, y) in enumerate(micro(batch, made)):
            is_last = (number + 1) % announced == 0  # as a loop has it that does not know of its own end
            training.backward(cross_entropy(training.model(x), y, reduction="sum") / (12 * made), is_last)
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("announced, made", [(3, 2), (4, 1)])
@pytest.mark.parametrize("way", SUMS)
def test_fewer_passes_than_were_announced_are_summed(way, announced, made):
    training = Training(way, tanh_model(), announced)
    expected, optimizer = alone(training.bare)
    for batch in batches(3, 12 * made):
        training.optimizer.zero_grad()
        for number, (x, y) in enumerate(micro(batch, made)):
            training.backward(
                cross_entropy(training.model(x), y, reduction="sum") / (12 * made), number + 1 == announced
            )
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("announced, made", [(1, 2), (2, 4), (3, 5)])
@pytest.mark.parametrize("way", SUMS)
def test_more_passes_than_were_announced_are_no_sum(way, announced, made):
    """An error on all ranks, and then all can go on."""
    training = Training(way, tanh_model(), announced)
    expected, optimizer = alone(training.bare)
    with pytest.raises(RuntimeError, match="added to gradients that were summed over the replicas already"):
        for number, (x, y) in enumerate(micro(batches(1, 12 * made)[0], made)):
            training.backward(cross_entropy(training.model(x), y), (number + 1) % announced == 0)
        training.optimizer.step()
    for batch in batches(2, 12 * announced):
        training.optimizer.zero_grad()
        for number, (x, y) in enumerate(micro(batch, announced)):
            is_last = number + 1 == announced
            training.backward(cross_entropy(training.model(x), y, reduction="sum") / (12 * announced), is_last)
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("is_held", [False, True], ids=["reduced before", "held before"])
@pytest.mark.parametrize("way", MEANS)
def test_a_pass_more_without_rows_on_any_rank_takes_nothing_away(way, is_held):
    """What was reduced stays, though nothing is weighted by nothing; and what was held, as its rows weigh."""
    training = Training(way, tanh_model())
    expected, optimizer = alone(training.bare)
    for batch in batches(2, 12):
        training.optimizer.zero_grad()
        for x, y in (part(batch, "uneven"), part((batch[0][:0], batch[1][:0]), "even")):
            training.holder.rows = len(x)
            loss = cross_entropy(training.model(x), y, reduction="sum").div(max(len(x), 1))
            held(training, loss) if is_held else loss.backward()
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("way", MEANS)
def test_rows_of_several_passes(way):
    """The second pass has fewer rows, of which each rank has the same part."""
    size, rank = world().size, world().rank
    training = Training(way, tanh_model(), 2)
    expected, optimizer = alone(training.bare)
    total = size * (size + 1) // 2
    for batch in batches(2, 3 * total):
        training.optimizer.zero_grad()
        for number, count in enumerate((2, 1)):  # times rank + 1
            start = number * 2 * total + count * rank * (rank + 1) // 2
            x, y = (each[start : start + count * (rank + 1)] for each in batch)
            training.holder.rows = len(x)
            loss = cross_entropy(training.model(x), y) * count / 3 / training.factor
            training.backward(loss, number == 1)
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", MEANS)
def test_rows_of_several_passes_that_no_one_factor_is_right_for(way):
    training = Training(way, tanh_model(), 2)
    batch = batches(1, 12)[0]
    with pytest.raises(
        RuntimeError, match=r"parts of the rows differ from pass to pass: rank 0 \[.*rank 1 \[3.0, 3.0\]"
    ):
        for number, count in enumerate((3, 3 if world().rank else 4)):
            training.holder.rows = count
            training.backward(cross_entropy(training.model(batch[0][:count]), batch[1][:count]), number == 1)
    world().barrier()


def of_one_pass(rank):
    """One rank makes one pass, the others two."""
    return [3.0] * (2 if rank else 1)


def of_the_last_pass(rank):
    return [None, 3.0 + rank]


def of_left_out_passes(rank):
    """Each rank leaves out another one."""
    return [4.0, 0.0] if rank else [0.0, 4.0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("said", [of_one_pass, of_the_last_pass, of_left_out_passes])
@pytest.mark.parametrize("way", MEANS)
def test_rows_that_only_some_passes_have(way, said):
    """All raise, and then all can go on."""
    training = Training(way, tanh_model())
    before = copy.deepcopy(training.bare)
    batch = batches(1, 12)[0]
    with pytest.raises(RuntimeError, match="parts of the rows differ from pass to pass") as raised:
        for count in said(world().rank):
            if count is not None:
                training.holder.rows = count
            if count != 0:
                loss = cross_entropy(training.model(batch[0][:3]), batch[1][:3])
                held(training, loss)
        training.optimizer.step()
    assert f"rank 0 {said(0)}, rank 1 {said(1)}" in str(raised.value)
    assert_alike(training.bare, before)
    expected, optimizer = alone(training.bare)
    training.optimizer.zero_grad()
    x, y = part(batch, "uneven")
    training.holder.rows = len(x)
    cross_entropy(training.model(x), y).backward()
    training.optimizer.step()
    step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


def held(training, loss):
    with training.holder.no_sync():
        loss.backward()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_cleared", [False, True])
@pytest.mark.parametrize("way", MEANS)
def test_rows_of_several_passes_where_a_rank_makes_none(way, is_cleared):
    """Also where it has made one of another loss, of whose rows nothing was said."""
    size, rank = world().size, world().rank
    training = Training(way, tanh_model())
    expected, optimizer = alone(training.bare)
    for batch in batches(2, 6 * (size - 1)):
        training.optimizer.zero_grad()
        if is_cleared:
            held(training, training.model(batch[0]).square().sum())
            training.optimizer.zero_grad(set_to_none=False)
        if rank == size - 1:
            training.holder.rows = 0
        else:
            for number in range(2):
                x, y = (each[number::2][3 * rank : 3 * rank + 3] for each in batch)
                training.holder.rows = 3
                held(training, cross_entropy(training.model(x), y) / 2)
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("way", WAYS)
def test_as_many_passes_as_a_rank_likes_where_none_reduces(way):
    """Each rank makes its own number of passes; step() reduces what they gave."""
    training = Training(way, tanh_model())
    expected, optimizer = alone(training.bare)
    for batch in batches(3, 12):
        x, y = part(batch, "even")
        training.optimizer.zero_grad()
        with training.holder.no_sync():
            for at in range(world().rank + 1):
                mine = slice(at, None, world().rank + 1)
                loss = cross_entropy(training.model(x[mine]), y[mine], reduction="sum")
                (loss * training.factor / 12).backward()
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_make_other_numbers_of_passes_hear_of_it(way):
    training = Training(way, tanh_model())
    error = (CollectiveMismatchError, RuntimeError)
    with pytest.raises(error, match="not in the same step.*rank 0 0, rank 1 1|added to gradients that were summed"):
        for x, y in micro(batches(1, 48)[0], 4):
            training.optimizer.zero_grad()
            for _ in range(2 if world().rank == 0 else 1):
                cross_entropy(training.model(x), y).backward()
            training.optimizer.step()
    world().barrier()


@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_of_some_parameters_only(way):
    """Nobody sets the gradients of the others to zero."""
    bare = tanh_model()
    training = Training(way, bare, make=lambda parameters: torch.optim.SGD([*parameters][2:], lr=0.1))
    expected, _ = alone(bare)
    optimizer = torch.optim.SGD([*expected.parameters()][2:], lr=0.1)
    for batch in batches(3, 12):
        x, y = part(batch, "even")
        training.optimizer.zero_grad()
        training.backward(cross_entropy(training.model(x), y, reduction="sum") / 12)
        torch.nn.utils.clip_grad_norm_(training.optimizer.param_groups[0]["params"], 0.05)
        training.optimizer.step()
        optimizer.zero_grad()
        cross_entropy(expected(batch[0]), batch[1]).backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
        optimizer.step()
    assert_alike(bare, expected)


# -- gradients that the user changes before they are reduced ----------------------------------------------------------


def reduced_in_place(gradient, total):
    gradient.copy_(total)
    return gradient


def reduced_unseen(gradient, total):
    """Write as MPI's own calls and ``.data`` do, of which PyTorch takes no note."""
    gradient.numpy()[...] = total.numpy()
    return gradient


def reduced_elsewhere(gradient, total):
    return total


@pytest.mark.parametrize("put", [reduced_in_place, reduced_unseen, reduced_elsewhere])
@pytest.mark.parametrize("is_said", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_reduced_by_hand(way, is_said, put):
    """Where all ranks have the same, their mean is what they are; of a sum it must be said."""
    training = Training(way, tanh_model())
    expected, optimizer = alone(training.bare)
    for batch in batches(3, 12):
        x, y = part(batch, "uneven")
        training.optimizer.zero_grad()
        with training.holder.no_sync():
            (cross_entropy(training.model(x), y, reduction="sum") / 12).backward()
        for each in training.bare.parameters():
            each.grad = put(each.grad, mpidist.torch.all_reduce(each.grad, "sum"))
        if not is_said and way in SUMS and world().size > 1:
            with pytest.raises(RuntimeError, match=r"changed .* before they were reduced.*skip_synchronize\(\)"):
                training.optimizer.step()
        if is_said or way in SUMS:
            with training.holder.skip_synchronize():
                training.optimizer.step()
        else:
            training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


def clipped(training):
    torch.nn.utils.clip_grad_norm_(training.bare.parameters(), 0.01)


def clipped_on_rank_0(training):
    if world().rank == 0:
        clipped(training)


def looked_at_by_a_scaler(training):
    """As GradScaler does for fused optimizers: infinities of this rank would make it leave out a step of its own."""
    training.optimizer.found_inf = torch.zeros(())


@pytest.mark.parametrize("change", [clipped, clipped_on_rank_0, looked_at_by_a_scaler])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_that_are_changed_before_they_are_reduced(way, change):
    """An error on all ranks; after synchronize() the reduced ones are changed, as in one process."""
    training = Training(way, tanh_model())
    expected, optimizer = alone(training.bare)
    for turn, batch in enumerate(batches(3, 12)):
        x, y = part(batch, "even")
        for is_asked in (False, True)[turn % 2 :]:
            training.optimizer.zero_grad()
            with training.holder.no_sync():
                training.backward(cross_entropy(training.model(x), y, reduction="sum") / 12)
            if is_asked:
                training.holder.synchronize()
                clipped(training)
                training.optimizer.step()
            elif world().size > 1:
                change(training)
                with pytest.raises(RuntimeError, match=r"changed .* before they were reduced.*Call synchronize\(\)"):
                    training.optimizer.step()
            vars(training.optimizer).pop("found_inf", None)
        optimizer.zero_grad()
        cross_entropy(expected(batch[0]), batch[1]).backward()
        torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
        optimizer.step()
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_no_pass_that_all_ranks_have(way):
    """They may be sums already: that must be said, where it matters."""
    size = world().size
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    training = Training(way, torch.nn.ParameterList([weight]), make=lambda each: torch.optim.SGD(each, lr=1.0))
    for _ in range(2):
        weight.grad = torch.full_like(weight, 2.0)
        if way in SUMS and size > 1:
            with pytest.raises(RuntimeError, match="no backward pass are the same on all ranks"):
                training.optimizer.step()
        weight.grad = torch.full_like(weight, 2.0)
        with training.holder.skip_synchronize():
            training.optimizer.step()
        weight.grad = torch.full_like(weight, 2.0)
        training.holder.synchronize()
        training.optimizer.step()
    each = 2.0 * (size if way in SUMS else 1)
    assert weight.tolist() == pytest.approx([-2 * (2.0 + each)] * 3)


# -- what users' loops have in them -----------------------------------------------------------------------------------


def mean_of(model, batch):
    return cross_entropy(model(batch[0]), batch[1], reduction="sum") / 12


def plain(training, batch):
    training.optimizer.zero_grad()
    training.backward(mean_of(training.model, batch))


def zeroed_by_data(training, batch):
    """As old loops do, of which PyTorch takes no note."""
    for each in training.bare.parameters():
        if each.grad is not None:
            each.grad.data.zero_()
    training.backward(mean_of(training.model, batch))


def new_zeros(training, batch):
    for each in training.bare.parameters():
        each.grad = torch.zeros_like(each)
    training.backward(mean_of(training.model, batch))


def in_a_thread(training, batch):
    from threading import Thread

    thread = Thread(target=plain, args=(training, batch))
    thread.start()
    thread.join()


def one_graph_twice(training, batch):
    training.optimizer.zero_grad()
    loss = mean_of(training.model, batch) * training.factor / 2
    with training.holder.no_sync():
        loss.backward(retain_graph=True)
    loss.backward()


def with_a_penalty(training, batch):
    """The gradient of a gradient, as in WGAN-GP."""
    training.optimizer.zero_grad()
    x = batch[0].clone().requires_grad_()
    out = training.model(x).tanh().sum()
    (inner,) = torch.autograd.grad(out, x, create_graph=True)
    training.backward((out + (inner.norm(2, 1) - 1).square().sum()) / 12)


def by_functions(training, batch):
    """No backward pass: gradients are put in place."""
    named = dict(training.bare.named_parameters())

    def loss(values):
        return cross_entropy(torch.func.functional_call(training.bare, values, (batch[0],)), batch[1], reduction="sum")

    found = torch.func.grad(loss)({name: each.detach() for name, each in named.items()})
    for name, each in named.items():
        each.grad = found[name] * training.factor / 12


def compiled(training, batch):
    training.optimizer.zero_grad()
    training.backward(mean_of(torch.compile(training.model, backend="eager"), batch))


class Alone:
    """One process, in the place of a `Training`."""

    def __init__(self, bare, make):
        self.model = self.bare = copy.deepcopy(bare)
        self.optimizer, self.factor, self.holder = make(self.bare.parameters()), 1, self

    def backward(self, loss):
        loss.backward()

    def no_sync(self):
        return contextlib.nullcontext()


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def foreach(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)


@pytest.mark.parametrize(
    "passes, make",
    [
        (plain, fused),
        (zeroed_by_data, foreach),
        (new_zeros, foreach),
        (in_a_thread, fused),
        (one_graph_twice, foreach),
        (with_a_penalty, foreach),
        (by_functions, fused),
        (compiled, foreach),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_loops_equal_one_process(way, passes, make):
    """Half of the steps clip what is reduced; other models and optimizers go on beside."""
    training = Training(way, tanh_model(), make=make)
    expected = Alone(training.bare, make)
    other = torch.nn.Linear(2, 2)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    for turn, batch in enumerate(batches(4, 12)):
        passes(training, part(batch, "even"))
        passes(expected, batch)
        for _ in range(world().rank):
            other(torch.ones(1, 2)).sum().backward()
            others.step()
        if turn % 2 and passes is not by_functions:  # the others are reduced by step() only
            for each in (training, expected):
                torch.nn.utils.clip_grad_norm_(each.bare.parameters(), 0.05)
        training.optimizer.step()
        expected.optimizer.step()
    assert_alike(training.bare, expected.bare)


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("way", WAYS)
def test_closures_give_the_loss_of_all(way, line_search):
    """How far LBFGS goes depends on the loss; ranks would part."""

    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, line_search_fn=line_search)

    training = Training(way, tanh_model(), make=make)
    expected = Alone(training.bare, make)
    for batch in batches(2, 12):
        for each, (x, y) in ((training, part(batch, "even")), (expected, batch)):

            def closure(each=each, x=x, y=y):
                each.optimizer.zero_grad()
                loss = mean_of(each.model, (x, y)) * each.factor
                loss.backward()
                return loss

            each.optimizer.step(closure)
    assert_alike(training.bare, expected.bare, 1e-8)


@pytest.mark.parametrize("way", WAYS)
def test_a_grad_scaler_leaves_out_the_same_steps(way):
    training = Training(way, tanh_model(dtype=torch.float32), make=fused)
    expected = Alone(training.bare, fused)
    scalers = [torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2) for _ in "ab"]
    for turn, batch in enumerate(batches(5, 12, torch.float32)):
        batch[0][-1] *= float("inf") if turn == 2 else 1.0  # of the last rank
        for scaler, each, rows in zip(scalers, (training, expected), (part(batch, "even"), batch), strict=True):
            each.optimizer.zero_grad()
            each.backward(scaler.scale(mean_of(each.model, rows)))
            scaler.step(each.optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_alike(training.bare, expected.bare, 1e-4)


# -- passes of another loss --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clears_with", ["zero_grad", "zeros", "data"])
@pytest.mark.parametrize("way", WAYS)
def test_the_gradients_of_a_part_are_set_to_zero_between_two_passes(way, clears_with):
    """The rest keeps what was reduced: a mean is right; a sum would count it again for each rank."""
    torch.manual_seed(7)
    first, second = torch.nn.Linear(6, 50), torch.nn.Sequential(*(torch.nn.Linear(*each) for each in [(50, 3), (3, 3)]))
    bare = torch.nn.ModuleList([first, second]).double()
    training, expected = Training(way, bare, make=momentum), Alone(bare, momentum)

    def turn(training, batch, factor):
        (x, y), (one, other) = batch, training.bare
        training.optimizer.zero_grad()
        for is_second in (False, True):
            hidden = one(x).tanh()
            training.backward(factor * cross_entropy(other(hidden.detach() if is_second else hidden), y))
            for each in () if is_second else other.parameters():
                if clears_with == "zero_grad":
                    each.grad = None
                else:
                    (each.grad.data if clears_with == "data" else each.grad).zero_()
        training.optimizer.step()

    for batch in batches(3, 12):
        turn(expected, batch, 1.0)
        if way in SUMS and world().size > 1:
            with pytest.raises(RuntimeError, match="added to gradients that were summed over the replicas already"):
                turn(training, part(batch, "even"), 1 / world().size)
            return
        turn(training, part(batch, "even"), 1 / world().size)
    assert_alike(bare, expected.bare)


@pytest.mark.mpi(min_size=2)  # one rank has nothing to sum, and takes zeros of one row for kept
@pytest.mark.parametrize("clears", CLEARED.values(), ids=CLEARED)
@pytest.mark.parametrize("make", [tanh_model, one_row_model])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("way", SUMS)
def test_gradients_of_a_sum_are_set_to_zero_in_any_way(way, passes, make, clears):
    """Also behind a pass that was not reduced, which does not count then.

    That is not tried with `one_row_model`: PyTorch notices no write by ``.data`` or NumPy, and the few values that are
    looked at are zeros before and after it.  The pass that was cleared counts, and the next one is an error.
    """
    training = Training(way, make(), passes)
    expected, optimizer = alone(training.bare)
    for number, batch in enumerate(batches(4, 12 * passes)):
        optimizer.zero_grad()
        cross_entropy(expected(batch[0]), batch[1]).backward()
        optimizer.step()
        if number:
            clears(training.bare)
        if number == 2 and passes > 1 and make is tanh_model:
            training.backward(cross_entropy(training.model(batch[0]), batch[1]), is_last=False)
            clears(training.bare)
        for turn, (x, y) in enumerate(micro(batch, passes)):
            loss = cross_entropy(training.model(x), y, reduction="sum") / (12 * passes)
            training.backward(loss, turn + 1 == passes)
        training.optimizer.step()
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("others", ["None", "zeros", "data"])
@pytest.mark.parametrize("scaled", ["not", "in place", "data"])
@pytest.mark.parametrize("is_sole", [False, True])
@pytest.mark.parametrize("way", SUMS)
@pytest.mark.mpi(min_size=2)
def test_one_gradient_of_a_sum_is_kept(way, is_sole, scaled, others):
    """The one that the next pass gives first.  Set to zero as the others are, it is none that is kept."""
    torch.manual_seed(7)
    layers = torch.nn.Linear(6, 50), torch.nn.Linear(50, 3), torch.nn.Linear(3 if not is_sole else 6, 3, bias=False)
    bare = torch.nn.Sequential(*layers[2 * is_sole :])
    training, parameters = Training(way, bare.double()), [*bare.parameters()]

    def clear(count):
        for each in parameters if scaled != "not" else ():
            (each.grad.data if scaled == "data" else each.grad).mul_(0.5)
        for each in parameters[:count]:
            if others == "None":
                each.grad = None
            else:
                (each.grad.data if others == "data" else each.grad).zero_()

    for number, (x, y) in enumerate(batches(4, 12)):
        training.backward(cross_entropy(training.model(x), y))
        training.optimizer.step()
        clear(-1 if number == 3 else None)
    with pytest.raises(RuntimeError, match="added to gradients that were summed over the replicas already"):
        training.backward(cross_entropy(training.model(x), y))
        training.optimizer.step()


@pytest.mark.parametrize(
    "counts, clears_with", [((2, 2, 2), "zero_grad"), ((2, 2, 1), "zeros"), ((3, 2, 1), "module"), ((1, 1, 1), "zeros")]
)
@pytest.mark.parametrize("way", WAYS)
def test_two_nets_of_which_one_s_loss_runs_through_the_other(way, counts, clears_with):
    """A GAN: the generator's passes leave gradients in the critic, which are set to zero before its next turn."""
    announced, critic_passes, generator_passes = counts
    torch.manual_seed(7)
    nets = [torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6)).double() for _ in "CG"]
    trainings = [Training(way, net, announced) for net in nets]
    others = [alone(net) for net in nets]

    def clear(model, optimizer):
        if clears_with == "module":
            model.zero_grad()
        else:
            optimizer.zero_grad(set_to_none=clears_with == "zero_grad")

    def turn(models, optimizers, backward, parts):
        critic, generator = models
        clear(critic, optimizers[0])
        for number in range(critic_passes):
            (x,) = parts(number, critic_passes)
            loss = critic(x).tanh().sum() - critic(generator(x).detach()).tanh().sum()
            backward(0, loss / 12, number + 1 == critic_passes)
        optimizers[0].step()
        clear(generator, optimizers[1])
        for number in range(generator_passes):
            (x,) = parts(number, generator_passes)
            backward(1, critic(generator(x)).tanh().sum() / 12, number + 1 == generator_passes)
        optimizers[1].step()

    def backward(number, loss, is_last):
        first, second = trainings
        if number == 1 and first.is_module and not is_last:
            with first.model.no_sync():
                second.backward(loss, is_last)
        else:
            trainings[number].backward(loss, is_last)

    for x, _ in batches(3, 12):
        turn(
            [each[0] for each in others],
            [each[1] for each in others],
            lambda _, loss, __: loss.backward(),
            lambda number, count, x=x: (x[number::count],),
        )
        turn(
            [each.model for each in trainings],
            [each.optimizer for each in trainings],
            backward,
            lambda number, count, x=x: part((x[number::count],), "uneven"),
        )
    for training, (expected, _) in zip(trainings, others, strict=True):
        assert_alike(training.bare, expected)


class TwoNets(torch.nn.Module):
    """A GAN in one module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.critic, self.generator = (
            torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 6)) for _ in "CG"
        )
        self.double()

    def forward(self, x, turn):
        if turn == "generator":
            return self.critic(self.generator(x)).tanh().sum() / 12
        return (self.critic(x).tanh().sum() - self.critic(self.generator(x).detach()).tanh().sum()) / 12


@pytest.mark.parametrize("turns", [("critic", "generator"), ("generator", "critic", "critic")])
@pytest.mark.parametrize("way", ["module mean", "strategy's module"])
def test_two_nets_in_one_module_with_an_optimizer_each(way, turns):
    """What one turn leaves in the other net's gradients is set to zero before they count."""
    training = Training(way, TwoNets())
    expected = Alone(training.bare, foreach)
    optimizers = [
        {name: torch.optim.SGD(getattr(net, name).parameters(), lr=0.2, momentum=0.9) for name in set(turns)}
        for net in (training.bare, expected.bare)
    ]
    for x, _ in batches(3, 12):
        for turn in turns:
            for own, each, rows in zip(optimizers, (training, expected), (part((x,), "even")[0], x), strict=True):
                own[turn].zero_grad()
                each.backward(each.model(rows, turn))
                torch.nn.utils.clip_grad_norm_(own[turn].param_groups[0]["params"], 0.2)
                own[turn].step()
    assert_alike(training.bare, expected.bare)


@pytest.mark.parametrize("way", OPTIMIZERS)
def test_parameters_that_were_added_count_no_pass_of_their_own(way):
    first, second = tanh_model(), tanh_model(seed=5)
    training = Training(way, first, 2)
    training.optimizer.add_param_group({"params": second.parameters()})
    expected = torch.nn.ModuleList(copy.deepcopy([first, second]))
    _, optimizer = expected, torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for batch in batches(3, 24):
        training.optimizer.zero_grad()
        for x, y in micro(batch, 2):
            training.backward(cross_entropy(first(x) + second(x), y, reduction="sum") / 24)
        training.optimizer.step()
        optimizer.zero_grad()
        cross_entropy(expected[0](batch[0]) + expected[1](batch[0]), batch[1]).backward()
        optimizer.step()
    assert_alike(torch.nn.ModuleList([first, second]), expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_pass_that_was_broken_off(way):
    training = Training(way, tanh_model())
    expected, optimizer = alone(training.bare)

    def broken(gradient):
        raise KeyError("broken off")

    for turn, batch in enumerate(batches(3, 12)):
        x, y = part(batch, "even")
        training.optimizer.zero_grad()
        if turn == 1:
            handle = training.bare[0].weight.register_hook(broken)
            with pytest.raises(KeyError, match="broken off"):
                training.backward(cross_entropy(training.model(x), y))
            handle.remove()
            training.optimizer.zero_grad()
        training.backward(cross_entropy(training.model(x), y, reduction="sum") / 12)
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("way", OPTIMIZERS)
def test_gradients_that_the_user_puts_in_place(way):
    """No backward pass: step() reduces them, new ones and those written over the ones before."""
    size, rank = world().size, world().rank
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    training = Training(way, torch.nn.ParameterList([weight]), make=lambda each: torch.optim.SGD(each, lr=1.0))
    total = sum(range(1, size + 1)) / (size if "mean" in way else 1)
    weight.grad = torch.full_like(weight, rank + 1.0)
    training.optimizer.step()
    assert weight.tolist() == pytest.approx([-total] * 3)
    weight.grad.copy_(torch.full_like(weight, rank + 1.0))
    training.optimizer.step()
    assert weight.tolist() == pytest.approx([-2 * total] * 3)


def test_no_message_more_than_one_a_step():
    """Where nothing is unusual."""
    for way in WAYS:
        training = Training(way, tanh_model(), 2)
        before = world().control.call
        for batch in batches(3, 24):
            training.optimizer.zero_grad()
            for number, (x, y) in enumerate(micro(batch, 2)):
                training.backward(cross_entropy(training.model(x), y), number == 1)
            training.optimizer.step()
        assert world().control.call - before == (3 if world().size > 1 else 0), way
        assert_same_bits(*training.bare.parameters())


def test_a_module_that_was_dropped_hears_of_no_step():
    gc.collect()
    before = len(_before_steps)
    training = Training("module mean", tanh_model())
    assert len(_before_steps) == before + 1
    del training
    gc.collect()
    assert len(_before_steps) == before


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
def test_a_model_is_dropped_in_the_middle_of_a_step(way, register):
    """PyTorch goes through its hooks then."""
    dropped = [Training(way, tanh_model())]
    bare = tanh_model()
    optimizer = momentum(bare.parameters())
    cross_entropy(bare(batches(1, 12)[0][0]), batches(1, 12)[0][1]).backward()

    def drop(*args):
        dropped.clear()
        gc.collect()

    handles = [register(drop), register(lambda *args: None)]  # PyTorch looks when it goes on to the next
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert dropped == []


# -- passes inside a pass ----------------------------------------------------------------------------------------------


def reentrant(block, *args):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(block, *args, use_reentrant=True)


def two_blocks(model, x):
    return reentrant(lambda x: model[2](model[1](x)), reentrant(model[0], x))


def blocks_in_a_block(model, x):
    return reentrant(lambda x: model[2](reentrant(model[1], reentrant(model[0], x))), x)


def one_layer_twice(model, x):
    return model[2](reentrant(lambda x: model[0](x).tanh(), torch.cat([reentrant(model[0], x), x], 1)[:, :6]))


def both_kinds(model, x):
    """Each kind of checkpoint stands in the other, beside a layer that stands in none."""
    from torch.utils.checkpoint import checkpoint

    first = reentrant(lambda x: checkpoint(model[1], model[0](x), use_reentrant=False), x)
    second = checkpoint(lambda x: reentrant(model[1], model[0](x)), x, use_reentrant=False)
    return model[2](first + second)


@pytest.mark.parametrize(
    "forward, kind",
    [(two_blocks, "uneven"), (blocks_in_a_block, "empty"), (one_layer_twice, "even"), (both_kinds, "uneven")],
)
@pytest.mark.parametrize("way", WAYS)
def test_checkpointed_blocks(way, kind, forward):
    """Each block is a pass inside the pass; a backward pass is over when the outermost one is."""
    training = Training(way, tanh_model())
    expected, optimizer = alone(training.bare)
    for batch in batches(3, 12):
        x, y = part(batch, kind)
        training.optimizer.zero_grad()
        loss = cross_entropy(forward(training.bare, x.clone().requires_grad_()), y, reduction="sum")
        if way in MEANS:
            training.holder.rows = len(x)
            loss.div(max(len(x), 1)).backward()
        else:
            loss.div(12).backward()
        training.optimizer.step()
        optimizer.zero_grad()
        cross_entropy(forward(expected, batch[0].clone().requires_grad_()), batch[1]).backward()
        optimizer.step()
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("way", WAYS)
def test_checkpointed_blocks_and_several_passes(way):
    training = Training(way, tanh_model(), 2)
    expected, optimizer = alone(training.bare)
    before = world().control.call
    for batch in batches(3, 24):
        training.optimizer.zero_grad(set_to_none=False)
        for number, (x, y) in enumerate(micro(batch, 2)):
            out = two_blocks(training.bare, x.clone().requires_grad_())
            training.backward(cross_entropy(out, y, reduction="sum") / 24, number == 1)
        training.optimizer.step()
        step_alone(expected, optimizer, batch)
    assert world().control.call - before == (3 if world().size > 1 else 0)
    assert_alike(training.bare, expected)


@pytest.mark.parametrize("way", WAYS)
def test_two_models_of_one_pass_are_reduced_in_one_order(way):
    """Each rank's pass reaches them in an order of its own."""
    first, second = (Training(way, tanh_model(seed=seed)) for seed in (1, 2))
    (expected, optimizer), (other, other_optimizer) = alone(first.bare), alone(second.bare)
    for batch in batches(2, 12):
        x, y = part(batch, "even")
        for each in (first.optimizer, second.optimizer, optimizer, other_optimizer):
            each.zero_grad()
        nets = [first.bare, second.bare][:: 1 if world().rank else -1]
        between = reentrant(nets[1], x.clone().requires_grad_()).sum() * 0.0
        loss = cross_entropy(nets[0](x + between) + nets[1](x), y, reduction="sum") / 12
        first.backward(loss)
        cross_entropy(expected(batch[0]) + other(batch[0]), batch[1]).backward()
        for each in (first.optimizer, second.optimizer, optimizer, other_optimizer):
            each.step()
    assert_alike(first.bare, expected)
    assert_alike(second.bare, other)
