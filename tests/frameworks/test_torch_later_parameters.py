"""Parameters that are thawed, or come, when a model is distributed, with an optimizer of their own."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

import mpidist  # noqa: E402
import mpidist.torch  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    CLASSES,
    COLUMNS,
    assert_alike,
    assert_same_bits,
    cross_entropy,
    momentum,
    part,
    rows,
    tanh_model,
    world,
)

pytestmark = pytest.mark.mpi


def is_trained(module, is_so, clears=True):
    module.requires_grad_(is_so)
    if clears:
        module.zero_grad()


def frozen_first():
    model = tanh_model()
    is_trained(model[0], False)
    return model


class Alone:
    """One process on all rows."""

    def __init__(self, model):
        self.model = self.net = model
        self.own = momentum(model.parameters())

    def loss(self, seed):
        x, y = rows(12, seed=seed)
        return cross_entropy(self.net(x), y)


class Mean(Alone):
    """A `DistributedDataParallel`."""

    op = "mean"

    def __init__(self, model):
        super().__init__(model)
        self.net = mpidist.torch.DistributedDataParallel(model, op=self.op)

    def loss(self, seed):
        x, y = part(rows(12, seed=seed), "even")
        return cross_entropy(self.net(x), y)


class Sum(Mean):
    """The same of sums."""

    op = "sum"

    def loss(self, seed):
        return super().loss(seed) / world().size


class Wrapped(Mean):
    """A `DistributedOptimizer` of all parameters."""

    def __init__(self, model):
        Alone.__init__(self, model)
        self.own = mpidist.torch.DistributedOptimizer(self.own, model.named_parameters())


WAYS = [Mean, Sum, Wrapped]


def step(training, optimizers, seed, clips=False):
    for each in optimizers:
        each.zero_grad()
    training.loss(seed).backward()
    if clips:
        torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
    for each in optimizers:
        each.step()


def thaw(training, clears, clips):
    """Train the head, then the first layer, which was frozen, by an optimizer of its own, then both."""
    first, head = training.model[0], training.model[2]
    step(training, [training.own], 0)
    is_trained(head, False, clears)
    is_trained(first, True)
    later = momentum(first.parameters())
    for seed in range(1, 4):
        step(training, [later], seed, clips)
    is_trained(head, True)
    for seed in range(4, 6):
        step(training, [training.own, later], seed, clips)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_parameters_that_are_thawed(way, clears, clips):
    training, expected = way(frozen_first()), Alone(frozen_first())
    for each in (training, expected):
        thaw(each, clears, clips and clears)  # gradients that were left would be clipped, too
    assert_alike(training.model, expected.model)


@pytest.mark.parametrize("way", WAYS)
def test_the_first_gradients_of_thawed_parameters(way):
    """There when ``backward()`` returns, also where all passes before were held."""
    training, expected = way(frozen_first()), Alone(frozen_first())
    owner = training.own if way is Wrapped else training.net
    for each in (training, expected):
        is_trained(each.model[2], False)
        is_trained(each.model[0], True)
    with owner.no_sync():
        training.loss(0).backward()
        training.loss(1).backward()
    training.loss(2).backward()
    for seed in range(3):
        expected.loss(seed).backward()
    for found, wanted in zip(training.model[0].parameters(), expected.model[0].parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)
    assert_same_bits(*(each.grad for each in training.model[0].parameters()))


def add(training, clips):
    """Train all, then only a layer that comes, by an optimizer of its own, then all."""
    model = training.model
    step(training, [training.own], 0)
    is_trained(model, False)
    torch.manual_seed(5)
    model.append(torch.nn.Linear(CLASSES, CLASSES).double())
    later = momentum(model[3].parameters())
    for seed in range(1, 4):
        step(training, [later], seed, clips)
    is_trained(model, True)
    for seed in range(4, 6):
        step(training, [training.own, later], seed, clips)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("way", [Mean, Sum])
def test_parameters_that_come(way, clips):
    training, expected = way(tanh_model()), Alone(tanh_model())
    for each in (training, expected):
        add(each, clips)
    assert_alike(training.model, expected.model)


@pytest.mark.mpi(min_size=2)
def test_parameters_that_come_with_other_values():
    training = Mean(tanh_model())
    is_trained(training.model, False)
    torch.manual_seed(world().rank)
    training.model.append(torch.nn.Linear(CLASSES, CLASSES).double())
    with pytest.raises(CollectiveMismatchError, match=r"new parameter '3.weight' has other values on rank 1"):
        training.loss(0).backward()
    world().barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("change, told", [
    (lambda model: None, r"got thawed '0\.weight', '0\.bias', expected only those that were trained before"),
    (lambda model: model.append(torch.nn.Linear(CLASSES, CLASSES).double()), r"got new '3\.weight', '3\.bias'"),
], ids=["thawed", "new"])  # fmt: skip
@pytest.mark.parametrize("is_strategy", [False, True])
def test_those_that_a_distributed_optimizer_does_not_have(is_strategy, change, told):
    """No step of a distributed optimizer comes."""
    model = frozen_first()
    optimizer = momentum(model[2].parameters())
    if is_strategy:
        optimizer = mpidist.MultiWorkerMirroredStrategy().distribute(model, optimizer, op="mean")[1]
    else:
        optimizer = mpidist.torch.DistributedOptimizer(optimizer, model.named_parameters())
    x, y = part(rows(12), "even")
    cross_entropy(model(x), y).backward()
    optimizer.step()
    is_trained(model[2], False)
    change(model)
    later = model[3:] if len(model) > 3 else is_trained(model[0], True) or model[0]
    before = [each.detach().clone() for each in later.parameters()]
    own = momentum(later.parameters())
    cross_entropy(model(x), y).backward()
    with pytest.raises(CollectiveMismatchError, match=told):
        own.step()
    assert all(map(torch.equal, later.parameters(), before))
    world().barrier()


def test_parameters_that_another_distributed_optimizer_has():
    """Though the first one looks for them before that one reduces their first gradients."""

    def trained(distributed, cut):
        model = frozen_first()
        head = distributed(momentum([model[2].bias]), model.named_parameters())
        rest = distributed(momentum([*model[0].parameters(), model[2].weight]), model.named_parameters())
        for seed in range(4):
            is_trained(model[0], seed >= 2)
            x, y = cut(rows(12, seed=seed))
            model.zero_grad()
            cross_entropy(model(x), y).backward()
            rest.step()
            head.step()
        return model

    found = trained(mpidist.torch.DistributedOptimizer, lambda batch: part(batch, "even"))
    assert_alike(found, trained(lambda optimizer, named: optimizer, lambda batch: batch))


def test_another_model_and_its_optimizer_are_nobody_s_business():
    """Whatever its parameters do, in an optimizer that is not distributed."""
    model, other = tanh_model(), frozen_first()
    optimizer = mpidist.torch.DistributedOptimizer(momentum(model.parameters()), model.named_parameters())
    own, call = momentum(other.parameters()), world().control.call
    for _ in range(2):
        x, y = rows(4, seed=world().rank)
        own.zero_grad()
        cross_entropy(other(x), y).backward()
        own.step()
        is_trained(other[0], True)
    assert world().control.call == call
    del optimizer


def test_each_rank_goes_on_alone_when_its_optimizer_is_dropped():
    model = frozen_first()
    optimizer = mpidist.torch.DistributedOptimizer(momentum(model[2].parameters()), model.named_parameters())
    optimizer.circle = optimizer
    del optimizer
    is_trained(model[0], True)
    own, call = momentum(model[0].parameters()), world().control.call
    if world().rank == 0:
        for seed in range(2):
            x, y = rows(4, seed=seed)
            model[:2](x).square().mean().backward()
            own.step()
    assert world().control.call == call


def test_frozen_parameters_that_another_distributed_model_trains():
    """As the discriminator that is frozen in the steps of a generator."""

    def trained(wrap, cut):
        torch.manual_seed(3)
        judge, maker = torch.nn.Linear(COLUMNS, 1).double(), torch.nn.Linear(COLUMNS, COLUMNS).double()
        judge.requires_grad_(False)
        both = wrap(torch.nn.Sequential(maker, judge))
        judge.requires_grad_(True)
        judging = wrap(judge)
        makes, judges = momentum(maker.parameters()), momentum(judge.parameters())
        for seed in range(3):
            x = cut(rows(12, seed=seed)[0])
            judges.zero_grad()
            (judging(x).square().mean() - judging(maker(x).detach()).mean()).backward()
            judges.step()
            judge.requires_grad_(False)
            makes.zero_grad()
            both(x).square().mean().backward()
            makes.step()
            judge.requires_grad_(True)
        return torch.nn.Sequential(maker, judge)

    found = trained(mpidist.torch.DistributedDataParallel, lambda x: part((x, x), "even")[0])
    assert_alike(found, trained(lambda module: module, lambda x: x))


def test_what_is_frozen_stays_as_it_is():
    """Numbers that have no gradients may be parameters, too."""
    bare = frozen_first()
    bare[0].table = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    bare[0].mask = torch.nn.Parameter(torch.ones(3, dtype=torch.bool), requires_grad=False)
    training = Mean(bare)
    for seed in range(2):
        step(training, [training.own], seed)
    assert not any(each.requires_grad for each in bare[0].parameters())
    assert all(each.grad is None for each in bare[0].parameters())


def test_parameters_that_stand_in_for_a_pass_are_not_kept():
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    x, y = part(rows(12), "even")
    known = []
    for _ in range(3):
        call = world().control.call
        given = {name: each.detach().clone().requires_grad_() for name, each in model.named_parameters()}
        cross_entropy(torch.func.functional_call(model, given, (x,)), y).backward()
        assert world().control.call == call and all(each.grad is not None for each in given.values())
        known += map(weakref.ref, given.values())
    del given
    gc.collect()
    cross_entropy(model(x), y).backward()
    assert_same_bits(*(each.grad for each in model.parameters()))
    assert not any(each() is not None for each in known)
    given = dict(model.named_parameters())
    found = torch.func.grad(lambda own: torch.func.functional_call(model, own, (x,)).sum())(given)
    assert found["module.2.bias"].tolist() == [len(x)] * CLASSES
    assert len(model._reduction.ownership._watched) == len([*model.parameters()])
