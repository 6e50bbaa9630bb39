"""Collectives of tensors: closed forms, gradients through them, and Horovod's names."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

import mpidist.torch as hvd  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from tests.frameworks.torch_models import world  # noqa: E402

pytestmark = pytest.mark.mpi

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]


@pytest.fixture
def size():
    return world().size


@pytest.fixture
def rank():
    return world().rank


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (5,), (0, 3), (17, 17, 3)])
def test_sums_and_means(dtype, shape, size, rank):
    tensor = torch.full(shape, rank + 1, dtype=dtype)
    total = size * (size + 1) // 2
    for found, wanted in [
        (hvd.allreduce(tensor, op=hvd.Sum), total),
        (hvd.allreduce(tensor, average=False), total),
        (hvd.all_reduce(tensor), total),
        (hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Sum)), total),
    ]:
        assert found.dtype is dtype and found.shape == tensor.shape and bool((found == wanted).all())
    assert bool((tensor == rank + 1).all())
    mean = hvd.allreduce(tensor)
    wanted = torch.tensor((size + 1) / 2, dtype=torch.float64).to(dtype)
    assert mean.dtype is dtype and bool((mean == wanted).all())
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor and bool((tensor == total).all())


@pytest.mark.parametrize("op, wanted", [
    (hvd.Min, lambda size: 1), (hvd.Max, lambda size: size), (hvd.Product, math.factorial)
])  # fmt: skip
def test_other_operations(op, wanted, size, rank):
    assert hvd.allreduce(torch.full((3,), rank + 1.0), op=op).tolist() == [float(wanted(size))] * 3
    tensor = torch.full((3,), rank + 1.0, requires_grad=True)
    with pytest.raises(RuntimeError, match="gradients flow through a sum or a mean"):
        hvd.all_reduce(tensor, op).sum().backward()


@pytest.mark.parametrize("op, of_infinity", [
    (hvd.Min, -math.inf), (hvd.Max, math.inf), (hvd.Sum, math.nan), (hvd.Average, math.nan)
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", [1, 40_000])
def test_what_is_not_finite_on_one_rank(op, of_infinity, dtype, length, size, rank):
    for who in range(size):
        tensor = torch.ones(3, length, dtype=dtype)
        tensor[0] = math.nan if rank == who else 1.0
        tensor[1] = -math.inf if rank == who else math.inf
        tensor[2] = -0.0
        found = hvd.allreduce(tensor, op=op)
        wanted = of_infinity if size > 1 else -math.inf
        assert bool(found[0].isnan().all())
        assert bool((found[1].isnan() if math.isnan(wanted) else found[1] == wanted).all())
        assert bool((found[2] == 0).all()) and bool(found[2].signbit().all())


def test_factors_before_and_after(size, rank):
    found = hvd.allreduce(torch.full((3,), 2.0), op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert found.tolist() == [3.0 * size] * 3


def test_groups_of_tensors(size, rank):
    tensors = [torch.full((each + 1,), float(rank)) for each in range(3)]
    found = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert [each.tolist() for each in found] == [[size * (size - 1) / 2] * (each + 1) for each in range(3)]
    hvd.synchronize(hvd.grouped_allreduce_async_(tensors, op=hvd.Sum))
    assert tensors[2].tolist() == [size * (size - 1) / 2] * 3


@pytest.mark.parametrize("call", [hvd.grouped_allreduce, hvd.grouped_allreduce_])
@pytest.mark.parametrize("number", [0, 1])
def test_groups_of_another_length_on_one_rank_are_refused(call, number, size, rank):
    if size == 1:
        assert call([]) == []
        return
    tensors = [torch.ones(3)] * (number + (rank < size - 1))
    with pytest.raises(CollectiveMismatchError, match=f"tensors: {number + 1} on .*|tensors: {number} on .*"):
        call(tensors, op=hvd.Sum)
    assert call([torch.ones(2)], op=hvd.Sum)[0].tolist() == [size] * 2


def test_a_group_may_be_any_iterable(size):
    found = hvd.grouped_allreduce((torch.full((2,), each) for each in (1.0, 2.0)), op=hvd.Sum)
    assert [each.tolist() for each in found] == [[size] * 2, [2 * size] * 2]


def test_gathered_rows_of_different_numbers(size, rank):
    tensor = torch.full((rank + 1, 2), rank, dtype=torch.bfloat16)
    found = hvd.allgather(tensor)
    assert found.dtype is torch.bfloat16
    assert found[:, 0].tolist() == [each for each in range(size) for _ in range(each + 1)]
    assert hvd.all_gather(torch.full((2, rank), rank), axis=1).shape == (2, size * (size - 1) // 2)


def test_broadcasts(size, rank):
    for root in range(size):
        tensor = torch.full((3, 2), rank)
        assert hvd.broadcast(tensor, root).tolist() == [[root] * 2] * 3 and bool((tensor == rank).all())
        assert hvd.broadcast_(tensor, root_rank=root, name="x") is tensor and bool((tensor == root).all())
    with pytest.raises(ValueError, match="is no rank of|no rank of a world"):
        hvd.broadcast(torch.ones(2), size)


def test_rows_from_every_rank_to_every_rank(size, rank):
    splits = [each + 1 for each in range(size)]
    tensor = torch.full((sum(splits), 2), float(rank))
    found, received = hvd.alltoall(tensor, splits=torch.tensor(splits))
    assert received.tolist() == [rank + 1] * size
    assert found[:, 0].tolist() == [float(each) for each in range(size) for _ in range(rank + 1)]
    assert hvd.alltoall(torch.arange(size) + 10 * rank).tolist() == [10 * each + rank for each in range(size)]


def test_rows_of_a_reduced_tensor(size, rank):
    tensor = torch.arange(2 * size)[:, None].double() * (rank + 1)
    found = hvd.reducescatter(tensor, op=hvd.Sum)
    total = size * (size + 1) / 2
    assert found[:, 0].tolist() == [total * each for each in (2 * rank, 2 * rank + 1)]


def test_gradients(size, rank):
    """That of the sum of all ranks' losses; each loss is the sum of what came out, weighted by the rank's number."""
    weight = rank + 1.0
    total = size * (size + 1) / 2
    for fn, wanted in [
        (lambda x: hvd.all_reduce(x), total),
        (lambda x: hvd.allreduce(x), total / size),
        (lambda x: hvd.allgather(x), total),
        (lambda x: hvd.broadcast(x, 0), total if rank == 0 else 0.0),
    ]:
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        (fn(x) * weight).sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2, 3), wanted, dtype=torch.float64))
    x = torch.ones(size, 2, dtype=torch.float64, requires_grad=True)
    (hvd.alltoall(x) * weight).sum().backward()
    assert x.grad[:, 0].tolist() == [each + 1.0 for each in range(size)]  # of the rank that a row went to
    x = torch.ones(size, 2, dtype=torch.float64, requires_grad=True)
    (hvd.reduce_scatter(x) * weight).sum().backward()
    assert x.grad[:, 0].tolist() == [each + 1.0 for each in range(size)]


def test_gradients_of_gradients(size, rank):
    x = torch.full((2,), 3.0, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad((hvd.all_reduce(x) ** 3).sum(), x, create_graph=True)
    y = 3.0 * size
    torch.testing.assert_close(first.detach(), torch.full((2,), 3 * y**2 * size, dtype=torch.float64))
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, torch.full((2,), 6 * y * size * size, dtype=torch.float64))


def test_a_tensor_that_is_not_contiguous(size, rank):
    tensor = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(hvd.all_reduce(tensor), tensor * size)
    assert torch.equal(hvd.all_gather(tensor)[:3], tensor)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_differ():
    with pytest.raises(CollectiveMismatchError, match="rank 1"):
        hvd.all_reduce(torch.zeros(3 if world().rank == 1 else 2))
    with pytest.raises(CollectiveMismatchError, match="rank 1"):
        hvd.all_gather(torch.zeros(2, 3 if world().rank == 1 else 2))


def test_what_is_refused():
    with pytest.raises(TypeError, match="expected a tensor, got a list"):
        hvd.allreduce([1.0])
    for collective in (hvd.allreduce, hvd.allgather, hvd.broadcast):
        with pytest.raises(ValueError, match="torch.sparse_coo tensor is not sent"):
            collective(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="`average` or `op`, not both"):
        hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.raises(TypeError, match="synchronize takes what"):
        hvd.synchronize(3)


def test_places_and_objects(size, rank):
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size) and hvd.is_initialized()
    assert hvd.broadcast_object({"a": rank}) == {"a": 0}
    assert hvd.allgather_object(rank) == list(range(size))
    hvd.barrier()
    handle = hvd.allgather_async(torch.tensor([rank]))
    assert hvd.poll(handle) and hvd.synchronize(handle).tolist() == list(range(size))
    hvd.shutdown()
