"""`DistributedDataParallel`: what PyTorch's own documentation says of it, on any number of ranks."""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.distributed.algorithms.join import Join  # noqa: E402
from torch.nn.parallel.distributed import _MixedPrecision as MixedPrecision  # noqa: E402

import mpidist.torch  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    CLASSES,
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


@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
def test_ranks_equal_one_process_on_the_global_batch(kind):
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(6, 12))
    model = mpidist.torch.DistributedDataParallel(bare)
    optimizer = momentum(model.parameters())
    for batch in batches(6, 12):
        x, y = part(batch, kind)
        optimizer.zero_grad()
        model.rows = len(x)
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert model.module is bare
    assert_alike(bare, expected)


def test_gradients_are_there_when_backward_returns_and_the_same_on_all_ranks():
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    x, y = rows(5, seed=world().rank)
    cross_entropy(model(x), y).backward()
    assert_same_bits(*(each.grad for each in model.parameters()))


def test_all_begin_with_the_parameters_and_buffers_of_rank_0():
    bare = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        bare[0].weight.fill_(world().rank)
        bare[1].running_mean.fill_(world().rank + 5)
    mpidist.torch.DistributedDataParallel(bare)
    assert (bare[0].weight == 0).all() and (bare[1].running_mean == 5).all()
    assert_same_bits(*bare.parameters())


def test_no_sync_accumulates_and_the_next_pass_reduces_all():
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(3, 24))
    model = mpidist.torch.DistributedDataParallel(bare)
    optimizer = momentum(model.parameters())
    for batch in batches(3, 24):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        before = world().control.call
        with model.no_sync():
            (cross_entropy(model(x[::2]), y[::2]) / 2).backward()
        assert world().control.call == before
        (cross_entropy(model(x[1::2]), y[1::2]) / 2).backward()
        optimizer.step()
    assert_alike(bare, expected)


@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_parameters_that_are_not_reached(find_unused_parameters):
    """On some ranks: zeros.  On all: no gradient, so that momentum and weight decay leave them alone."""
    bare = torch.nn.ModuleDict({name: torch.nn.Linear(4, 2).double() for name in "abc"})
    model = mpidist.torch.DistributedDataParallel(bare, find_unused_parameters=find_unused_parameters)
    model.forward = lambda x: bare["a" if world().rank == 0 else "b"](x)
    x = torch.full((3, 4), 2.0, dtype=torch.float64)
    model(x).sum().backward()
    size = world().size
    assert bare["c"].weight.grad is None
    assert (bare["a"].weight.grad == 6.0 / size).all()
    if size > 1:
        torch.testing.assert_close(bare["b"].weight.grad, torch.full((2, 4), 6.0 * (size - 1) / size).double())
    else:
        assert bare["b"].weight.grad is None


def test_buffers_are_rank_0_s_before_each_forward_pass():
    bare = torch.nn.BatchNorm1d(COLUMNS).double()
    alone = copy.deepcopy(bare)
    model = mpidist.torch.DistributedDataParallel(bare)
    for turn in range(3):
        model(rows(6, seed=turn + 10 * world().rank)[0]).sum().backward()
        alone(rows(6, seed=turn)[0])  # what rank 0 has seen
    model(rows(6, seed=7)[0])  # begins with those of rank 0, and then all see the same
    alone(rows(6, seed=7)[0])
    torch.testing.assert_close(bare.running_var, alone.running_var, rtol=1e-13, atol=0)
    assert bare.num_batches_tracked == 4
    before = world().control.call
    model.eval()
    model(rows(6)[0])
    assert world().control.call == before


def test_buffers_stay_local_where_that_is_asked_for():
    bare = torch.nn.BatchNorm1d(COLUMNS).double()
    alone = copy.deepcopy(bare)
    model = mpidist.torch.DistributedDataParallel(bare, broadcast_buffers=False)
    for turn in range(3):
        model(rows(6, seed=turn + 10 * world().rank)[0])
        alone(rows(6, seed=turn + 10 * world().rank)[0])
    assert torch.equal(bare.running_mean, alone.running_mean)


def test_its_state_is_that_of_the_bare_module_and_either_is_loaded(tmp_path):
    bare = tanh_model(seed=4)
    model = mpidist.torch.DistributedDataParallel(bare)
    assert model.state_dict().keys() == bare.state_dict().keys()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other = tanh_model(seed=8)
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert_alike(other, bare, 0)
    fresh = mpidist.torch.DistributedDataParallel(tanh_model(seed=9))
    fresh.load_state_dict({f"module.{name}": each for name, each in bare.state_dict().items()})
    assert_alike(fresh.module, bare, 0)
    fresh.load_state_dict(tanh_model(seed=9).state_dict())
    assert_alike(fresh.module, tanh_model(seed=9), 0)
    with pytest.raises(RuntimeError, match="Missing key"):
        fresh.load_state_dict({"module.nothing": torch.zeros(1)})


class Around(torch.nn.Module):
    """A net, whose own net may be called like the one of PyTorch's class, in a module around it."""

    def __init__(self, net):
        super().__init__()
        self.net, self.head = net, torch.nn.Linear(CLASSES, 2).double()


def named_module(seed):
    return torch.nn.ModuleDict({"module": torch.nn.Sequential(torch.nn.BatchNorm1d(3), tanh_model(seed))})


def wrapping_module(seed):
    """Return a layer around another of the same names."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(2, 3).double()
    model.module = torch.nn.Linear(2, 3).double()
    return model


@pytest.mark.parametrize("make", [tanh_model, named_module, wrapping_module])
@pytest.mark.parametrize("around", [Around, lambda net: torch.nn.Sequential(torch.nn.Sequential(net), tanh_model(2))])
def test_a_module_around_it_loads_its_own_state(make, around):
    """Which is that of the module without it; that with PyTorch's own class is loaded, too."""

    def of_pytorch(state):
        at = min(name for name in state if name.startswith(("net.", "0.")))
        at = "net." if at.startswith("net.") else "0.0."
        return {name.replace(at, f"{at}module.", 1): each for name, each in state.items()}

    plain = around(make(4))
    for change in (dict, of_pytorch, lambda state: state):
        for strict in (True, False):
            outer = around(mpidist.torch.DistributedDataParallel(make(9)))
            assert outer.state_dict().keys() == plain.state_dict().keys()
            missing, unexpected = outer.load_state_dict(change(plain.state_dict()), strict=strict)
            assert not missing and not unexpected
            assert_alike(outer, plain, 0)
            outer.load_state_dict(outer.state_dict())
            assert_alike(outer, plain, 0)
    with pytest.raises(RuntimeError, match="Missing key"):
        outer.load_state_dict({name: each for name, each in plain.state_dict().items() if "weight" not in name})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        outer.load_state_dict({**plain.state_dict(), "net.nothing": rows(1)[0], "0.0.nothing": rows(1)[0]})


class Turned(torch.nn.Linear):
    """A layer whose states of the first version have the transposed weight, as has one without a version."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args):
        if local_metadata.get("version", 1) < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].T
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def turned(seed):
    torch.manual_seed(seed)
    return torch.nn.ModuleDict({"module": torch.nn.Sequential(Turned(3, 3)), "turned": Turned(3, 3)})


def of_pytorch(model, at):
    """Return the state of a model whose part there is in PyTorch's own class."""

    class Wrapped(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    if not at:
        return Wrapped(model).state_dict()
    return model.__class__(*(Wrapped(each) for each in model)).state_dict()


@pytest.mark.parametrize("make", [turned, lambda seed: turned(seed)["turned"]])
@pytest.mark.parametrize("is_nested", [False, True])
def test_layers_that_look_at_the_version_of_a_state(make, is_nested, tmp_path):
    """In any state that is loaded through it; the state stays as it was."""
    plain = torch.nn.Sequential(make(4)) if is_nested else make(4)

    def distributed(seed):
        model = mpidist.torch.DistributedDataParallel(make(seed))
        return torch.nn.Sequential(model) if is_nested else model

    model = distributed(7)
    old = OrderedDict((name, each.T.contiguous()) for name, each in plain.state_dict().items())  # of no version
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    for state in (plain.state_dict(), torch.load(tmp_path / "model.pt"), of_pytorch(plain, is_nested), old):
        versions = copy.deepcopy(getattr(state, "_metadata", None))
        for _ in range(2):
            model.load_state_dict(state)
            assert_alike(model, plain, 0)
            assert getattr(state, "_metadata", None) == versions
        other = distributed(9)
        other.load_state_dict(model.state_dict())
        assert_alike(other, plain, 0)
        again = torch.nn.Sequential(make(5)) if is_nested else make(5)
        again.load_state_dict(model.state_dict())
        assert_alike(again, plain, 0)


def test_a_sum_in_place_of_the_mean():
    model = mpidist.torch.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False), op="sum")
    model(torch.ones(1, 2) * (world().rank + 1)).sum().backward()
    size = world().size
    assert model.module.weight.grad.tolist() == [[size * (size + 1) / 2] * 2]


def test_a_model_that_a_strategy_distributes_by_itself():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    bare = tanh_model()
    expected = trained_alone(bare, momentum, batches(3, 12))
    model = strategy.distribute(bare)
    assert isinstance(model, mpidist.torch.DistributedDataParallel)
    optimizer = momentum(model.parameters())
    for batch in batches(3, 12):
        x, y = part(batch, "uneven")
        optimizer.zero_grad()
        losses = cross_entropy(model(x), y, reduction="none")
        mpidist.torch.compute_average_loss(losses, global_batch_size=12).backward()
        optimizer.step()
    assert_alike(bare, expected)


def test_checkpointed_activations():
    """A pass inside the pass, whose end is not the end of all."""
    from torch.utils.checkpoint import checkpoint

    for use_reentrant in (False, True):
        bare = tanh_model()
        expected = trained_alone(bare, momentum, batches(3, 12))
        model = mpidist.torch.DistributedDataParallel(bare)
        model.forward = lambda x, bare=bare, how=use_reentrant: checkpoint(bare, x, use_reentrant=how)
        optimizer = momentum(model.parameters())
        for batch in batches(3, 12):
            x, y = part(batch, "even")
            optimizer.zero_grad()
            cross_entropy(model(x.requires_grad_()), y).backward()
            optimizer.step()
        assert_alike(bare, expected)


def test_gradients_by_autograd_grad_are_local():
    model = mpidist.torch.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    before = world().control.call
    (gradient,) = torch.autograd.grad(model(torch.full((1, 2), 1.0 + world().rank)).sum(), model.module.weight)
    assert world().control.call == before
    assert gradient.tolist() == [[1.0 + world().rank] * 2]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind, named", [("shape", r"0\.weight"), ("buffer", "1.running_mean")])
def test_modules_that_differ_between_ranks(kind, named):
    width = 7 if world().rank == 1 and kind == "shape" else CLASSES
    bare = torch.nn.Sequential(torch.nn.Linear(COLUMNS, width))
    if kind == "buffer":
        bare.append(torch.nn.BatchNorm1d(width, affine=False, track_running_stats=world().rank != 1))
    with pytest.raises(CollectiveMismatchError, match=f"rank 1(.|\n)*{named}|{named}(.|\n)*rank 1"):
        mpidist.torch.DistributedDataParallel(bare)
    world().barrier()


def reduced(values, **settings):
    """Return the mean of gradients that are these values on every rank, of a model with such settings."""
    hook = settings.pop("hook", None)
    model = mpidist.torch.DistributedDataParallel(torch.nn.Linear(len(values), 1, bias=False), **settings)
    if hook is not None:
        model.register_comm_hook(None, hook)
    model(torch.tensor([values])).sum().backward()
    return model.module.weight.grad[0].tolist()


#: The second has more bits than float16, the third more than bfloat16.
EXACT = [1.0, 1 + 2.0**-12, 1 + 2.0**-9]
SHORT = {
    "none": (EXACT, {}),
    "allreduce_hook": (EXACT, {"hook": default_hooks.allreduce_hook}),
    "comm_hook": (EXACT, {"hook": mpidist.torch.comm_hook}),
    "fp16_compress_hook": ([1.0, 1.0, 1 + 2.0**-9], {"hook": default_hooks.fp16_compress_hook}),
    "bf16_compress_hook": ([1.0, 1.0, 1.0], {"hook": default_hooks.bf16_compress_hook}),
    "Float16": ([1.0, 1.0, 1 + 2.0**-9], {"compression": mpidist.compression.Float16()}),
    "float16": ([1.0, 1.0, 1 + 2.0**-9], {"mixed_precision": MixedPrecision(reduce_dtype=torch.float16)}),
    "bfloat16": ([1.0, 1.0, 1.0], {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)}),
    "nothing": (EXACT, {"mixed_precision": MixedPrecision()}),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", SHORT)
def test_gradients_travel_in_the_dtype_that_is_asked_for(name):
    expected, settings = SHORT[name]
    assert reduced(EXACT, **settings) == expected


@pytest.mark.mpi(min_size=2)
def test_a_hook_on_one_rank_only():
    hook = default_hooks.fp16_compress_hook if world().rank == 1 else default_hooks.allreduce_hook
    with pytest.raises(CollectiveMismatchError, match="rank 1"):
        reduced(EXACT, hook=hook)
    world().barrier()


def test_hooks_and_settings_that_are_refused():
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    with pytest.raises(NotImplementedError, match="hook mine would be called with buckets.*fp16_compress_hook"):
        model.register_comm_hook(None, lambda_named("mine"))
    with pytest.raises(ValueError, match="register the hook with None"):
        model.register_comm_hook(object(), default_hooks.allreduce_hook)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for given in ({"param_dtype": torch.float16}, {"buffer_dtype": torch.float16}, {"reduce_dtype": torch.float64}):
        with pytest.raises(NotImplementedError, match=r"Compute inside of torch.autocast, and give reduce_dtype alone"):
            mpidist.torch.DistributedDataParallel(tanh_model(), mixed_precision=MixedPrecision(**given))
    for given in (True, False, "float16", torch.float16, MixedPrecision, MixedPrecision(reduce_dtype="float16")):
        with pytest.raises(TypeError, match=r"mixed_precision=.*it is None, or PyTorch's settings with dtypes"):
            mpidist.torch.DistributedDataParallel(tanh_model(), mixed_precision=given)
    both = {"mixed_precision": MixedPrecision(), "compression": mpidist.compression.Float16()}
    with pytest.raises(ValueError, match="give one of them"):
        mpidist.torch.DistributedDataParallel(tanh_model(), **both)
    with pytest.raises(
        NotImplementedError, match=r"write `with model.join\(\):` in place of `with Join\(\[model\]\):`"
    ):
        Join([model])


def lambda_named(name):
    def hook(state, bucket):
        raise AssertionError

    hook.__name__ = name
    return hook


def test_what_is_refused():
    with pytest.raises(TypeError, match="takes a torch.nn.Module, got a list"):
        mpidist.torch.DistributedDataParallel([])
    with pytest.raises(RuntimeError, match="no parameter of the module requires a gradient"):
        mpidist.torch.DistributedDataParallel(torch.nn.ReLU())
    with pytest.raises(ValueError, match="process_group"):
        mpidist.torch.DistributedDataParallel(tanh_model(), process_group=object())
    model = mpidist.torch.DistributedDataParallel(tanh_model())
    with pytest.raises(TypeError, match="save or copy its `module`"):
        copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"reduced by DistributedDataParallel\(Sequential\) already"):
        mpidist.torch.DistributedOptimizer(momentum(model.parameters()))
    with pytest.raises(ValueError, match="rows=-1"):
        model.rows = -1
