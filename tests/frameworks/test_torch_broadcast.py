"""What all ranks get from one: parameters, optimizers' states; and which rows each reads."""

from __future__ import annotations

import copy
import io
import warnings

import pytest

torch = pytest.importorskip("torch")

import mpidist  # noqa: E402
import mpidist.torch  # noqa: E402
from mpidist.errors import CollectiveMismatchError, ObjectError  # noqa: E402
from tests.frameworks.torch_models import assert_same_bits, last, part, rows, tanh_model, world  # noqa: E402

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("is_dict", [True, False])
def test_parameters_of_any_rank(is_dict):
    for root in {0, last()}:
        model, expected = tanh_model(seed=world().rank), tanh_model(seed=root)
        found = model.state_dict() if is_dict else model.named_parameters()
        mpidist.torch.broadcast_parameters(found, root_rank=root)
        for mine, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            assert torch.equal(mine, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.cfloat])
def test_tensors_of_any_dtype_and_shape(dtype):
    named = {}
    for number, shape in enumerate([(), (3,), (0, 2), (2, 3, 4), (300_000,)]):
        named[f"t{number}"] = torch.full(shape, world().rank == last(), dtype=dtype)
    named["transposed"] = torch.full((3, 2), world().rank == last(), dtype=dtype).T
    for count in (0, 1):  # to PyTorch they lie one after the other, whatever their stride
        named[f"every second of {count}"] = torch.full((2 * count,), world().rank == last(), dtype=dtype)[::2]
    mpidist.torch.broadcast_parameters(named, root_rank=last())
    assert all(bool((each == 1).all()) for each in named.values())


MOVED = [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16, torch.bfloat16]


@pytest.mark.parametrize("dtype", MOVED)
def test_dtypes_that_are_only_moved(dtype):
    """Powers of 2, which all of them have."""
    rank, size = world().rank, world().size
    mine = torch.tensor([[1.0, 2.0], [4.0, 8.0]]).mul(2**rank).to(dtype)
    named = {"a": mine.clone(), "b": mine.clone().T, "c": mine[0, 0].clone(), "d": mine.repeat(1000, 400)}
    mpidist.torch.broadcast_parameters(named, root_rank=last())
    for found, one in zip(named.values(), [[1.0, 2.0], [1.0, 4.0], 1.0, [1.0, 2.0] * 400], strict=True):
        assert found.dtype is dtype
        assert (found[0] if found.dim() else found).float().tolist() == (torch.tensor(one) * 2 ** last()).tolist()
    assert mpidist.torch.broadcast(mine, last()).float()[0].tolist() == [2.0 ** last(), 2.0**size]
    gathered = mpidist.torch.all_gather(mine)
    assert gathered.dtype is dtype
    assert gathered.float()[:, 0].tolist() == [each * 2.0**other for other in range(size) for each in (1, 4)]
    received, _ = mpidist.torch.all_to_all(mine.repeat(size, 1))
    assert torch.equal(received.float(), gathered.float())


@pytest.mark.mpi(min_size=2)
def test_dtypes_that_are_only_moved_are_compared():
    dtype = torch.uint8 if world().rank else torch.float8_e5m2
    for collective in (mpidist.torch.all_gather, lambda x: mpidist.torch.broadcast_parameters({"a": x})):
        with pytest.raises(CollectiveMismatchError, match="float8_e5m2"):
            collective(torch.zeros(3, dtype=dtype))


def test_tensors_whose_elements_share_memory_or_are_conjugated():
    def tensors(rank):
        base = torch.arange(4.0) + 10 * rank
        return {
            "expanded": (torch.arange(3.0)[:, None] + rank).expand(3, 4),
            "conjugated": torch.full((2, 3), complex(rank, 1)).conj(),
            "negated": torch.full((2, 3), complex(rank, 1 + rank)).conj().imag,
            "base": base,
            "view": base.expand(2, 4),
        }

    found, expected = tensors(world().rank), tensors(last())
    mpidist.torch.broadcast_parameters(found, root_rank=last())
    for name, wanted in expected.items():
        assert torch.equal(found[name], wanted), name
    found["base"][0] = -7.0
    assert found["view"][:, 0].tolist() == [-7.0, -7.0]  # still the same memory


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make, odd, match", [
    (lambda: torch.zeros(1).expand(4), lambda: torch.arange(4.0), r"'odd' float32 expanded in axis 0 \(4,\)"),
    (lambda: torch.zeros(4), lambda: torch.zeros(4, device="meta"), r"'odd' float32 meta \(4,\)"),
])  # fmt: skip
def test_tensors_that_lie_otherwise_on_one_rank(make, odd, match):
    """What one place in memory cannot hold, or what has no memory, is an error on all ranks."""
    module = torch.nn.Module()
    module.register_buffer("odd", odd() if world().rank == last() else make())
    for named in (module.state_dict(), module.named_buffers()):
        with pytest.raises(CollectiveMismatchError, match=match):
            mpidist.torch.broadcast_parameters(named, root_rank=last())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrap", [
    mpidist.torch.DistributedDataParallel,
    lambda model: mpidist.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
])  # fmt: skip
@pytest.mark.parametrize("make", [lambda: torch.nn.LazyLinear(3), lambda: torch.nn.Linear(2, 3, device="meta")])
def test_a_model_that_has_no_values_yet_on_one_rank(wrap, make):
    model = make() if world().rank == last() else torch.nn.Linear(2, 3)
    with pytest.raises(CollectiveMismatchError, match="lazy float32|float32 meta"):
        wrap(model)


@pytest.mark.parametrize("make, match", [
    (lambda: torch.eye(3).to_sparse(), "'odd' is a torch.sparse_coo tensor"),
    (lambda: torch.empty(3, device="meta"), "'odd' is a meta tensor"),
    (lambda: torch.nn.LazyLinear(3).weight, "'odd': no shape yet; make one forward pass first"),
])  # fmt: skip
def test_tensors_that_cannot_be_sent_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        mpidist.torch.broadcast_parameters({"plain": torch.zeros(2), "odd": make()})


def half_frozen(seed):
    """Return a model with frozen parameters and buffers, and the parameters that an optimizer is to have."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2)).double()
    torch.nn.init.normal_(model[1].running_mean)
    model.register_buffer("table", torch.randn(3), persistent=False)
    model[0].requires_grad_(False)
    return model, [each for each in model.parameters() if each.requires_grad]


@pytest.mark.parametrize("has_buffers", [False, True], ids=["two lines", "strategy.distribute"])
def test_what_the_optimizer_does_not_have_comes_from_rank_0(has_buffers):
    model, trained = half_frozen(seed=world().rank)
    plain = torch.optim.SGD(trained, lr=0.1)
    if has_buffers:
        mpidist.MultiWorkerMirroredStrategy().distribute(model, plain)
    else:
        mpidist.torch.DistributedOptimizer(plain, model.named_parameters())
    expected, _ = half_frozen(seed=0)
    for (name, mine), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, wanted), name
    if has_buffers:
        for (name, mine), wanted in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(mine, wanted), name


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_of_a_distributed_module_are_plain(copied):
    """One rank alone runs its copy; in the module itself, a forward pass in training begins with rank 0's buffers."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5)).double()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    mpidist.MultiWorkerMirroredStrategy().distribute(model, plain)
    other, x = copied(model), torch.ones(3, 4).double()
    if world().rank == last():
        other(x)
        assert other[1].num_batches_tracked == 1
    model[1].num_batches_tracked.fill_(10 * (1 + world().rank))
    model(x)
    assert model[1].num_batches_tracked == 11


def test_parameters_that_are_added_later_come_from_rank_0():
    """As one process has it, which begins with rank 0's."""

    def made(seed):
        torch.manual_seed(seed)
        return tanh_model(seed), torch.nn.Linear(3, 3).double()

    def trained(body, head, optimizer, batches):
        optimizer.add_param_group({"params": head.parameters(), "lr": 0.3})
        for x, y in batches:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(head(body(x)), y).backward()
            optimizer.step()

    body, head = made(seed=world().rank)
    mine = mpidist.torch.DistributedOptimizer(torch.optim.SGD(body.parameters(), lr=0.1), body.named_parameters())
    alone, alone_head = made(seed=0)
    whole = [rows(12, seed=seed) for seed in range(3)]
    trained(alone, alone_head, torch.optim.SGD(alone.parameters(), lr=0.1), whole)
    trained(body, head, mine, [part(batch, "even") for batch in whole])
    expected = [*alone.parameters(), *alone_head.parameters()]
    for found, wanted in zip([*body.parameters(), *head.parameters()], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert_same_bits(*body.parameters(), *head.parameters())


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("owner", ["optimizer", "module"])
def test_parameters_that_came_in_unseen_must_be_alike(owner):
    """The gradients of a backward pass at other parameters could not be mended any more."""
    model = tanh_model(seed=0)
    if owner == "module":
        model = mpidist.torch.DistributedDataParallel(model)
    else:
        optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(world().rank)
    head = torch.nn.Linear(3, 3).double()
    if owner == "module":
        model.module.append(head)
    else:
        model.append(head)
        optimizer.param_groups[0]["params"] += head.parameters()
    x, y = rows(4)
    with pytest.raises(CollectiveMismatchError, match="new parameter .* has other values on rank 1.* than on rank 0"):
        torch.nn.functional.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize("make", [
    lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
])  # fmt: skip
def test_states_of_optimizers_and_their_hyperparameters(make):
    model = tanh_model()
    optimizer = make(model.parameters())
    if world().rank == last():  # the others have no state yet
        optimizer.param_groups[0]["lr"] = 0.025
        x, y = rows(4)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    mpidist.torch.broadcast_optimizer_state(optimizer, root_rank=last())
    assert optimizer.param_groups[0]["lr"] == 0.025
    tensors = [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
    counts = world().exchange(str(len(tensors)).encode())
    assert len({*counts}) == 1
    if tensors:
        assert_same_bits(*tensors)


class WithMasters(torch.optim.SGD):
    """Keeps float32 masters, and other things that are of another dtype than the parameters."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        for number, each in enumerate(parameters):
            values = torch.full(each.shape, 1 + 2.0**-12 + number + world().rank)
            parts = [values.double(), {"counts": torch.full((2,), 300 + world().rank)}]
            self.state[each] = {"master": values, "parts": parts, "own": values.to(each.dtype)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("distributed", [False, True])
def test_states_keep_their_dtypes(dtype, distributed):
    """Such as float32 masters of parameters in 16 bits."""
    parameters = [*torch.nn.Linear(3, 2).to(dtype).parameters()]
    optimizer, root = WithMasters(parameters), 0 if distributed else last()
    if distributed:
        optimizer = mpidist.torch.DistributedOptimizer(optimizer)
    else:
        mpidist.torch.broadcast_optimizer_state(optimizer, root_rank=root)
    for number, each in enumerate(parameters):
        state, values = optimizer.state[each], torch.full(each.shape, 1 + 2.0**-12 + number + root)
        first, counts = state["parts"][0], state["parts"][1]["counts"]
        assert state["master"].dtype is torch.float32 and torch.equal(state["master"], values)
        assert first.dtype is torch.float64 and torch.equal(first, values.double())
        assert counts.dtype is torch.int64 and counts.tolist() == [300 + root] * 2
        assert state["own"].dtype is dtype and torch.equal(state["own"], values.to(dtype))


def stepped(rate):
    """Return an optimizer that has a state, and gets its learning rate as given."""
    model = tanh_model()
    optimizer = torch.optim.Adam([{"params": model[0].parameters()}, {"params": model[2].parameters()}])
    torch.nn.functional.cross_entropy(model(rows(4)[0]), rows(4)[1]).backward()
    optimizer.step()
    optimizer.param_groups[0]["rate"] = rate
    return model, optimizer


@pytest.mark.parametrize("distributed", [False, True])
def test_a_state_that_cannot_be_pickled(distributed):
    _, optimizer = stepped(rate=lambda: 0.1)
    with pytest.raises(ObjectError, match="rank 0's Adam cannot be pickled"):
        if distributed:
            mpidist.torch.DistributedOptimizer(optimizer)
        else:
            mpidist.torch.broadcast_optimizer_state(optimizer)


@pytest.mark.mpi(min_size=2)
def test_optimizers_of_other_groups():
    model, optimizer = stepped(rate=0.1)
    if world().rank == last():
        optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(CollectiveMismatchError, match=rf"rank {last()} passed 'parameter 2 of group 0' float64"):
        mpidist.torch.broadcast_optimizer_state(optimizer)


@pytest.mark.mpi(min_size=2)
def test_tensors_that_differ_between_ranks():
    named = {"a": torch.zeros(2), "b": torch.zeros(3 if world().rank == 1 else 2)}
    with pytest.raises(CollectiveMismatchError, match="'b'|b float32"):
        mpidist.torch.broadcast_parameters(named)


@pytest.mark.parametrize("wrap", [list, iter])
def test_tensors_without_names(wrap):
    """As Horovod takes ``model.parameters()``."""
    model, expected = tanh_model(seed=world().rank), tanh_model(seed=last())
    mpidist.torch.broadcast_parameters(params=wrap(list(model.parameters())), root_rank=last())
    for mine, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine, wanted)


@pytest.mark.parametrize("given", [{"a": 3}, [3], "ab"])
def test_what_is_no_tensor(given):
    with pytest.raises(ValueError, match="takes a state_dict, tensors, or pairs of a name and a tensor"):
        mpidist.torch.broadcast_parameters(given)


def test_a_root_that_is_no_rank():
    with pytest.raises(ValueError, match="is no rank of"):
        mpidist.torch.broadcast_parameters({"a": torch.zeros(2)}, root_rank=world().size)
    with pytest.raises(TypeError, match="takes a torch.optim.Optimizer, got a dict"):
        mpidist.torch.broadcast_optimizer_state({})


# -- sampler -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [12, 13, 1, 0])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_a_sampler_reads_what_pytorch_s_own_reads(count, shuffle, drop_last):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = mpidist.torch.DistributedSampler(range(count), shuffle=shuffle, seed=3, drop_last=drop_last)
    theirs = torch.utils.data.distributed.DistributedSampler(
        range(count), world().size, world().rank, shuffle=shuffle, seed=3, drop_last=drop_last
    )
    for epoch in range(2):
        mine.set_epoch(epoch)
        theirs.set_epoch(epoch)
        if count:  # theirs fails for none
            assert list(mine) == list(theirs)
        assert len(mine) == len(list(mine)) == len(theirs) or not count


@pytest.mark.parametrize("count", [0, 1, 12, 13])
def test_without_padding_each_row_is_read_once(count):
    sampler = mpidist.torch.DistributedSampler(range(count), padding=False)
    found = world().exchange(",".join(map(str, sampler)).encode())
    every = [int(each) for raw in found for each in raw.decode().split(",") if each]
    assert sorted(every) == list(range(count)) and len(sampler) == len(list(sampler))


def test_batches_of_all_ranks_are_those_of_one_process():
    size = world().size
    sampler = mpidist.torch.DistributedSampler(range(24 * size), shuffle=False)
    batches = list(torch.utils.data.DataLoader(torch.arange(24 * size), batch_size=8, sampler=sampler))
    for number, mine in enumerate(batches):
        found = world().exchange(bytes(mine.tolist()))
        assert sorted(b"".join(found)) == list(range(number * 8 * size, (number + 1) * 8 * size))


@pytest.mark.mpi(min_size=2)
def test_rows_that_are_read_twice_are_told_of_by_rank_0():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mpidist.torch.DistributedSampler(range(world().size + 1))
    told = [str(each.message) for each in caught if "are read twice" in str(each.message)]
    assert len(told) == (world().rank == 0)


def test_a_rank_that_is_none():
    with pytest.raises(ValueError, match="rank 2 is no rank of 2"):
        mpidist.torch.DistributedSampler(range(4), num_replicas=2, rank=2)


def test_workers_of_a_loader_are_forked_after_mpi_has_started():
    size = world().size
    sampler = mpidist.torch.DistributedSampler(range(8 * size), shuffle=False)
    loader = torch.utils.data.DataLoader(torch.arange(8 * size), batch_size=4, sampler=sampler, num_workers=1)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = mpidist.torch.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op="sum")
    for batch in loader:
        optimizer.zero_grad()
        model(batch[:, None].float()).sum().backward()
        optimizer.step()
    assert model.weight.item() == -sum(range(8 * size))
