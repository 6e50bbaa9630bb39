"""What all ranks get from one: parameters, optimizers' states; and which rows each reads."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch")

import mpidist.torch  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from tests.frameworks.torch_models import assert_same_bits, rows, tanh_model, world  # noqa: E402

pytestmark = pytest.mark.mpi


def last():
    return world().size - 1


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
    mpidist.torch.broadcast_parameters(named, root_rank=last())
    assert all(bool((each == 1).all()) for each in named.values())


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


@pytest.mark.mpi(min_size=2)
def test_tensors_that_differ_between_ranks():
    named = {"a": torch.zeros(2), "b": torch.zeros(3 if world().rank == 1 else 2)}
    with pytest.raises(CollectiveMismatchError, match="'b'|b float32"):
        mpidist.torch.broadcast_parameters(named)


@pytest.mark.parametrize("given", [{"a": 3}, [torch.zeros(2)], "ab"])
def test_what_is_no_tensor(given):
    with pytest.raises(ValueError, match="takes a state_dict, or pairs of a name and a tensor"):
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
