"""`mpidist.torch` with tensors on a GPU; on the host with ``MPIDIST_TEST_ON=numpy``.

The law: ranks together do what one process does on the global batch.
"""

from __future__ import annotations

import contextlib
import copy
import math

import numpy
import pytest

import mpidist
from tests.gpu import library

torch = pytest.importorskip("torch")

import mpidist.torch as hvd  # noqa: E402
from mpidist.collectives import early_sums  # noqa: E402
from mpidist.frameworks.torch import overlap  # noqa: E402
from mpidist.world import world_communicator  # noqa: E402
from tests.frameworks.torch_models import batches, part, tanh_model, trained_alone  # noqa: E402
from tests.gpu.library import check_on_all_ranks, place  # noqa: E402

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

cross_entropy = torch.nn.functional.cross_entropy

#: Of a sum over ranks, which every number of ranks from 1 to 8 cuts into even parts where the test needs them.
ROWS = 24


@pytest.fixture(autouse=True)
def device():
    """The device of the test's tensors: this rank's GPU, or the host if NumPy is asked for."""
    library.require()
    if library.is_numpy():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return hvd.device()


def on(device, values):
    """Return tensors, or a list of batches, on the device."""
    if isinstance(values, torch.Tensor):
        return values.to(device)
    return type(values)(on(device, each) for each in values)


def problem_of(device, found, expected, tolerance=0.0):
    """Return what is wrong with a tensor; empty if it lies on the device and equals another, or numbers."""
    expected = torch.as_tensor(expected)
    if found.device != device:
        return f"lies on {found.device}"
    if found.shape != expected.shape:
        return f"{tuple(found.shape)} in place of {tuple(expected.shape)}"
    ours, wanted = (each.detach().cpu().double().numpy() for each in (found, expected))
    right = numpy.allclose(ours, wanted, tolerance, tolerance, equal_nan=True)
    return "" if right else f"{ours.reshape(-1)[:3]} in place of {wanted.reshape(-1)[:3]}"


def check_alike(device, model, expected, tolerance=1e-12):
    """Fail on all ranks unless two models have the same state."""
    pairs = zip(model.state_dict().items(), expected.state_dict().values(), strict=True)
    told = {name: problem_of(device, ours, wanted, tolerance) for (name, ours), wanted in pairs}
    problems = [f"{name}: {text}" for name, text in told.items() if text]
    bits = b"".join(each.detach().float().cpu().numpy().tobytes() for each in model.parameters())
    same = len(set(mpidist.all_gather_object(bits))) == 1
    check_on_all_ranks("; ".join(problems) or same or "ranks have other bits")


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, fused=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["even", "uneven", "empty"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("way", ["optimizer", "module"])
def test_ranks_equal_one_process(device, way, name, kind):
    make, data = OPTIMIZERS[name], on(device, batches(4, ROWS))
    bare = tanh_model().to(device)
    expected = trained_alone(bare, make, data)
    model = hvd.DistributedDataParallel(bare) if way == "module" else bare
    optimizer = make(model.parameters())
    if way == "optimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=bare.named_parameters())
    for batch in data:
        x, y = part(batch, kind)
        optimizer.zero_grad()
        (optimizer if way == "optimizer" else model).rows = len(x)
        cross_entropy(model(x), y).backward()
        optimizer.step()
    check_alike(device, bare, expected)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_gradients_of_fewer_bits(device, dtype, tolerance):
    data = on(device, batches(3, ROWS, dtype))
    bare = tanh_model().to(device, dtype)
    expected = trained_alone(bare, OPTIMIZERS["sgd"], data)
    model = hvd.DistributedDataParallel(bare)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for batch in data:
        x, y = part(batch, "uneven")
        optimizer.zero_grad()
        model.rows = len(x)
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert all(each.grad.dtype is dtype for each in bare.parameters())
    check_alike(device, bare, expected, tolerance)


def test_no_sync_accumulates(device):
    data = on(device, batches(3, 2 * ROWS))
    bare = tanh_model().to(device)
    expected = trained_alone(bare, OPTIMIZERS["adam"], data)
    model = hvd.DistributedDataParallel(bare)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    for batch in data:
        x, y = part(batch, "even")
        half = len(x) // 2
        optimizer.zero_grad()
        model.rows = len(x)
        with model.no_sync():
            (cross_entropy(model(x[:half]), y[:half]) * (half / len(x))).backward()
        (cross_entropy(model(x[half:]), y[half:]) * ((len(x) - half) / len(x))).backward()
        optimizer.step()
    check_alike(device, bare, expected)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("in_stream", [False, True])
def test_sums_begin_in_the_backward_pass(device, monkeypatch, name, in_stream):
    monkeypatch.setattr(early_sums, "_LEAST_BUCKET_BYTES", 64)
    monkeypatch.setattr(overlap, "_STEPS_TIMED", 0)
    data = on(device, batches(6, ROWS))
    bare = tanh_model().to(device)
    expected = trained_alone(bare, OPTIMIZERS[name], data)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS[name](bare.parameters()), bare.named_parameters())
    other = torch.cuda.stream(torch.cuda.Stream()) if in_stream and device.type == "cuda" else contextlib.nullcontext()
    overlapped = []
    with other:
        for batch in data:
            x, y = part(batch, "even")
            optimizer.zero_grad()
            cross_entropy(bare(x), y).backward()
            overlapped.append(optimizer.has_overlapped)
            optimizer.step()
        if device.type == "cuda":
            torch.cuda.current_stream().synchronize()
    links = [each for each in world_communicator().devices.links() if not isinstance(each, str)]
    has_links = device.type == "cuda" and place()[1] > 1 and bool(links)
    check_on_all_ranks(overlapped == [has_links and number > 0 for number in range(6)] or str(overlapped))
    check_alike(device, bare, expected)


@pytest.mark.parametrize("find_unused_parameters", [True, False])
def test_parameters_that_are_not_reached(device, find_unused_parameters):
    """On some ranks: zeros.  On all: no gradient."""
    rank, size = place()
    bare = torch.nn.ModuleDict({name: torch.nn.Linear(4, 2).double() for name in "abc"}).to(device)
    model = hvd.DistributedDataParallel(bare, find_unused_parameters=find_unused_parameters)
    model.forward = lambda x: bare["a" if rank == 0 else "b"](x)
    model(torch.full((3, 4), 2.0, dtype=torch.float64, device=device)).sum().backward()
    problem = problem_of(device, bare["a"].weight.grad, torch.full((2, 4), 6.0 / size), 1e-12)
    if size > 1:
        problem += problem_of(device, bare["b"].weight.grad, torch.full((2, 4), 6.0 * (size - 1) / size), 1e-6)
    check_on_all_ranks(problem or bare["c"].weight.grad is None or "a gradient of what no rank reached")


def test_clipping_after_the_sum(device):
    def clip(model):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    data = on(device, batches(4, ROWS))
    model = tanh_model().to(device)
    expected = trained_alone(model, OPTIMIZERS["sgd"], data, before_step=clip)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["sgd"](model.parameters()))
    for batch in data:
        x, y = part(batch, "uneven")
        optimizer.zero_grad()
        optimizer.rows = len(x)
        cross_entropy(model(x), y).backward()
        optimizer.synchronize()
        clip(model)
        with optimizer.skip_synchronize():
            optimizer.step()
    check_alike(device, model, expected)


@pytest.mark.parametrize("way", ["optimizer", "module"])
def test_a_grad_scaler_leaves_out_the_same_steps(device, way):
    """The last row of the third batch, which is the last rank's, is infinite."""
    data = on(device, batches(5, ROWS, torch.float32))
    data[2][0][-1] = math.inf
    bare = tanh_model(dtype=torch.float32).to(device)
    alone = copy.deepcopy(bare)
    model = hvd.DistributedDataParallel(bare) if way == "module" else bare
    optimizers = [OPTIMIZERS["sgd"](each.parameters()) for each in (bare, alone)]
    if way == "optimizer":
        optimizers[0] = hvd.DistributedOptimizer(optimizers[0])
    scalers = [torch.amp.GradScaler(device.type, init_scale=16.0, growth_interval=2) for _ in "ab"]
    for batch in data:
        for each, optimizer, scaler, (x, y) in zip(
            (model, alone), optimizers, scalers, (part(batch, "even"), batch), strict=True
        ):
            optimizer.zero_grad()
            scaler.scale(cross_entropy(each(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    check_alike(device, bare, alone, 1e-4)


@pytest.mark.parametrize("shape", [(ROWS, 4), (ROWS, 4, 2, 3)])
def test_batch_normalization_over_all_ranks(device, shape):
    layer = torch.nn.BatchNorm1d if len(shape) == 2 else torch.nn.BatchNorm2d
    alone = layer(4).double().to(device)
    mine = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone))
    assert type(mine) is hvd.SyncBatchNorm
    problems = []
    for turn in range(2):
        generator = torch.Generator().manual_seed(turn)
        whole = (torch.randn(shape, generator=generator, dtype=torch.float64) + 5).to(device).requires_grad_()
        weights = torch.sin(whole.detach() * 3)
        x, w = (each.detach().clone() for each in part((whole, weights), "uneven"))
        x.requires_grad_()
        expected, found = alone(whole), mine(x)
        (expected * weights).sum().backward()
        (found * w).sum().backward()
        problems.append(problem_of(device, found, part((expected,), "uneven")[0], 1e-10))
        problems.append(problem_of(device, x.grad, part((whole.grad,), "uneven")[0], 1e-9))
    for name in ("running_mean", "running_var"):
        problems.append(problem_of(device, getattr(mine, name), getattr(alone, name), 1e-12))
    check_on_all_ranks("".join(problems))


# -- collectives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_dict", [True, False])
def test_parameters_of_any_rank(device, is_dict):
    rank, size = place()
    for root in {0, size - 1}:
        model, expected = tanh_model(seed=rank).to(device), tanh_model(seed=root)
        hvd.broadcast_parameters(model.state_dict() if is_dict else model.named_parameters(), root_rank=root)
        check_alike(device, model, expected, 0.0)


def test_the_state_of_an_optimizer(device):
    rank, size = place()
    model = tanh_model().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (1 + rank))
    if rank == 0:
        x, y = on(device, batches(1, 4)[0])
        cross_entropy(model(x), y).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    sums = [float(each["exp_avg"].sum()) for each in optimizer.state.values()]
    assert len(sums) == 4 and all(each["exp_avg"].device == device for each in optimizer.state.values())
    check_on_all_ranks(mpidist.all_gather_object((sums, optimizer.param_groups[0]["lr"])) == [(sums, 0.1)] * size)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_means(device, dtype):
    rank, size = place()
    problems = []
    for shape in [(), (5,), (0, 3), (300, 1000)]:
        tensor = torch.full(shape, rank + 1, dtype=dtype, device=device)
        total = torch.full(shape, size * (size + 1) // 2, dtype=dtype)
        mean = torch.full(shape, (size + 1) / 2, dtype=torch.float64).to(dtype)
        found = [
            (hvd.all_reduce(tensor), total),
            (hvd.allreduce(tensor, op=hvd.Sum), total),
            (hvd.synchronize(hvd.allreduce_async(tensor, op=hvd.Sum)), total),
            (hvd.allreduce(tensor), mean),
            (hvd.allreduce(tensor, op=hvd.Max), torch.full(shape, size, dtype=dtype)),
        ]
        problems += [problem_of(device, *pair, 1e-2 if dtype.is_floating_point else 0) for pair in found]
        problems.append(problem_of(device, tensor, torch.full(shape, rank + 1, dtype=dtype)))
        same = hvd.allreduce_(tensor, op=hvd.Sum)
        problems.append(problem_of(device, tensor, total) if same is tensor else "another tensor")
    check_on_all_ranks("".join(problems))


def test_the_other_collectives(device):
    rank, size = place()
    splits = [each + 1 for each in range(size)]
    to_all, received = hvd.alltoall(torch.full((sum(splits), 2), float(rank), device=device), torch.tensor(splits))
    joined = hvd.allgather(torch.full((rank + 1, 2), rank, device=device))
    found = [
        (joined[:, 0], [each for each in range(size) for _ in range(each + 1)]),
        (hvd.broadcast(torch.full((3,), rank, device=device), size - 1), [size - 1] * 3),
        (to_all[:, 0], [each for each in range(size) for _ in range(rank + 1)]),
        (
            hvd.reducescatter(torch.arange(2 * size, device=device)[:, None] * (rank + 1), op=hvd.Sum)[:, 0],
            [size * (size + 1) // 2 * each for each in (2 * rank, 2 * rank + 1)],
        ),
        *((each, [size * (size - 1) / 2] * 3) for each in hvd.grouped_allreduce(
            [torch.full((3,), float(rank), device=device)] * 2, op=hvd.Sum
        )),
    ]  # fmt: skip
    assert received.tolist() == [rank + 1] * size
    check_on_all_ranks("".join(problem_of(device, *pair) for pair in found))


def test_gradients_of_collectives(device):
    """That of the sum of all ranks' losses; each loss is the sum of what came out, weighted by the rank's number."""
    rank, size = place()
    total, problems = size * (size + 1) / 2, []
    for fn, wanted in [
        (lambda x: hvd.all_reduce(x), total),
        (lambda x: hvd.allreduce(x), total / size),
        (lambda x: hvd.allgather(x), total),
        (lambda x: hvd.broadcast(x, 0), total if rank == 0 else 0.0),
    ]:
        x = torch.ones(2, 3, dtype=torch.float64, device=device, requires_grad=True)
        (fn(x) * (rank + 1.0)).sum().backward()
        problems.append(problem_of(device, x.grad, torch.full((2, 3), wanted, dtype=torch.float64), 1e-12))
    check_on_all_ranks("".join(problems))


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(only=True)
@pytest.mark.parametrize("count", [3, 3_000_000])
@pytest.mark.parametrize("is_default", [True, False])
def test_calls_are_ordered_on_pytorch_s_current_stream(device, is_default, count):
    rank, size = place()
    problems = []
    stream = torch.cuda.current_stream() if is_default else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor = torch.zeros(count, device=device)
        for turn in range(3):
            torch.cuda._sleep(100_000_000)
            tensor.fill_(rank + 1 + turn)
            found = hvd.all_reduce(tensor)
            tensor.fill_(-100)
            doubled = found * 2
            expected = torch.full((count,), 2.0 * (size * (size + 1) / 2 + turn * size))
            problems.append(problem_of(device, doubled, expected))
    check_on_all_ranks("".join(problems))


@pytest.mark.gpu(only=True)
def test_backward_passes_in_another_stream(device):
    data = on(device, batches(4, ROWS))
    bare = tanh_model().to(device)
    expected = trained_alone(bare, OPTIMIZERS["sgd"], data)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        model = hvd.DistributedDataParallel(bare)
        optimizer = OPTIMIZERS["sgd"](model.parameters())
        for batch in data:
            x, y = part(batch, "even")
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
        torch.cuda.current_stream().synchronize()
    check_alike(device, bare, expected)


@pytest.mark.gpu(only=True)
def test_a_model_whose_parts_lie_apart_is_refused_or_right(device):
    """One layer on the host, one on the card: not all gradients can go together."""
    bare = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4).to(device), "b": torch.nn.Linear(4, 2)})
    try:
        model = hvd.DistributedDataParallel(bare)
        model.forward = lambda x: bare["b"](bare["a"](x.to(device)).cpu())
        model(torch.ones(3, 4)).sum().backward()
        text = ""
    except (RuntimeError, ValueError, TypeError) as error:
        text = str(error)
    told = mpidist.all_gather_object(bool(text))
    assert len(set(told)) == 1
    assert not text or ("cpu" in text and "cuda" in text), text
