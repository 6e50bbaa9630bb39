"""Arrays of JAX on a GPU, on a pretended device: pretended is what `mpidist.frameworks.jax.cuda` says and does."""

from __future__ import annotations

from contextlib import nullcontext

import numpy
import pytest

import mpidist
from mpidist.compression import Float16
from mpidist.errors import MissingDependencyError, UnsupportedDtypeError
from mpidist.testing.device import DeviceArray, pretended_device
from mpidist.world import world_communicator

jax = pytest.importorskip("jax")
jnp = jax.numpy
pytest.importorskip("optax")

import mpidist.jax as mj  # noqa: E402 - where there is no JAX, these tests are skipped
from mpidist.frameworks.jax import cuda  # noqa: E402

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
    with pretended_device(request.param), mpidist.MirroredStrategy().scope():
        yield


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


def test_broadcasts_go_through_the_host(device):
    rank, size = place()
    found = mj.broadcast_tree({"w": jnp.full(3, rank + 1.0), "n": 7 + rank}, size - 1)
    assert (found["w"] == size).all() and found["n"] == 6 + size
    assert mj.all_gather(jnp.full((1, 2), rank)).tolist() == [[each, each] for each in range(size)]


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
