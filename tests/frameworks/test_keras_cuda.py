"""Keras models on a GPU, on a pretended device: pretended is what the adapters of PyTorch and JAX say of it, and do.

There is no GPU here.  Variables and gradients lie in host memory; what is reduced are arrays that the host cannot read.
"""

from __future__ import annotations

import importlib.util
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

import mpidist
import mpidist.keras
from mpidist.collectives.reductions.plan_cache import Bindings
from mpidist.errors import CollectiveMismatchError, MissingDependencyError
from mpidist.frameworks.keras import backends, distribution, own_device
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.testing.device import DeviceArray, pretended_device
from mpidist.world import world_communicator
from tests.frameworks.keras_models import (
    BACKEND,
    BOUNDS,
    X,
    Y,
    assert_alike,
    assert_histories,
    assert_same,
    compiled,
    distributed,
    functional,
    pair,
    rank,
    ranks,
    sequential,
    stock,
)
from tests.frameworks.test_keras_layer_state import make as counting
from tests.frameworks.test_keras_layer_state import values

if BACKEND == "torch":
    import torch

    from mpidist.frameworks.torch import cuda, tensors
else:
    import jax

    from mpidist.frameworks.jax import cuda

pytestmark = pytest.mark.mpi


class Device:
    """What is pretended: how many arrays were reduced on the device, and the sizes of those that were on the host."""

    def __init__(self, monkeypatch):
        self.arrays, self.sizes_on_host, self._depth = 0, [], 0
        for dtype in (torch.float32, torch.int32) if BACKEND == "torch" else ():  # made of tensors of the host
            tensors.is_known(dtype)
        reduce = ModelReplica.reduce

        def watched(replica, op, arrays):
            self.sizes_on_host += [each.size for each in arrays]
            return reduce(replica, op, arrays)

        monkeypatch.setattr(ModelReplica, "reduce", watched)
        monkeypatch.setattr(cuda, "has", lambda tensor: True)
        monkeypatch.setattr(cuda, "require_cupy", lambda *instead: None)
        monkeypatch.setattr(cuda, "array_of", self.array_of)
        if BACKEND == "torch":
            monkeypatch.setattr(cuda, "in_order_of", self.in_order_of)
        else:
            monkeypatch.setattr(cuda, "near", lambda placement: nullcontext())
            monkeypatch.setattr(cuda, "given", self.given)

    def array_of(self, tensor, dtype, is_kept=True):
        assert BACKEND == "jax" or self._depth, "an array was made outside of the order of PyTorch's stream"
        self.arrays += 1
        return DeviceArray(numpy.asarray(tensor))

    @contextmanager
    def in_order_of(self, tensor):
        self._depth += 1
        yield
        self._depth -= 1

    def given(self, results, dtypes, placements):
        return [jax.numpy.array(each._hidden, dtype) for each, dtype in zip(results, dtypes, strict=True)]


@pytest.fixture(params=["", "the device is a pretended one"], ids=["linked", "staged"])
def device(request, monkeypatch):
    monkeypatch.setattr(world_communicator(), "bindings", Bindings())  # it has those of the other device
    with pretended_device(request.param):
        yield Device(monkeypatch)


def sgd(rate=0.05):
    return keras.optimizers.SGD(rate, momentum=0.9)


@pytest.mark.parametrize("batch_size", [16, 1])
def test_fit_evaluate_and_predict_take_no_gradient_to_the_host(device, batch_size):
    """Of 45 rows: the last batch has 13; or replicas have none."""

    def train(model):
        history = model.fit(X, Y, batch_size=batch_size, validation_data=(X[:7], Y[:7]), verbose=0)
        return history, model.evaluate(X, Y, batch_size=10, verbose=0), model.predict(X, batch_size=10, verbose=0)

    (one, expected), (many, found) = pair(functional, compiled())(train)
    assert_histories(expected[0], found[0])
    assert_same(one, many)
    numpy.testing.assert_allclose(found[1], expected[1], **BOUNDS)
    numpy.testing.assert_allclose(found[2], expected[2], **BOUNDS)
    if ranks() > 1:
        assert device.arrays >= 4 * -(-45 // batch_size)
        assert set(device.sizes_on_host) == {1}  # votes for an end


def test_one_batch_and_a_file(device, tmp_path):
    def train(model):
        model.train_on_batch(X[:9], Y[:9])
        results = model.train_on_batch(X[9:16], Y[9:16]), model.test_on_batch(X, Y)
        model.save_weights(tmp_path / "now.weights.h5")
        return results, model.predict_on_batch(X)

    (one, expected), (many, found) = pair(sequential, compiled())(train)
    for mine, other in zip(expected[0], found[0], strict=True):
        numpy.testing.assert_allclose(other, mine, **BOUNDS)
    numpy.testing.assert_allclose(found[1], expected[1], **BOUNDS)
    assert_same(one, many)
    again = stock(sequential, compiled(), seed=9)
    again.load_weights(tmp_path / "now.weights.h5")
    assert_same(again, many)


@pytest.mark.parametrize("make", [
    mpidist.CentralStorageStrategy,
    lambda: mpidist.MirroredStrategy(cross_device_ops=mpidist.ReductionToOneDevice()),
])  # fmt: skip
def test_strategies_that_reduce_in_a_way_of_their_own(device, make):
    def train(model):
        return model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)

    (one, expected), (many, found) = pair(sequential, compiled(optimizer=sgd), strategy=make())(train)
    assert_histories(expected, found)
    assert_same(one, many)
    if ranks() > 1:
        assert device.arrays and set(device.sizes_on_host) == {1}


@pytest.mark.parametrize("batch_size", [12, 1])
def test_what_layers_change_is_reduced_there_too(device, batch_size):
    def train(model):
        model.fit(X, Y, batch_size=batch_size, shuffle=False, verbose=0)
        model.evaluate(X[:5], Y[:5], batch_size=batch_size, verbose=0)
        model.predict(X[:5], batch_size=batch_size, verbose=0)
        return values(model)

    (_, expected), (many, found) = pair(counting, compiled(optimizer=sgd))(train)
    steps = {"first"} if ranks() > 1 else set()  # the rows of replica 0
    for name in expected.keys() - steps:
        numpy.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-5, err_msg=name)
    assert_alike(many)
    if ranks() > 1:
        assert set(device.sizes_on_host) == {1}


def test_weights_of_16_bits_are_summed_in_32(device):
    def make():
        policy = "bfloat16"
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(6, dtype=policy), keras.layers.Dense(1)])

    def train(model):
        return model.fit(X[:24], Y[:24], batch_size=12, shuffle=False, verbose=0)

    (one, _), (many, _) = pair(make, compiled(optimizer=sgd, metrics=()))(train)
    for mine, other in zip(one.get_weights(), many.get_weights(), strict=True):
        assert mine.dtype == other.dtype
        numpy.testing.assert_allclose(other.astype("f4"), mine.astype("f4"), rtol=3e-2, atol=3e-2)


def test_any_rank_ends_the_training(device):
    class Ending(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = self.model.stop_training or (batch == 2 and rank() == ranks() - 1)

    model = distributed(sequential, compiled())
    seen = []
    counting_batches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model.fit(X, Y, batch_size=5, epochs=3, callbacks=[Ending(), counting_batches], verbose=0)
    assert seen == list(range(4 if ranks() > 1 else 3))
    assert_alike(model)


def tensors_of(gradients):
    return [None if each is None else keras.ops.convert_to_tensor(numpy.array(each, "f4")) for each in gradients]


def test_an_optimizer_in_a_loop_of_one_s_own_adds_up(device):
    """Of gradients 1, 2, ... the sum is n (n + 1) / 2."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    variables = [keras.Variable(numpy.full(3, 10.0, "f4")), keras.Variable(numpy.zeros((2, 2), "f4"))]
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5)
    for _ in range(2):
        gradients = tensors_of([numpy.full(3, rank() + 1), numpy.full((2, 2), -1)])
        strategy.run(lambda gradients=gradients: optimizer.apply(gradients, variables))
    total = ranks() * (ranks() + 1) / 2
    assert keras.ops.convert_to_numpy(variables[0]).tolist() == [10 - total] * 3
    assert (keras.ops.convert_to_numpy(variables[1]) == ranks()).all()


@pytest.mark.mpi(min_size=2)
def test_gradients_that_some_ranks_do_not_have_are_an_error_on_all(device):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    variables = [keras.Variable(numpy.zeros(3, "f4")), keras.Variable(numpy.zeros(2, "f4")), keras.Variable([1.0])]
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5)
    given = [numpy.ones(3), None, None] if rank() == 0 else [numpy.ones(3), numpy.ones(2), None]
    reduced = backends.seam().reduced
    replica = ModelReplica(strategy)
    alike = strategy.run(lambda: reduced(replica, tensors_of([numpy.ones(3), None]), False))
    assert keras.ops.convert_to_numpy(alike[0]).tolist() == [ranks()] * 3 and alike[1] is None
    if rank() == 0:
        given[1] = None
    with pytest.raises(CollectiveMismatchError):
        strategy.run(lambda: optimizer.apply(tensors_of(given), variables))


# -- where tensors lie ------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """A device, as PyTorch and JAX describe it."""

    platform: str
    local_hardware_id: int | None

    def __str__(self):
        return f"{self.platform}:{self.local_hardware_id}"

    @property
    def type(self):
        return self.platform


class Placement(NamedTuple):
    device_set: frozenset


class Tensor:
    """What is asked about the place of a tensor."""

    def __init__(self, *places):
        self.device, self.sharding = places[0], Placement(frozenset(places))
        self.is_cuda = places[0].platform == "gpu"

    def get_device(self):
        return self.device.local_hardware_id


def replica_on(number):
    extended = SimpleNamespace(device_name=f"/job:worker/replica:0/task:0/device:GPU:{number}")
    return SimpleNamespace(name="rank 0 of 2", strategy=SimpleNamespace(extended=extended))


HOST, FIRST, SECOND, OTHER = Place("cpu", None), Place("gpu", 0), Place("gpu", 1), Place("mps", 0)


@pytest.fixture
def are_on_gpu(monkeypatch):
    monkeypatch.setattr(cuda, "require_cupy", lambda *instead: None)
    if BACKEND == "jax":
        monkeypatch.setattr(jax, "Array", Tensor)
    return own_device.are_on_gpu


def test_tensors_lie_in_host_memory_or_on_the_gpu_of_the_rank(are_on_gpu):
    assert not are_on_gpu(replica_on(1), [])
    assert not are_on_gpu(replica_on(1), [Tensor(HOST), Tensor(HOST)])
    assert are_on_gpu(replica_on(1), [Tensor(SECOND), Tensor(SECOND)])


def test_a_gpu_without_cupy_says_what_to_install_and_what_goes_without(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpidist.device.foreign", None)
    if BACKEND == "jax":
        monkeypatch.setattr(jax, "Array", Tensor)
    advice = "KERAS_TORCH_DEVICE=cpu" if BACKEND == "torch" else "JAX_PLATFORMS=cpu"
    with pytest.raises(MissingDependencyError, match=f"pip install cupy-cuda.*{advice}"):
        own_device.are_on_gpu(replica_on(1), [Tensor(SECOND)])


@pytest.mark.parametrize("places", [(FIRST,), (FIRST, SECOND), (HOST, SECOND), (SECOND, HOST), (OTHER,)])
def test_tensors_elsewhere_are_refused_with_their_places(are_on_gpu, places):
    shown = ", ".join(sorted(map(str, places)))
    advice = "KERAS_TORCH_DEVICE=cpu" if BACKEND == "torch" else "JAX_PLATFORMS=cpu"
    with pytest.raises(NotImplementedError, match=f"rank 0 of 2: .* lie on {shown}; .*device:GPU:1.*{advice}"):
        are_on_gpu(replica_on(1), list(map(Tensor, places)))


def test_a_model_that_lies_elsewhere_is_refused_before_it_trains(monkeypatch):
    def refuse(*given):
        raise NotImplementedError("it lies elsewhere")

    model = distributed(sequential, compiled())
    before = model.get_weights()
    if ranks() > 1:
        monkeypatch.setattr(backends.seam(), "are_on_gpu", refuse)
        with pytest.raises(NotImplementedError, match="it lies elsewhere"):
            model.fit(X, Y, verbose=0)
    assert all((mine == other).all() for mine, other in zip(before, model.get_weights(), strict=True))


def test_a_scope_has_keras_take_the_gpu_of_the_rank(monkeypatch):
    taken = []
    monkeypatch.setattr(backends.seam(), "use_gpu", taken.append)
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        pass
    assert not taken  # on the CPU
    monkeypatch.setattr(strategy.extended, "device_name", "/job:worker/replica:0/task:0/device:GPU:5")
    with strategy.scope():
        assert taken == ([5] if ranks() > 1 else [])
    distribution.use_gpu(strategy)
    assert taken[-1] == 5


def test_keras_takes_a_gpu_unless_it_was_told_where_to_work(monkeypatch):
    use_gpu, told = backends.seam().use_gpu, []
    if BACKEND == "torch":
        core = keras.src.backend.torch.core
        monkeypatch.setattr(torch.cuda, "set_device", told.append)
        for before, after in [("cpu", "cpu"), ("cuda:0", "cuda:0"), ("cuda", "cuda:1")]:
            monkeypatch.setattr(core, "DEFAULT_DEVICE", before)
            use_gpu(1)
            assert str(core.DEFAULT_DEVICE) == str(core.get_device()) == after
            assert core.get_device() == after
            assert (core.get_device() == "cuda") == (before == "cuda")  # which Keras asks in CUDA's own cases
            assert not core.get_device() != after
        assert told == [1]
        return
    monkeypatch.setattr(jax, "local_devices", lambda: [FIRST, SECOND])
    monkeypatch.setattr(jax.config, "update", lambda name, value: told.append((name, value)))
    use_gpu(1)
    assert not told
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    use_gpu(1)
    assert told == [("jax_default_device", SECOND)]


@pytest.mark.skipif(BACKEND != "torch", reason="JAX is given sums when the device has made them")
def test_numbers_are_read_behind_a_wait_that_meets_the_end_of_others(monkeypatch):
    """Only where NCCL is: it may wait for a rank for ever, and the host with it."""
    awaited, variable = [], keras.Variable(numpy.arange(3, dtype="f4"))
    monkeypatch.setattr(cuda, "awaited", lambda tensor: awaited.append(tensor) or tensor)
    assert backends.to_numpy(variable).tolist() == [0, 1, 2] and not awaited
    monkeypatch.setattr(backends, "has_links", lambda: True)
    for value in (variable, variable.value):
        assert backends.to_numpy(value).tolist() == [0, 1, 2]
    assert backends.to_numpy(numpy.ones(2)).tolist() == [1, 1]
    assert len(awaited) == 2 and all(each is variable.value for each in awaited)


def test_the_host_reads_numbers_in_one_place():
    package = Path(backends.__file__).parent
    others = [path.name for path in package.glob("*.py") if "convert_to_numpy" in path.read_text()]
    assert others == ["backends.py"]


# -- on a GPU Keras takes the batches of JAX one ahead ----------------------------------------------------------------


@pytest.fixture
def ahead(monkeypatch):
    """Have Keras believe that JAX computes on a GPU."""
    if BACKEND == "jax":
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_batches_that_nobody_takes_count_nowhere(ahead):
    def train(model):
        validation = {"validation_data": (X[:13], Y[:13]), "validation_batch_size": 4, "validation_steps": 2}
        history = model.fit(X, Y, batch_size=8, epochs=3, steps_per_epoch=2, shuffle=False, verbose=0, **validation)
        return history, model.predict(X, batch_size=10, steps=2, verbose=0)

    (one, expected), (many, found) = pair(sequential, compiled())(train)
    assert_histories(expected[0], found[0])
    assert_same(one, many)
    numpy.testing.assert_allclose(found[1], expected[1], **BOUNDS)


def test_epochs_of_a_data_set_come_in_their_order(ahead):
    """Also on one rank, where the model is Keras' own; a pass that looks at a batch is none."""

    class Noting(keras.Model):
        def __init__(self):
            super().__init__()
            self.last = keras.layers.Dense(1)

        def call(self, inputs):
            return self.last(inputs)

    rows = numpy.arange(12, dtype="f4").reshape(12, 1)
    dataset = mpidist.data.Dataset.from_tensor_slices((rows, rows)).shuffle(12, seed=4).batch(3)
    expected = [numpy.concatenate([x for x, _ in dataset._pass_of(epoch)]).tolist() for epoch in range(2)]
    given = []
    adapter = mpidist.keras.as_input(dataset)
    handed_out = adapter._iterate

    def noted(name):
        given.append([])
        for x, y in handed_out(name):
            given[-1].append(keras.ops.convert_to_numpy(x))
            yield x, y

    adapter._iterate = noted
    model = stock(Noting, compiled())
    model.fit(adapter, epochs=2, verbose=0)
    passes = [numpy.concatenate(each).tolist() for each in given if len(each) == 4]
    assert passes == expected
