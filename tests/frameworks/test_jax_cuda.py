"""Arrays of JAX on a GPU, on a pretended device: pretended is what `mpidist.frameworks.jax.cuda` says and does."""

from __future__ import annotations

from contextlib import nullcontext

import numpy
import pytest

import mpidist
from mpidist.collectives.reductions.plan_cache import Bindings
from mpidist.compression import Float16
from mpidist.errors import CollectiveMismatchError, MissingDependencyError, UnsupportedDtypeError
from mpidist.testing.device import DeviceArray, PretendedMemory, pretended_device
from mpidist.world import world_communicator

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytest.importorskip("optax")

import mpidist.jax as mj  # noqa: E402 - where there is no JAX, these tests are skipped
from mpidist.frameworks.jax import cuda, leaf  # noqa: E402

pytestmark = pytest.mark.mpi


def place():
    communicator = world_communicator()
    return communicator.rank, communicator.size


def given(results, dtypes, placements):
    with jax.enable_x64(True):
        values = [each._hidden.astype(dtype, copy=True) for each, dtype in zip(results, dtypes, strict=True)]
        return [jax.device_put(value.copy(), placement) for value, placement in zip(values, placements, strict=True)]


@pytest.fixture(params=["", "the device is a pretended one"], ids=["linked", "staged"])
def device(request, monkeypatch):
    monkeypatch.setattr(cuda, "has", lambda placement: True)
    monkeypatch.setattr(cuda, "require_cupy", lambda: None)
    monkeypatch.setattr(cuda, "near", lambda placement: nullcontext())
    monkeypatch.setattr(cuda, "array_of", lambda leaf, dtype: DeviceArray(numpy.asarray(leaf)))
    monkeypatch.setattr(cuda, "given", given)
    strategy = mpidist.MirroredStrategy()
    monkeypatch.setattr(strategy.extended.communicator, "bindings", Bindings())  # it has those of the other device
    with pretended_device(request.param), strategy.scope():
        yield request.param


@pytest.mark.parametrize("dtype", ["f4", "bfloat16", "i4"])
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_trees_are_reduced_where_they_lie(device, dtype, op):
    rank, size = place()
    tree = {
        "w": jnp.full((3, 2), rank + 1, dtype),
        "b": jnp.full((), 2 * rank, dtype),
        "none": jnp.zeros((0, 4), dtype),
    }
    for _ in range(3):
        found = mj.reduce_tree(tree, op)
    total = {"w": size * (size + 1) / 2, "b": size * (size - 1)}
    for name, value in total.items():
        expected = value if op == "sum" else value / size
        assert found[name].shape == tree[name].shape
        numpy.testing.assert_allclose(
            numpy.asarray(found[name], "f8"), expected, rtol=1e-2 if dtype == "bfloat16" else 1e-6
        )
        assert found[name].dtype == (jnp.float32 if op == "mean" and dtype == "i4" else tree[name].dtype)
    assert found["none"].shape == (0, 4)


def test_weighted_means_and_ranks_without_rows(device):
    rank, size = place()
    tree = [jnp.full(5, rank + 1.0), jnp.full((2, 2), -1.0)]
    weights = [2 * each + 1 for each in range(size)]
    weights[0] = 0 if size > 2 else 1
    for _ in range(2):
        found = mj.reduce_tree(tree, weight=weights[rank])
    expected = sum(weight * (each + 1) for each, weight in enumerate(weights)) / sum(weights)
    numpy.testing.assert_allclose(found[0], expected, rtol=1e-6)
    numpy.testing.assert_allclose(found[1], -1.0, rtol=1e-6)


@pytest.fixture
def host_copies(monkeypatch):
    """The names of what is copied to the host: leaves, and arrays that a collective stages."""
    copies = []
    as_host, read = leaf._JaxLeaf.on_host, PretendedMemory.read
    monkeypatch.setattr(leaf._JaxLeaf, "on_host", lambda self, x: (copies.append(self._name), as_host(self, x))[1])
    monkeypatch.setattr(PretendedMemory, "read", lambda *given: (copies.append("staged"), read(*given))[1])
    return copies


@pytest.mark.parametrize("dtype", ["f4", "bfloat16", "i4", "bool"])
def test_arrays_are_broadcast_where_they_lie(device, host_copies, dtype):
    rank, size = place()
    tree = {"w": jnp.full((3, 2), rank == size - 1, dtype), "none": jnp.zeros((0, 4), dtype), "n": 7 + rank}
    for _ in range(2):
        found = mj.broadcast_tree(tree, size - 1)
        assert found["w"].dtype == tree["w"].dtype and numpy.asarray(found["w"], "f4").tolist() == [[1, 1]] * 3
        assert found["w"] is not tree["w"] and found["none"].shape == (0, 4) and found["n"] == 6 + size
    assert host_copies == ["staged"] * 4 * (bool(device) and size > 1)  # both arrays once in each call
    assert numpy.asarray(tree["w"], "f4").tolist() == [[rank == size - 1] * 2] * 3


def test_arrays_are_gathered_where_they_lie(device, host_copies):
    rank, size = place()
    gathered = mj.all_gather(jnp.full((2, rank + 1), rank), axis=1)
    assert gathered.tolist() == [[each for each in range(size) for _ in range(each + 1)]] * 2
    assert host_copies == ["staged"] * (bool(device) and size > 1)


def test_gradients_of_a_gather_stay_where_they_lie(device, host_copies):
    rank, size = place()
    weights = jnp.arange(1.0, size + 1)
    gradient = jax.grad(lambda x: (mj.all_gather(x) * weights).sum())(jnp.ones(1))
    assert gradient.tolist() == [size * (rank + 1)]  # each rank's loss has this element, times its weight
    assert set(host_copies) <= {"staged"} and (bool(device) or not host_copies)


def test_what_cupy_has_no_arrays_of_goes_through_the_host(device, host_copies):
    rank, size = place()
    tree = {"key": jax.random.key(rank), "short": jnp.full(3, rank, jnp.float8_e4m3fn), "w": jnp.full(3, float(rank))}
    found = mj.broadcast_tree(tree, size - 1)
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(jax.random.key(size - 1))).all()
    assert found["short"].dtype == jnp.float8_e4m3fn
    assert numpy.asarray(found["short"], "f4").tolist() == found["w"].tolist() == [size - 1] * 3
    assert {"short", "w"} & set(host_copies) == {"short"}


@pytest.mark.mpi(min_size=2)
def test_a_tree_on_the_gpu_of_some_ranks_only_is_refused_on_all(device, monkeypatch):
    monkeypatch.setattr(cuda, "has", lambda placement: place()[0] != 1)
    with pytest.raises(CollectiveMismatchError, match="leaf w: none on rank 1, broadcast on its GPU on ranks? 0"):
        mj.broadcast_tree({"w": jnp.ones(3)})


def test_what_cannot_be_reduced_together(device):
    with pytest.raises(UnsupportedDtypeError, match="leaf 'a' lies on .*, and leaf 'b' in host memory: .*device_put"):
        mj.reduce_tree({"a": jnp.ones(3), "b": 1.5})
    if place()[1] > 1:
        with pytest.raises(UnsupportedDtypeError, match="codes values in host memory, and leaf 'a' lies on a GPU"):
            mj.TreeReduction(compression=Float16())({"a": jnp.ones(3)})


def test_arrays_on_a_gpu_without_cupy_say_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpidist.device.foreign", None)
    with pytest.raises(MissingDependencyError, match="pip install cupy-cuda13x"):
        cuda.require_cupy()
