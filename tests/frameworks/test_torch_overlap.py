"""Sums that begin in the backward pass: together what one process does, whatever the pass is.

The ranks are on two nodes, or have a pretended device each.
"""

from __future__ import annotations

import contextlib
import copy

import numpy
import pytest

torch = pytest.importorskip("torch")

from mpi4py import MPI  # noqa: E402

import mpidist  # noqa: E402
import mpidist.torch  # noqa: E402
from mpidist.collectives import early_sums  # noqa: E402
from mpidist.errors import CollectiveMismatchError, RemoteReplicaError  # noqa: E402
from mpidist.frameworks.torch import cuda, reduction  # noqa: E402
from mpidist.frameworks.torch import overlap as overlapping  # noqa: E402
from mpidist.frameworks.torch.gradients import GradientList  # noqa: E402
from mpidist.frameworks.torch.overlap import Overlap  # noqa: E402
from mpidist.frameworks.torch.tensors import is_dense  # noqa: E402
from mpidist.testing.device import pretended_device  # noqa: E402
from tests.frameworks.torch_device import Device  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    COLUMNS,
    assert_alike,
    assert_same_bits,
    batches,
    cross_entropy,
    momentum,
    part,
    rows,
    tanh_model,
    trained_alone,
    world,
)

pytestmark = pytest.mark.mpi

#: How a model is trained on all ranks.
KINDS = ["module", "optimizer"]


@pytest.fixture(autouse=True, params=[False, True], ids=["two nodes", "device"])
def on_device(request, monkeypatch):
    """A world in which sums may begin early; short models have several buckets in it."""
    monkeypatch.setattr(early_sums, "_LEAST_BUCKET_BYTES", 64)
    monkeypatch.setattr(overlapping, "_STEPS_TIMED", 0)
    if not request.param:
        monkeypatch.setenv("MPIDIST_VIRTUAL_NODES", "2")
    with pretended_device(""), mpidist.new_world(MPI.COMM_WORLD):
        assert world().topology.node_count == (1 if request.param else min(2, world().size))
        if request.param:
            Device(monkeypatch)
            monkeypatch.setattr(cuda, "now", lambda tensor: reduction.perf_counter())
        yield request.param


def distributed(bare, kind="module", **options):
    """Return a model and its optimizer, and which of the two reduces."""
    if kind == "module":
        model = mpidist.torch.DistributedDataParallel(bare, **options)
        return model, momentum(bare.parameters()), model
    optimizer = mpidist.torch.DistributedOptimizer(momentum(bare.parameters()), bare.named_parameters(), **options)
    return bare, optimizer, optimizer


def train(model, optimizer, data, loss_fn=cross_entropy):
    for batch in data:
        x, y = part(batch, "even")
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()


def several():
    return world().size > 1


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_one_process_and_all_passes_but_the_first_overlap(kind):
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(6, 12))
    model, optimizer, owner = distributed(bare, kind)
    for number, batch in enumerate(batches(6, 12)):
        train(model, optimizer, [batch])
        assert owner.has_overlapped == (several() and number > 0)
    assert_alike(bare, expected)


class Clock:
    """In place of the time: it moves only when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(overlapping, "_STEPS_TIMED", 3)
        monkeypatch.setattr(reduction, "perf_counter", lambda: self.now)

    def slow(self, where, name, everywhere=False):
        """Have a method take a second on one rank, or on all."""
        method = getattr(where, name)

        def slow(*arguments):
            self.now += float(everywhere or world().rank == world().size - 1)
            return method(*arguments)

        self._monkeypatch.setattr(where, name, slow)


@pytest.mark.parametrize("slow", ["after", "early"])
def test_steps_of_both_kinds_are_timed_and_the_quicker_kind_is_kept(monkeypatch, slow):
    clock = Clock(monkeypatch)
    clock.slow(GradientList, "reduce")
    if slow == "early":
        clock.slow(Overlap, "_copy")
        clock.slow(Overlap, "_put_in_place")
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(14, 12))
    model, optimizer, owner = distributed(bare)
    for number, batch in enumerate(batches(14, 12)):
        train(model, optimizer, [batch])
        # one and three steps are timed, one agrees; then the same of the other kind
        assert owner.has_overlapped == (several() and 5 <= number < (10 if slow == "early" else 14))
    assert (model._reduction.overlap is None) == (not several() or slow == "early")
    assert_alike(bare, expected)


@pytest.mark.parametrize(("others", "begins"), [(18, True), (20, False)])
def test_where_sums_are_less_than_a_twentieth_of_a_step_nothing_begins_early(monkeypatch, others, begins):
    clock = Clock(monkeypatch)
    clock.slow(GradientList, "reduce", everywhere=True)
    model, optimizer, owner = distributed(tanh_model())
    for number, batch in enumerate(batches(8, 12)):
        clock.now += others
        train(model, optimizer, [batch])
        assert owner.has_overlapped == (several() and begins and number >= 5)


def test_only_steps_next_to_others_of_their_kind_are_timed(monkeypatch):
    monkeypatch.setattr(overlapping, "_STEPS_TIMED", 2)
    times = overlapping.StepTimes()
    notes = [(False, 0, 1), (False, 4, 6), None, (False, 7, 8), (False, 9, 12), (True, 12, 12.5), (True, 18, 20)]
    seen = []
    for each in notes:
        seen.append((times.may_gain(), times.gained()))
        times.interrupt() if each is None else times.note(*each)
    assert seen == [(False, None)] * 5 + [(True, None)] * 2
    times.note(True, 22, 23)
    assert times.gained() == pytest.approx(0.95 * 4 - 3)  # 5 and 4 seconds, 7.5 and 3


def test_sums_of_losses_that_are_divided_by_the_global_batch():
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(5, 12))
    model, optimizer, owner = distributed(bare, op="sum")
    train(model, optimizer, batches(5, 12), lambda x, y: cross_entropy(x, y) / world().size)
    assert owner.has_overlapped == several()
    assert_alike(bare, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_the_bits_are_those_of_the_sum_after_the_pass(dtype, on_device):
    found, has_sums = [], not (on_device and dtype.is_complex)
    for overlap in ("auto", "none"):
        torch.manual_seed(3)
        bare = torch.nn.ParameterList(torch.randn(9, 31).to(dtype) for _ in range(3))
        owner = mpidist.torch.DistributedOptimizer(torch.optim.SGD(bare, lr=0.25), overlap=overlap)
        for step in range(3):
            owner.zero_grad()
            factor = torch.randn(9, 31, generator=torch.Generator().manual_seed(10 * step + world().rank)).to(dtype)
            sum((each * factor * (number + 1)).abs().sum() for number, each in enumerate(bare)).backward()
            owner.step()
        assert owner.has_overlapped == (several() and overlap == "auto" and has_sums)
        assert_same_bits(*(each.view(torch.uint8) if dtype.is_complex else each for each in bare.parameters()))
        found.append(torch.cat([each.detach().reshape(-1) for each in bare]))
    if world().size <= 3:  # two nodes, two ranks on each at most: then there is one order of additions
        assert torch.equal(*found)


def test_gradients_in_another_order_than_their_shape_s():
    """Those of one rank lie as images do in `channels_last`, and those of others by rows."""
    torch.manual_seed(4)
    bare = torch.nn.ParameterList([torch.randn(3, 4, 2, 2), torch.randn(5, 7), torch.randn(())])
    expected = [each.detach().clone() for each in bare]
    if world().rank == 0:
        bare[0].data = bare[0].data.contiguous(memory_format=torch.channels_last)
        bare[1].data = bare[1].data.t().contiguous().t()
    owner = mpidist.torch.DistributedOptimizer(torch.optim.SGD(bare, lr=0.5))
    for step in range(3):
        owner.zero_grad()
        factor = step + world().rank
        sum((each * factor * torch.arange(each.numel()).reshape(each.shape)).sum() for each in bare).backward()
        assert world().rank or not bare[0].grad.is_contiguous()
        assert owner.has_overlapped == (several() and step > 0)
        owner.step()
        for each in expected:
            each -= 0.5 * (step + (world().size - 1) / 2) * torch.arange(each.numel()).reshape(each.shape)
        for ours, theirs in zip(bare, expected, strict=True):
            torch.testing.assert_close(ours.detach(), theirs)


def test_memory_that_several_elements_share_is_not_dense():
    images = torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    for tensor in (torch.zeros(()), torch.zeros(0, 3), torch.zeros(3, 5).t(), images, images[:1]):
        assert is_dense(tensor)
    for tensor in (torch.zeros(3, 1).expand(3, 4), torch.zeros(9).as_strided((3, 3), (2, 1)), torch.zeros(6)[::2]):
        assert not is_dense(tensor)


def test_only_auto_and_none_can_be_asked_for():
    for make in (
        mpidist.torch.DistributedDataParallel,
        lambda bare, **options: distributed(bare, "optimizer", **options),
    ):
        with pytest.raises(ValueError, match="overlap='buckets': it is one of 'auto', 'none'"):
            make(tanh_model(), overlap="buckets")


# -- which gradients there are ----------------------------------------------------------------------------------------


class Branches(torch.nn.ModuleDict):
    """Parts of which each rank takes some, in an order of its own."""

    def __init__(self, names="abcd"):
        torch.manual_seed(5)
        super().__init__({name: torch.nn.Linear(COLUMNS, COLUMNS).double() for name in names})

    def run(self, x, names):
        for name in names:
            x = torch.tanh(self[name](x))
        return x.square().sum()


def test_parameters_that_are_not_reached():
    """On some ranks: zeros.  On all: no gradient."""
    bare = Branches()
    model, optimizer, owner = distributed(bare)
    for step in range(3):
        optimizer.zero_grad()
        x = rows(4, seed=step)[0]
        taken = [("ab" if rank == 0 else "b") for rank in range(world().size)]
        alone = copy.deepcopy(bare)
        for names in taken:
            (alone.run(x, names) / world().size).backward()
        bare.run(x, taken[world().rank]).backward()
        assert owner.has_overlapped == (several() and step > 0)
        for name in "ab":
            torch.testing.assert_close(bare[name].weight.grad, alone[name].weight.grad, rtol=1e-12, atol=1e-14)
        assert bare["c"].weight.grad is None and bare["d"].bias.grad is None
        optimizer.step()


def test_gradients_come_in_another_order_on_each_rank():
    bare = Branches()
    model, optimizer, owner = distributed(bare)
    for step in range(3):
        optimizer.zero_grad()
        x = rows(4, seed=step)[0]
        orders = ["abcd" if rank % 2 else "dcba" for rank in range(world().size)]
        alone = copy.deepcopy(bare)
        for names in orders:
            (alone.run(x, names) / world().size).backward()
        bare.run(x, orders[world().rank]).backward()
        assert owner.has_overlapped == (several() and step > 0)
        for found, wanted in zip(bare.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-14)
        optimizer.step()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_used_twice(kind):
    torch.manual_seed(2)
    inner = torch.nn.Linear(COLUMNS, COLUMNS).double()
    bare = torch.nn.Sequential(inner, torch.nn.Tanh(), inner, torch.nn.Tanh(), *tanh_model())
    expected = trained_alone(bare, momentum, batches(4, 12))
    model, optimizer, owner = distributed(bare, kind)
    train(model, optimizer, batches(4, 12))
    assert owner.has_overlapped == several()
    assert_alike(bare, expected)


def test_parameters_that_are_frozen_and_thawed():
    torch.manual_seed(6)
    bare = torch.nn.Sequential(torch.nn.Linear(COLUMNS, COLUMNS).double(), torch.nn.Tanh(), *tanh_model())
    expected = copy.deepcopy(bare)
    model, optimizer, owner = distributed(bare)
    alone = momentum(expected.parameters())
    for number, (x, y) in enumerate(batches(9, 12)):
        for each in (bare, expected):
            each[0].weight.requires_grad_(number // 3 != 1)
        alone.zero_grad()
        cross_entropy(expected(x), y).backward()
        alone.step()
        train(model, optimizer, [(x, y)])
        assert owner.has_overlapped == (several() and number % 3 > 0)
    assert_alike(bare, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_more_bits_than_before(kind):
    """Their sums have as many."""
    bare = tanh_model(dtype=torch.float32)
    model, optimizer, owner = distributed(bare, kind)
    train(model, optimizer, batches(3, 12, torch.float32))
    optimizer.state.clear()
    bare.double()
    expected = trained_alone(bare, momentum, batches(3, 12))
    train(model, optimizer, batches(3, 12))
    assert owner.has_overlapped == several()
    assert_alike(bare, expected)


def test_parameters_that_are_frozen_on_one_rank_are_an_error_on_all():
    bare = tanh_model()
    model, optimizer, owner = distributed(bare)
    train(model, optimizer, batches(3, 12))
    if world().rank == 0:
        bare[0].weight.requires_grad_(False)
    error = pytest.raises(CollectiveMismatchError, match="weight|which gradients there are")
    with error if several() else contextlib.nullcontext():
        train(model, optimizer, batches(1, 12))


# -- which passes there are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_passes_under_no_sync_in_some_steps(kind):
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(8, 24))
    model, optimizer, owner = distributed(bare, kind)
    for number, batch in enumerate(batches(8, 24)):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        if number % 2:
            with owner.no_sync():
                (cross_entropy(model(x[::2]), y[::2]) / 2).backward()
            (cross_entropy(model(x[1::2]), y[1::2]) / 2).backward()
        else:
            cross_entropy(model(x), y).backward()
        assert owner.has_overlapped == (several() and number > 0 and number % 2 == 0)
        optimizer.step()
    assert_alike(bare, expected)


def test_several_passes_in_each_step():
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(4, 24))
    model, optimizer, owner = distributed(bare, "optimizer")
    train(model, optimizer, batches(2, 24))
    assert owner.has_overlapped == several()
    optimizer.set_backward_passes_per_step(2)
    for batch in batches(4, 24)[2:]:
        x, y = part(batch, "even")
        optimizer.zero_grad()
        for some in (slice(0, None, 2), slice(1, None, 2)):
            (cross_entropy(model(x[some]), y[some]) / 2).backward()
        optimizer.step()
        assert not owner.has_overlapped
    assert_alike(bare, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_that_are_weighted_by_rows(kind):
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(6, 12))
    model, optimizer, owner = distributed(bare, kind)
    for number, batch in enumerate(batches(6, 12)):
        x, y = part(batch, "uneven" if number % 2 else "even")
        optimizer.zero_grad()
        if number % 2:
            owner.rows = len(x)
        cross_entropy(model(x), y).backward()
        assert owner.has_overlapped == (several() and number > 0 and number % 2 == 0)
        optimizer.step()
    assert_alike(bare, expected)


def test_a_rank_that_makes_no_pass():
    bare = tanh_model()
    expected = copy.deepcopy(bare)
    model, optimizer, owner = distributed(bare)
    alone = momentum(expected.parameters())
    last, size = world().size - 1, world().size
    for number, (x, y) in enumerate(batches(4, 12)):
        takes_part = world().rank != last or number % 2 == 0 or size == 1
        alone.zero_grad()
        share = 1 if number % 2 == 0 or size == 1 else (size - 1) / size
        (cross_entropy(expected(x), y) * share).backward()
        alone.step()
        optimizer.zero_grad()
        if takes_part:
            cross_entropy(model.module(x), y).backward()
        optimizer.step()
    assert_alike(bare, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_within_the_model(use_reentrant):
    torch.manual_seed(7)
    bare = torch.nn.Sequential(torch.nn.Linear(COLUMNS, COLUMNS).double(), torch.nn.Tanh(), tanh_model())
    expected = trained_alone(bare, momentum, batches(4, 12))
    model, optimizer, owner = distributed(bare, "optimizer")

    def run(x):
        return torch.utils.checkpoint.checkpoint(bare[2], bare[1](bare[0](x)), use_reentrant=use_reentrant)

    train(run, optimizer, batches(4, 12))
    assert owner.has_overlapped == (several() and not use_reentrant)
    assert_alike(bare, expected)


def test_two_models_in_one_pass():
    bares = [tanh_model(seed=seed) for seed in (1, 2)]
    expected = [trained_alone(bare, momentum, batches(4, 12)) for bare in bares]
    pairs = [distributed(bare, kind) for bare, kind in zip(bares, KINDS, strict=True)]
    for batch in batches(4, 12):
        x, y = part(batch, "even")
        for _, optimizer, _ in pairs:
            optimizer.zero_grad()
        losses = [cross_entropy(model(x), y) for model, _, _ in pairs]
        sum(losses if world().rank % 2 else losses[::-1]).backward()
        for _, optimizer, _ in pairs:
            optimizer.step()
    for bare, wanted, (_, _, owner) in zip(bares, expected, pairs, strict=True):
        assert owner.has_overlapped == several()
        assert_alike(bare, wanted)


def test_batch_norm_of_all_rows_makes_calls_of_its_own_in_the_pass():
    torch.manual_seed(4)
    bare = torch.nn.Sequential(
        torch.nn.Linear(COLUMNS, 9), torch.nn.BatchNorm1d(9), torch.nn.Tanh(), torch.nn.Linear(9, 3)
    ).double()
    expected = trained_alone(bare, momentum, batches(4, 12))
    mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(bare)
    model, optimizer, owner = distributed(bare)
    train(model, optimizer, batches(4, 12))
    assert owner.has_overlapped == several()
    for name, each in expected.named_parameters():
        torch.testing.assert_close(bare.get_parameter(name), each, rtol=1e-11, atol=1e-12)


# -- what users do in the pass ----------------------------------------------------------------------------------------


def _clip_by_pytorch(bare):
    def hook(parameter):
        parameter.grad.clamp_(-0.05, 0.05)

    for each in bare.parameters():
        each.register_post_accumulate_grad_hook(hook)


def _halve_past_pytorch(bare):
    """As a hook of an inner module may do with the gradients of one that is complete."""

    def hook(module, *gradients):
        if bare[2].weight.grad is not None:
            bare[2].weight.grad.data.mul_(0.5)

    bare[0].register_full_backward_hook(hook)


@pytest.mark.parametrize("change", [_clip_by_pytorch, _halve_past_pytorch])
def test_gradients_that_are_changed_in_the_pass(change, on_device):
    """They count as they are at its end; after a few such passes, nothing is begun any more."""
    if on_device and change is _halve_past_pytorch:
        return  # the next test
    bare = tanh_model()
    data = [rows(12, seed=seed) for seed in range(8)]
    model, optimizer, owner = distributed(bare)
    train(model, optimizer, [(x.repeat(world().size, 1), y.repeat(world().size)) for x, y in data[:2]])
    assert owner.has_overlapped == several()
    expected = copy.deepcopy(bare)
    change(bare)
    change(expected)
    alone = momentum(expected.parameters())
    alone.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x, y in data[2:]:  # all ranks have the same rows, so the mean is what each has
        alone.zero_grad()
        cross_entropy(expected(x.requires_grad_()), y).backward()
        alone.step()
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        assert not owner.has_overlapped
    assert_alike(bare, expected, 1e-11)
    assert model._reduction.overlap is None


@pytest.mark.parametrize("is_last", [False, True])
def test_gradients_on_a_device_that_are_changed_past_pytorch_are_an_error(on_device, monkeypatch, is_last):
    """In the next step; or in the same one, if it is the last whose sums begin in the pass."""
    bare = tanh_model()
    model, optimizer, owner = distributed(bare)
    train(model, optimizer, batches(3, 12))
    assert owner.has_overlapped == several()
    if not (on_device and several()):
        return
    if world().rank == 1:
        _halve_past_pytorch(bare)
    x, y = rows(8, seed=1)
    if is_last:
        monkeypatch.setattr(overlapping.StepTimes, "gained", lambda self: -1.0)
    else:
        optimizer.zero_grad()
        cross_entropy(model(x.requires_grad_()), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="gradients on rank 1 of .* were changed after their sum was begun"):
        cross_entropy(model(x.requires_grad_()), y).backward()


def test_what_is_gained_counts_when_all_ranks_know_it(monkeypatch):
    """Times of a device are known on one rank before others."""
    bare = tanh_model()
    model, optimizer, owner = distributed(bare)
    train(model, optimizer, batches(2, 12))
    known = {0: -1.0, 1: 2.0}
    turn = [0]
    monkeypatch.setattr(
        overlapping.StepTimes, "gained", lambda self: known.get(world().rank, 0.0) if turn[0] >= world().rank else None
    )
    for turn[0] in range(world().size + 1):
        train(model, optimizer, batches(1, 12))
        assert owner.has_overlapped == several()
    known[1] = 0.5
    train(model, optimizer, batches(2, 12))
    assert not owner.has_overlapped


def test_without_memory_for_the_buckets_all_sums_are_made_after_the_pass(monkeypatch):
    def no_memory(*given):
        raise MemoryError

    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(5, 12))
    if world().rank == world().size - 1:
        monkeypatch.setattr(early_sums, "buckets_of", no_memory)
    model, optimizer, owner = distributed(bare)
    for batch in batches(5, 12):
        train(model, optimizer, [batch])
        assert not owner.has_overlapped
    assert_alike(bare, expected)


def test_gradients_are_the_rank_s_own_until_the_pass_is_over():
    bare = tanh_model()
    model, optimizer, owner = distributed(bare)
    train(model, optimizer, batches(2, 12))
    optimizer.zero_grad()
    alone, seen = copy.deepcopy(bare), []
    bare[0].register_full_backward_hook(lambda *_: seen.append(bare[2].bias.grad.clone()))
    x, y = rows(8, seed=world().rank)
    cross_entropy(alone(x), y).backward()
    cross_entropy(model(x.requires_grad_()), y).backward()
    assert owner.has_overlapped == several()
    assert torch.equal(seen[0], alone[2].bias.grad)
    if several():
        assert not torch.equal(bare[2].bias.grad, alone[2].bias.grad)


# -- between the pass and the step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_unscaled", [False, True])
def test_a_grad_scaler_leaves_out_a_step_for_one_row_of_one_rank(kind, is_unscaled):
    """The infinite row is the last one of the third batch, and the last rank's; the training goes on behind it."""
    data = batches(7, 12)
    data[2][0][-1] = torch.inf
    bare = tanh_model()
    expected = copy.deepcopy(bare)
    model, optimizer, owner = distributed(bare, kind)
    alone, weights = momentum(expected.parameters()), []
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in "ab"]
    for number, batch in enumerate(data):
        sides = [(expected, alone, scalers[0], batch), (model, optimizer, scalers[1], part(batch, "even"))]
        for net, own, scaler, (x, y) in sides:
            own.zero_grad()
            scaler.scale(cross_entropy(net(x), y)).backward()
            if is_unscaled:
                if own is optimizer and kind == "optimizer":
                    own.synchronize()
                scaler.unscale_(own)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            within = own.skip_synchronize() if is_unscaled and kind == "optimizer" and own is optimizer else None
            with within or contextlib.nullcontext():
                scaler.step(own)
            scaler.update()
        assert owner.has_overlapped == (several() and number > 0)
        assert scalers[0].get_scale() == scalers[1].get_scale()
        weights.append(bare[0].weight.detach().clone())
    assert torch.equal(weights[2], weights[1]) and not torch.equal(weights[3], weights[2])
    assert_alike(bare, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_clipping_between_the_pass_and_the_step(kind):
    def clip(model):
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    norms = []
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(6, 12), before_step=clip)
    alone, norms = norms, []
    model, optimizer, owner = distributed(bare, kind)
    for number, batch in enumerate(batches(6, 12)):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        assert owner.has_overlapped == (several() and number > 0)
        if kind == "optimizer":
            optimizer.synchronize()
        clip(bare)
        with optimizer.skip_synchronize() if kind == "optimizer" else contextlib.nullcontext():
            optimizer.step()
    torch.testing.assert_close(norms, alone, rtol=1e-11, atol=0)
    assert max(norms) > 0.05
    assert_alike(bare, expected)


@pytest.mark.parametrize("what", ["thawed", "new"])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_added_in_the_middle_of_training(kind, what):
    """Those of a layer that was frozen, or is new; an optimizer gives all ranks rank 0's values of them."""

    def trained(bare, kind, cut):
        if kind is None:
            model, optimizer, owner = bare, momentum(bare[:3].parameters()), None
        elif kind == "module":
            model = owner = mpidist.torch.DistributedDataParallel(bare)
            optimizer = momentum(bare[:3].parameters())
        else:
            named = [(name, each) for name, each in bare.named_parameters() if not name.startswith("3")]
            model, optimizer = bare, mpidist.torch.DistributedOptimizer(momentum(bare[:3].parameters()), named)
            owner = optimizer
        seen = []
        for number, batch in enumerate(batches(9, 12)):
            if number == 4:
                if what == "new":
                    torch.manual_seed(world().rank if kind == "optimizer" else 0)
                    bare.append(torch.nn.Linear(3, 3).double())
                bare[3].requires_grad_()
                optimizer.add_param_group({"params": list(bare[3].parameters()), "lr": 0.3})
            x, y = cut(batch)
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            seen.append(getattr(owner, "has_overlapped", False))
        return bare, seen

    def made():
        bare = tanh_model()
        if what == "thawed":
            torch.manual_seed(0)
            bare.append(torch.nn.Linear(3, 3).double().requires_grad_(False))
        return bare

    expected, _ = trained(made(), None, lambda batch: batch)
    found, seen = trained(made(), kind, lambda batch: part(batch, "even"))
    assert_alike(found, expected)
    assert not several() or (all(seen[1:4]) and all(seen[6:])), seen


# -- errors -----------------------------------------------------------------------------------------------------------


class _Broken(torch.autograd.Function):
    """Raises in the backward pass on some ranks."""

    @staticmethod
    def forward(ctx, x, is_broken):
        ctx.is_broken = is_broken
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.is_broken:
            raise ArithmeticError("broken in the pass")
        return gradient, None


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("overlap", ["auto", "none"])
def test_an_error_in_the_pass_is_told_to_all_and_training_goes_on(place, everywhere, overlap):
    """It comes before any sum is begun on the rank (3), between two, or behind all but the last."""
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(6, 12))
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer, owner = distributed(bare, overlap=overlap)

    def step(batch, is_broken=False):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        for number, layer in enumerate([*bare, torch.nn.Identity()]):
            x = layer(_Broken.apply(x.requires_grad_(), is_broken) if number == place else x)
        cross_entropy(x, y).backward()
        optimizer.step()

    for number, batch in enumerate(batches(6, 12)):
        if number in (2, 3):
            is_broken = everywhere or world().rank == world().size - 1
            error, text = (ArithmeticError, "broken") if is_broken else (RemoteReplicaError, "broken in the pass")
            with pytest.raises(error, match=text):
                strategy.run(step, (batch, is_broken))
        strategy.run(step, (batch,))
        # the reduction behind an error ends what was begun before it, or may have been
        is_first = number == 0 or (number in (2, 3) and not (everywhere and place == 3))
        assert owner.has_overlapped == (several() and overlap == "auto" and not is_first)
    assert_alike(bare, expected)


def test_many_models_one_after_the_other():
    """Berths are used again: there are fewer than models."""
    for seed in range(70):
        bare = tanh_model(seed)
        model, optimizer, owner = distributed(bare)
        train(model, optimizer, batches(2, 12))
        if seed in (0, 69):
            assert owner.has_overlapped == several()
            assert_alike(bare, trained_alone(tanh_model(seed), momentum, batches(2, 12)))
        del model, optimizer, owner


def test_check_sums_tell_what_is_changed():
    from mpidist.frameworks.torch.early_gradients import _check_sum

    values = numpy.arange(1, 1025, dtype=numpy.float32)
    for changed in (values * numpy.float32(0.5), values.clip(0, 1023), values + numpy.float32(1), values * 0):
        assert _check_sum(changed) != _check_sum(values)
    signs = numpy.tile(numpy.array([1, 1, -1, -1], numpy.float32), 1 << 14)
    for whole in (signs, signs[:1024]):  # a plain sum of their bits stays as it is
        assert _check_sum(-whole) != _check_sum(whole)
    assert _check_sum(signs[2:-2]) != _check_sum(signs[4:])
    odd = numpy.arange(5, dtype=numpy.float16)
    assert _check_sum(odd) == _check_sum(odd.copy())
    assert _check_sum(odd) != _check_sum(odd[::-1].copy())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_on_all", [True, False], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_inside_a_pass_whose_sums_have_begun(kind, is_on_all):
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(8, 12))
    model, optimizer, owner = distributed(bare, kind)
    train(model, optimizer, batches(3, 12))
    assert owner.has_overlapped
    hook = bare[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    if not is_on_all and world().rank > 0:
        hook.remove()
    x, y = part(rows(12, seed=9), "even")
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"called inside of backward\(\), as by a hook of a parameter, on rank 0"):
        cross_entropy(model(x), y).backward()
    hook.remove()
    train(model, optimizer, batches(8, 12)[3:])
    assert_alike(bare, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_thawed_alone(kind):
    """With an optimizer of their own."""

    def trained(distributed, cut):
        bare = tanh_model()
        bare[0].requires_grad_(False)
        model, optimizer, owner = distributed(bare, kind)
        later, seen = momentum(bare[0].parameters()), []
        for seed, own in enumerate([optimizer] * 4 + [later] * 4 + [optimizer] * 2):
            bare[2].requires_grad_(own is optimizer)
            bare[0].requires_grad_(own is later)
            x, y = cut(rows(12, seed=seed))
            own.zero_grad()
            cross_entropy(model(x), y).backward()
            own.step()
            seen.append(getattr(owner, "has_overlapped", False))
        return bare, seen

    found, seen = trained(distributed, lambda batch: part(batch, "even"))
    expected, _ = trained(lambda bare, kind: (bare, momentum(bare[2].parameters()), None), lambda batch: batch)
    assert_alike(found, expected)
    assert not several() or any(seen[5:8])
