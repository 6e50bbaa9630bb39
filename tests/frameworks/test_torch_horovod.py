"""Horovod's calls of its own PyTorch examples, with Horovod's signatures."""

from __future__ import annotations

import inspect

import pytest

torch = pytest.importorskip("torch")

import mpidist.compression  # noqa: E402
import mpidist.torch as hvd  # noqa: E402
from mpidist.errors import CollectiveMismatchError  # noqa: E402
from mpidist.hints import _HINTS  # noqa: E402
from tests.frameworks.torch_models import (  # noqa: E402
    assert_alike,
    batches,
    momentum,
    part,
    tanh_model,
    trained_alone,
    world,
)

pytestmark = pytest.mark.mpi


def own(size=3):
    return torch.arange(size, dtype=torch.float64) + world().rank


def mean():
    return torch.arange(3, dtype=torch.float64) + (world().size - 1) / 2


def none(named):
    return (named, hvd.Compression.none), {}


@pytest.mark.parametrize("arguments", [
    none,
    lambda named: ((named, None, 1, hvd.Average, 2.0, 3, None, False, None), {}),
    lambda named: ((), {"named_parameters": named, "compression": hvd.Compression.none, "op": hvd.Average,
                        "gradient_predivide_factor": 4.0, "num_groups": 2, "process_set": None}),
])  # fmt: skip
def test_an_optimizer_as_in_horovod_s_examples(arguments):
    model = tanh_model()
    expected = trained_alone(model, momentum, batches(3, 12))
    positional, named = arguments(model.named_parameters())
    optimizer = hvd.DistributedOptimizer(momentum(model.parameters()), *positional, **named)
    for batch in batches(3, 12):
        x, y = part(batch, "even")
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_alike(model, expected)


def test_compression_is_the_third_argument():
    """Powers of 2 keep their values in 16 bits."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), hvd.Compression.fp16, 1, hvd.Sum)
    model(torch.full((1, 1), 0.5)).sum().backward()
    optimizer.step()
    assert model.weight.item() == -0.5 * world().size


def test_another_number_of_passes():
    """The sum of as many gradients of 1 as there are passes, on each rank."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Sum)
    for passes, total in [(1, 1), (3, 4), (2, 6), (1, 7)]:
        optimizer.set_backward_passes_per_step(passes)
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.ones(1, 1)).sum().backward()
        assert model.weight.grad.item() == passes * world().size  # by the last pass, not by the step
        optimizer.step()
        assert model.weight.item() == -total * world().size
    with pytest.raises(ValueError, match="backward_passes_per_step=0"):
        optimizer.set_backward_passes_per_step(0)


@pytest.mark.parametrize("options, error, match", [
    ({"process_set": object()}, NotImplementedError, "mpidist.new_world"),
    ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, ValueError, "divides a mean"),
    ({"gradient_predivide_factor": 0.0}, ValueError, "more than 0"),
    ({"compression": hvd.Sum}, TypeError, "compression=.*an operation is passed as op="),
    ({"compression": "sum"}, TypeError, "compression=.*an operation is passed as op="),
])  # fmt: skip
def test_what_an_optimizer_does_not_take(options, error, match):
    plain = momentum(tanh_model().parameters())
    with pytest.raises(error, match=match):
        hvd.DistributedOptimizer(plain, **options)
    assert type(plain) is torch.optim.SGD


@pytest.mark.parametrize("call", [
    lambda x: hvd.allreduce(x, None, "loss", hvd.Compression.none, None, 1.0, 1.0, None),
    lambda x: hvd.allreduce(x, name="loss", compression=hvd.Compression.fp16),
    lambda x: hvd.allreduce(x, compression=hvd.Compression.bf16, op=hvd.Average, process_set=None),
    lambda x: hvd.allreduce(x, False, prescale_factor=0.5, postscale_factor=2 / world().size),
    lambda x: hvd.allreduce_(x.clone(), None, "loss", hvd.Average),
    lambda x: hvd.synchronize(hvd.allreduce_async(x, None, "loss", hvd.Average, 1.0, 1.0, None)),
    lambda x: hvd.synchronize(hvd.allreduce_async_(x.clone(), None, "loss", hvd.Average)),
    lambda x: hvd.grouped_allreduce([x], None, "loss", hvd.Compression.none, hvd.Average)[0],
    lambda x: hvd.synchronize(hvd.grouped_allreduce_async([x], None, "loss", hvd.Average))[0],
    lambda x: hvd.synchronize(hvd.grouped_allreduce_async(tensors=[x]))[0],
    lambda x: hvd.synchronize(hvd.grouped_allreduce_async_([x.clone()], None, "loss", hvd.Average))[0],
    lambda x: hvd.allgather(hvd.reducescatter(x, "rows", hvd.Compression.none, hvd.Average, None, 1.0, 1.0), "all"),
    lambda x: hvd.allgather(hvd.synchronize(hvd.reducescatter_async(x, "rows", hvd.Average, None, 0.5, 2.0))),
])  # fmt: skip
def test_means(call):
    torch.testing.assert_close(call(own()), mean(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ["allreduce", "grouped_allreduce", "reducescatter"])
def test_names_without_a_compression(name):
    with pytest.raises(TypeError, match=rf"^{name}_async\(\) got an unexpected keyword argument 'compression'"):
        getattr(hvd, f"{name}_async")(own(), compression=None)


@pytest.mark.parametrize("reduce", [
    hvd.allreduce,
    lambda x, **given: hvd.allgather(hvd.reducescatter(x, **given)),
    lambda x, **given: hvd.allgather(hvd.synchronize(hvd.reducescatter_async(x, **given))),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_means_of_integers_are_cut_to_integers(reduce, dtype):
    size = world().size
    x = torch.arange(2 * size).to(dtype) + world().rank
    found = reduce(x)
    assert found.dtype is dtype
    assert found.tolist() == [int(each + (size - 1) / 2) for each in range(2 * size)]
    halved = reduce(x, op=hvd.Sum, prescale_factor=0.5)
    assert halved.dtype is dtype
    assert halved.tolist() == [int((each + (size - 1) / 2) * size / 2) for each in range(2 * size)]


@pytest.mark.parametrize("reduce", [
    lambda *args, **kwargs: hvd.allreduce(*args, **kwargs),
    lambda tensor, **kwargs: hvd.reducescatter(tensor.repeat(world().size), **kwargs),
])  # fmt: skip
def test_factors_keep_the_digits_of_whole_numbers(reduce):
    found = reduce(torch.tensor([123_456_789]), op=hvd.Sum, prescale_factor=3.0, postscale_factor=5.0)
    assert found.dtype is torch.int64 and found.tolist() == [15 * 123_456_789 * world().size]


def test_rows_that_are_left_over_are_the_first_ranks():
    size, rank = world().size, world().rank
    for count in range(2 * size):
        x = torch.arange(float(count))[:, None].repeat(1, 2).requires_grad_()
        found = hvd.reducescatter(x, op=hvd.Sum)
        first = sum(count // size + (each < count % size) for each in range(rank))
        rows = range(first, first + count // size + (rank < count % size))
        assert found.tolist() == [[float(each * size)] * 2 for each in rows]
        (found * (rank + 1)).sum().backward()
        owners = [each for each in range(size) for _ in range(count // size + (each < count % size))]
        assert x.grad.tolist() == [[float(each + 1)] * 2 for each in owners]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("more", [1, 2])
def test_ranks_with_other_numbers_of_rows_are_refused(more):
    with pytest.raises(CollectiveMismatchError, match="rank 1"):
        hvd.reducescatter(torch.ones(world().size + 1 + (more if world().rank == 1 else 0)))


@pytest.mark.parametrize("reduce", [mpidist.torch.all_reduce, hvd.allreduce])
def test_a_single_tensor_has_no_error_feedback(reduce):
    with pytest.raises(ValueError, match="leave error_feedback out, or use DistributedOptimizer"):
        reduce(own(), compression=mpidist.compression.Float16(error_feedback=True))


#: Of Horovod 0.28.1, all with process_set.
FACTORS = "prescale_factor postscale_factor"
PARAMETERS = {
    "allreduce": f"tensor average name compression op {FACTORS} process_set",
    "allreduce_": f"tensor average name op {FACTORS} process_set",
    "allgather": "tensor name process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "alltoall": "tensor splits name process_set",
    "reducescatter": f"tensor name compression op process_set {FACTORS}",
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_horovod_in_its_order(name):
    assert [*inspect.signature(getattr(hvd, name)).parameters] == PARAMETERS[name].split()


def test_numbers_that_are_whole_are_not_coded():
    found = hvd.allreduce(torch.tensor([2**24 + 1]), op=hvd.Sum, compression=hvd.Compression.fp16)
    assert found.tolist() == [(2**24 + 1) * world().size]


def test_gradients_flow_through_a_coded_mean():
    x = own().requires_grad_()
    hvd.allreduce(x, compression=hvd.Compression.fp16).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3, dtype=torch.float64))


def test_objects_tensors_and_the_barrier():
    size = world().size
    hvd.barrier(process_set=None)
    assert hvd.broadcast_object(world().rank, 0, "number", None) == 0
    assert hvd.allgather_object(world().rank, name="number") == list(range(size))
    assert hvd.broadcast(torch.tensor(world().rank), root_rank=0, name="epoch").item() == 0
    assert hvd.broadcast_(torch.tensor(world().rank), 0, "epoch", None).item() == 0
    rows, counts = hvd.alltoall(own(size), [1] * size, "rows", None)
    assert rows.tolist() == [float(each + world().rank) for each in range(size)] and counts.tolist() == [1] * size
    optimizer = momentum(tanh_model().parameters())
    hvd.broadcast_optimizer_state(optimizer, 0, None)


@pytest.mark.parametrize("call", [
    lambda: hvd.allreduce(own(), process_set=1),
    lambda: hvd.allgather(own(), process_set=1),
    lambda: hvd.broadcast(own(), 0, process_set=1),
    lambda: hvd.alltoall(own(), process_set=1),
    lambda: hvd.reducescatter(own(), process_set=1),
    lambda: hvd.barrier(1),
    lambda: hvd.broadcast_object(1, process_set=1),
    lambda: hvd.allgather_object(1, process_set=1),
    lambda: hvd.init(process_sets=[1]),
])  # fmt: skip
def test_sets_of_processes_are_refused(call):
    with pytest.raises(NotImplementedError, match="mpidist.new_world"):
        call()


def test_lists_of_ranks():
    size = world().size
    assert hvd.init().size == hvd.init([]).size == hvd.init(list(range(size))).size == hvd.size() == size
    with pytest.raises(ValueError, match=r"Split\(color\)"):
        hvd.init([size])
    for several in ([object()], [object(), object()], [0] * (size + 1)):
        with pytest.raises(ValueError, match=r"Split\(color\)"):
            hvd.init(several)
    if size > 1:
        with pytest.raises(ValueError, match=r"init\(\[0\]\)"):
            hvd.init([0])


def test_a_stage_with_error_feedback_is_not_for_single_tensors():
    with pytest.raises(ValueError, match="DistributedOptimizer takes other stages"):
        hvd.allreduce(own(), compression=mpidist.compression.TopK(0.5))
    with pytest.raises(ValueError, match="reducescatter sends values as they are"):
        hvd.reducescatter(own(), compression=hvd.Compression.fp16)


HINTED = [name.removeprefix("torch.") for names in _HINTS for name in names.split() if name.startswith("torch.")]


@pytest.mark.parametrize("name", HINTED)
def test_names_that_are_missing_have_a_hint(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; "):
        getattr(hvd, name)
