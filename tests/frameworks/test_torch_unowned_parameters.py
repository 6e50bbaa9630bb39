"""Parameters that a model gets after its optimizer was distributed: nobody reduces their gradients, and all are told.

What is meant to be each rank's own, or trained by nobody, stays so without an error.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils import parametrizations, prune  # noqa: E402

import mpidist  # noqa: E402
import mpidist.torch  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    CLASSES,
    COLUMNS,
    assert_alike,
    assert_same_bits,
    cross_entropy,
    last,
    momentum,
    part,
    rows,
    tanh_model,
    world,
)

pytestmark = pytest.mark.mpi


class Net(torch.nn.Module):
    """A layer, what may come after it, and a head."""

    def __init__(self):
        super().__init__()
        bare = tanh_model()
        self.first, self.head = bare[0], bare[2]
        self.extra = None

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.head(x if self.extra is None else self.extra(x))


def distributed(model, parameters=None, way="names"):
    """Return the optimizer; its gradients are means."""
    optimizer = momentum(model.parameters() if parameters is None else parameters)
    if way == "names":
        return mpidist.torch.DistributedOptimizer(optimizer, model.named_parameters())
    return mpidist.MultiWorkerMirroredStrategy().distribute(model, optimizer, op="mean")[1]


def step(model, optimizer, seed, is_whole=False):
    batch = rows(12, seed=seed)
    x, y = batch if is_whole else part(batch, "even")
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    optimizer.step()


def other_weight(model):
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())


def other_layer(model):
    model.head = torch.nn.Linear(17, CLASSES).double()


def other_state(model):
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)


def other_dtype(model):
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.head.float().double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def other_table(model):
    model.head._parameters["weight"] = torch.nn.Parameter(torch.ones(CLASSES, 17, dtype=torch.float64))


def norm(model):
    parametrizations.weight_norm(model.head)


def old_norm(model):
    with pytest.warns(FutureWarning, match="weight_norm"):
        torch.nn.utils.weight_norm(model.head)


def one_more_layer(model):
    model.extra = torch.nn.Linear(17, 17).double()


def one_more_parameter(model):
    model.first.register_parameter("shift", torch.nn.Parameter(torch.zeros(17, dtype=torch.float64)))
    model.first.register_forward_hook(lambda layer, args, found: found + layer.shift)


BEFORE = "expected only those that were there before"
CHANGES = [
    (other_weight, "got new 'head.weight', expected 'head.weight' as the optimizer has it"),
    (other_layer, "got new 'head.weight', 'head.bias', expected 'head.weight', 'head.bias'"),
    (other_state, "got new 'first.weight', 'first.bias', 'head.weight', 'head.bias', expected 'first.weight'"),
    (other_dtype, "got new 'head.weight', 'head.bias', expected 'head.weight', 'head.bias'"),
    (other_table, "got new 'head.weight', expected 'head.weight'"),
    (norm, "original0', 'head.parametrizations.weight.original1', expected 'head.weight'"),
    (old_norm, "got new 'head.weight_g', 'head.weight_v', expected 'head.weight'"),
    (one_more_layer, f"got new 'extra.weight', 'extra.bias', {BEFORE}"),
    (one_more_parameter, f"got new 'first.shift', {BEFORE}"),
]


@pytest.mark.parametrize("change, told", CHANGES, ids=[change.__name__ for change, _ in CHANGES])
@pytest.mark.parametrize("is_on_all", [False, True], ids=["on one rank", "on all ranks"])
@pytest.mark.parametrize("way", ["names", "strategy"])
def test_parameters_that_come_later(way, is_on_all, change, told):
    model = Net()
    optimizer = distributed(model, way=way)
    step(model, optimizer, 0)
    if is_on_all or world().rank == last():
        change(model)
    with pytest.raises(CollectiveMismatchError) as caught:
        step(model, optimizer, 1)
    there = ", ".join(map(str, range(world().size))) if is_on_all else last()
    assert f"rank {there} of {world().size} got new" in str(caught.value) and told in str(caught.value)
    assert "add_param_group" in str(caught.value) and "copy_" in str(caught.value)
    world().barrier()


@pytest.mark.parametrize("way", ["names", "strategy"])
def test_before_the_first_step(way):
    model = Net()
    optimizer = distributed(model, way=way)
    other_weight(model)
    with pytest.raises(CollectiveMismatchError, match="expected 'head.weight' as the optimizer has it"):
        step(model, optimizer, 0)


def test_of_several_modules_that_are_distributed_together():
    first, second = tanh_model(), tanh_model(1)
    parameters = [*first.parameters(), *second.parameters()]
    *_, optimizer = mpidist.MultiWorkerMirroredStrategy().distribute(first, second, momentum(parameters), op="mean")
    second[2].bias = torch.nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64))
    with pytest.raises(CollectiveMismatchError, match="got new '1.2.bias', expected '1.2.bias'"):
        step(lambda x: first(x) + second(x), optimizer, 0)


def test_what_an_optimizer_has_a_part_of_is_each_rank_s_own():
    """The backbone is trained by nobody, and changes as it likes; the head is."""
    model, expected = Net(), Net()
    optimizer, alone = distributed(model, model.head.parameters()), momentum(expected.head.parameters())
    for seed, change in enumerate([lambda net: None, other_first, one_more_tensor, lambda net: None]):
        for net in (model, expected):
            change(net)
        step(model, optimizer, seed)
        step(expected, alone, seed, True)
    assert model.first.weight.grad is not None
    assert_alike(model, expected)


def other_first(model):
    model.first.weight = torch.nn.Parameter(model.first.weight.detach() * 0.5)


def one_more_tensor(model):
    model.first.scale = torch.nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    model.first.register_forward_hook(lambda layer, args, found: found * layer.scale)


def test_a_parameter_of_each_rank_s_own_that_is_made_anew():
    """As the noise of a training against adversaries."""

    class Noisy(Net):
        def __init__(self):
            super().__init__()
            self.renew()

        def renew(self):
            self.noise = torch.nn.Parameter(torch.zeros(COLUMNS, dtype=torch.float64))

        def forward(self, x):
            return super().forward(x + self.noise)

    model, expected = Noisy(), Noisy()
    trained = [each for name, each in model.named_parameters() if name != "noise"]
    optimizer = distributed(model, trained)
    alone = momentum(each for name, each in expected.named_parameters() if name != "noise")
    for seed in range(4):
        model.renew()
        gc.collect()
        step(model, optimizer, seed)
        step(expected, alone, seed, True)
        assert model.noise.grad is not None
    assert_alike(model, expected)


def frozen(model):
    model.head.bias.requires_grad_(False)
    model.head.bias.grad = None


def thawed(model):
    model.head.bias.requires_grad_(True)


def copy_without_gradients(model):
    model.average = copy.deepcopy(model.first)


def frozen_layer(model):
    model.first = copy.deepcopy(model.first).requires_grad_(False)


def values(model):
    with torch.no_grad():
        model.head.weight.copy_(torch.full_like(model.head.weight, 0.25))
        model.first.weight.data = torch.full_like(model.first.weight, 0.125)


def pruned(model):
    prune.l1_unstructured(model.head, "weight", 0.5)


def orthogonal(model):
    parametrizations.spectral_norm(model.head)


def moved(model):
    model.extra = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Identity())
    model.head, model.other = torch.nn.Sequential(model.head), model.head


@pytest.mark.parametrize("changes", [
    (frozen, thawed), (copy_without_gradients,), (frozen_layer,), (values,), (pruned,), (orthogonal,), (moved,),
], ids=lambda changes: changes[0].__name__)  # fmt: skip
@pytest.mark.parametrize("way", ["names", "strategy"])
def test_changes_that_keep_what_is_trained(way, changes):
    """As in one process."""
    model, expected = Net(), Net()
    optimizer, alone = distributed(model, way=way), momentum(expected.parameters())
    for seed, change in enumerate([lambda net: None, *changes, lambda net: None]):
        for net in (model, expected):
            torch.manual_seed(3)
            change(net)
        step(model, optimizer, seed)
        step(expected, alone, seed, True)
    assert_alike(model, expected)


def test_the_optimizer_gets_what_is_new():
    """All begin with rank 0's."""
    model, expected = Net(), Net()
    optimizer, alone = distributed(model), momentum(expected.parameters())
    step(model, optimizer, 0)
    step(expected, alone, 0, True)
    for net, own, seed in ((model, optimizer, world().rank), (expected, alone, 0)):
        torch.manual_seed(seed)
        other_layer(net)
        own.add_param_group({"params": net.head.parameters()})
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(expected, alone, seed, True)
    assert_alike(model, expected)


def test_an_optimizer_that_is_made_anew():
    model, expected = Net(), Net()
    optimizer, alone = distributed(model), momentum(expected.parameters())
    step(model, optimizer, 0)
    step(expected, alone, 0, True)
    del optimizer
    for net in (model, expected):
        torch.manual_seed(5)
        other_layer(net)
    optimizer, alone = distributed(model), momentum(expected.parameters())
    for seed in (1, 2):
        step(model, optimizer, seed)
        step(expected, alone, seed, True)
    assert_alike(model, expected)


def test_two_optimizers_of_one_module():
    """What one has is nothing new to the other."""
    model = Net()
    optimizers = [distributed(model, each.parameters()) for each in (model.first, model.head)]
    one_more_layer(model)
    optimizers.append(distributed(model, model.extra.parameters()))
    for seed in range(3):
        x, y = part(rows(12, seed=seed), "even")
        model.zero_grad()
        cross_entropy(model(x), y).backward()
        for each in optimizers:
            each.step()
    assert_same_bits(*model.parameters())


def test_the_optimizer_keeps_no_module():
    model = Net()
    optimizer = distributed(model)
    step(model, optimizer, 0)
    known = weakref.ref(model)
    trained = [model.first, model.head]
    del model
    gc.collect()
    assert known() is None
    step(lambda x: trained[1](torch.tanh(trained[0](x))), optimizer, 1)
    assert_same_bits(*trained[0].parameters())
