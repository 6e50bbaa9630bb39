"""Steps inside of backward passes: an error on all ranks where their gradients are not reduced yet."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

import mpidist.torch  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    assert_alike,
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

BEHIND = r"called inside of backward\(\), as by a hook of a parameter, on rank {} of \d+;(.|\n)*Call step\(\) behind"


def everybody():
    return ", ".join(map(str, range(world().size)))


def stepping(parameters, optimizer_of):
    """Have hooks of parameters step, as for an optimizer in the backward pass; return what removes them."""

    def hook(parameter):
        optimizer = optimizer_of(parameter)
        optimizer.step()
        optimizer.zero_grad()

    return [each.register_post_accumulate_grad_hook(hook) for each in parameters]


def each_its_own(model):
    """Return the model, its optimizer, and hooks that step one for each parameter."""
    net = mpidist.torch.DistributedDataParallel(model)
    own = {id(each): momentum([each]) for each in model.parameters()}
    return net, momentum(model.parameters()), stepping(model.parameters(), lambda each: own[id(each)])


def before_it_is_wrapped(model):
    net, optimizer = model, momentum(model.parameters())
    hooks = stepping(model.parameters(), lambda each: optimizer)
    return mpidist.torch.DistributedDataParallel(net), optimizer, hooks


def distributed(model):
    optimizer = mpidist.torch.DistributedOptimizer(momentum(model.parameters()), model.named_parameters())
    return model, optimizer, stepping(model.parameters(), lambda each: optimizer)


def before_it_is_distributed(model):
    optimizer = momentum(model.parameters())
    hooks = stepping(model.parameters(), lambda each: optimizer)
    return model, mpidist.torch.DistributedOptimizer(optimizer), hooks


def beside_a_distributed_one(model):
    own = {id(each): momentum([each]) for each in model.parameters()}
    hooks = stepping(model.parameters(), lambda each: own[id(each)])
    return model, mpidist.torch.DistributedOptimizer(momentum(model.parameters())), hooks


def of_the_last_gradient(model):
    optimizer = mpidist.torch.DistributedOptimizer(momentum(model.parameters()))
    return model, optimizer, stepping([model[0].weight], lambda each: optimizer)


WAYS = [
    each_its_own,
    before_it_is_wrapped,
    distributed,
    before_it_is_distributed,
    beside_a_distributed_one,
    of_the_last_gradient,
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_on_all", [True, False], ids=["on all ranks", "on one rank"])
@pytest.mark.parametrize("make", WAYS)
def test_a_step_inside_a_pass(make, is_on_all):
    """It changes nothing, and after the error all can go on."""
    model = tanh_model()
    expected = trained_alone(model, momentum, batches(3, 12))
    net, optimizer, hooks = make(model)
    if not is_on_all and world().rank != last():
        for each in hooks:
            each.remove()
    x, y = part(rows(12, seed=7), "even")
    with pytest.raises(RuntimeError, match=BEHIND.format(everybody() if is_on_all else last())):
        cross_entropy(net(x), y).backward()
    assert_alike(model, tanh_model(), 0)
    for each in hooks:
        each.remove()
    for batch in batches(3, 12):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        optimizer.step()
    assert_alike(model, expected)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("reduce", [
    lambda optimizer: optimizer.synchronize(),
    lambda optimizer: optimizer.step(lambda: None),
], ids=["synchronize", "closure"])  # fmt: skip
def test_what_else_reduces_inside_a_pass(reduce):
    """Of one gradient all would be reduced, and of the next ones nothing."""
    model = tanh_model()
    optimizer = mpidist.torch.DistributedOptimizer(momentum(model.parameters()))
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda _: reduce(optimizer))
    x, y = part(rows(12), "even")
    with pytest.raises(RuntimeError, match=BEHIND.format(everybody())):
        cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("make", [each_its_own, beside_a_distributed_one])
def test_hooks_that_reduce_by_themselves(monkeypatch, make):
    """As the message says."""
    model = tanh_model()
    expected = trained_alone(model, momentum, batches(3, 12))

    def reduce(parameter):
        mpidist.torch.allreduce_(parameter.grad)

    for each in model.parameters():
        each.register_post_accumulate_grad_hook(reduce)
    net, optimizer, _ = make(model)
    owner = optimizer if net is model else net
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("half a second for each parameter"))
    for batch in batches(3, 12):
        x, y = part(batch, "even")
        with owner.no_sync(), owner.skip_synchronize():
            cross_entropy(net(x), y).backward()
    assert_alike(model, expected)


def inner_training(owner_of):
    """Return the inner model and a loss in whose backward pass it makes two steps."""
    inner = tanh_model()
    net, optimizer = owner_of(inner)

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, batch):
            ctx.batch = batch
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            x, y = ctx.batch
            with torch.enable_grad():
                for start in (0, 1):
                    optimizer.zero_grad()
                    cross_entropy(net(x[start::2]), y[start::2]).backward()
                    optimizer.step()
            return gradient.expand(3), None

    return inner, lambda batch: Inner.apply(torch.ones(3, requires_grad=True), batch)


@pytest.mark.parametrize("owner_of", [
    lambda inner: (mpidist.torch.DistributedDataParallel(inner), momentum(inner.parameters())),
    lambda inner: (inner, mpidist.torch.DistributedOptimizer(momentum(inner.parameters()))),
], ids=["module", "optimizer"])  # fmt: skip
def test_a_training_inside_a_pass_of_another_loss(owner_of):
    """Its own passes are over when it makes its steps."""
    inner, loss = inner_training(owner_of)
    expected, alone = inner_training(lambda inner: (inner, momentum(inner.parameters())))
    for seed in range(2):
        x, y = rows(4 * world().size, seed=seed)
        alone((x, y)).backward()
        mine = slice(4 * world().rank, 4 * world().rank + 4)
        loss((x[mine], y[mine])).backward()
    assert_alike(inner, expected)
