"""`mpidist.jax` outside of `jit`, with arrays on a GPU; on the host with ``MPIDIST_TEST_ON=numpy``."""

from __future__ import annotations

import numpy
import pytest

from tests.gpu import library

jax = pytest.importorskip("jax")

import mpidist.jax as mj  # noqa: E402
from tests.gpu.library import check_on_all_ranks, place  # noqa: E402

jnp = jax.numpy
pytestmark = [pytest.mark.mpi, pytest.mark.gpu]


@pytest.fixture(autouse=True)
def device():
    """The device of all arrays: this rank's, which must be a GPU unless NumPy is asked for."""
    library.require()
    if library.is_numpy():
        with jax.default_device(jax.devices("cpu")[0]):
            yield
        return
    if mj.device().platform != "gpu":
        pytest.skip(f"JAX computes on {jax.default_backend()}")
    yield


def problem_of(found, expected, rtol=0.0):
    """Return what is wrong with an array of JAX's; empty if nothing is."""
    if not isinstance(found, jax.Array) or {each.platform for each in found.devices()} != {_platform()}:
        return f"{type(found).__name__} lies elsewhere"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype}{found.shape} in place of {expected.dtype}{expected.shape}"
    values = numpy.asarray(found).astype("f8")
    right = numpy.allclose(values, numpy.asarray(expected).astype("f8"), rtol, 0)
    return "" if right else f"{values.reshape(-1)[:3]} in place of {expected.reshape(-1)[:3]}"


def _platform():
    return "cpu" if library.is_numpy() else "gpu"


@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int32"])
def test_trees_are_reduced(dtype, op):
    rank, size = place()
    tree = {"a": jnp.full((30, 2), rank + 1, dtype), "b": (None, jnp.asarray(rank, dtype), jnp.zeros((0, 3), dtype))}
    found = mj.reduce_tree(tree, op)
    divisor = size if op == "mean" else 1
    kept = "float32" if op == "mean" and dtype == "int32" else dtype
    problems = [
        problem_of(found["a"], numpy.full((30, 2), size * (size + 1) / 2 / divisor).astype(jnp.dtype(kept)), 1e-2),
        problem_of(found["b"][1], numpy.asarray(size * (size - 1) / 2 / divisor).astype(jnp.dtype(kept)), 1e-2),
        problem_of(found["b"][2], numpy.zeros((0, 3), jnp.dtype(kept))),
    ]
    assert found["b"][0] is None
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_trees_of_the_root(dtype):
    rank, size = place()
    for root in {0, size - 1}:
        tree = [jnp.full((7, 3), rank == root, dtype), jnp.full((300_000,), rank == root, dtype)]
        found = mj.broadcast_tree(tree, root)
        expected = [numpy.ones(each.shape, jnp.dtype(dtype)) for each in tree]
        check_on_all_ranks("".join(map(problem_of, found, expected)))


def test_what_is_still_being_computed():
    """JAX enqueues and returns; the call waits for it."""
    rank, size = place()
    work = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: jnp.tanh(y @ x) * 0 + (rank + 1.0), x))
    found = mj.reduce_tree({"w": work(jnp.ones((500, 500), "float32"))}, "sum")
    check_on_all_ranks(problem_of(found["w"], numpy.full((500, 500), size * (size + 1) / 2, "f4")))


def test_results_stay_as_they_are_and_so_does_what_was_given():
    rank, size = place()
    kept, given = [], []
    for turn in range(6):
        given.append(jnp.full((200, 300), float(rank + turn), "float32"))
        kept.append(mj.reduce_tree(given[-1], "sum"))
    problems = [
        problem_of(each, numpy.full((200, 300), size * (size - 1) / 2 + size * turn, "f4"))
        for turn, each in enumerate(kept)
    ]
    problems += [problem_of(each, numpy.full((200, 300), rank + turn, "f4")) for turn, each in enumerate(given)]
    check_on_all_ranks("".join(problems))


def test_many_leaves():
    rank, size = place()
    tree = {f"leaf {each}": jax.device_put(numpy.full(each * 37, rank + each, "f4")) for each in range(30)}
    found = mj.reduce_tree(tree, "mean")
    problems = [
        problem_of(found[f"leaf {each}"], numpy.full(each * 37, (size - 1) / 2 + each, "f4"), 1e-6)
        for each in range(30)
    ]
    check_on_all_ranks("".join(problems))


@pytest.mark.parametrize("kind", ["even", "uneven"])
def test_training_equals_one_process_on_the_global_batch(kind):
    rank, size = place()
    count = 12
    at = [count * each // size for each in range(size + 1)]
    if kind == "uneven":
        at = [*(count * each // (size + 2) for each in range(size)), count]
    random = numpy.random.default_rng(0)
    with jax.enable_x64(True):
        start = {"w": jnp.asarray(random.normal(size=(6, 5))), "b": jnp.zeros(5)}
        gradient_fn = jax.jit(jax.grad(lambda m, x, y: ((jnp.tanh(x @ m["w"] + m["b"]) - y) ** 2).mean()))
        model, expected = mj.broadcast_tree(jax.tree.map(lambda leaf: leaf + rank, start)), start
        for _ in range(5):
            x, y = random.normal(size=(count, 6)), random.normal(size=(count, 5))
            part = slice(at[rank], at[rank + 1])
            gradients = mj.reduce_tree(gradient_fn(model, x[part], y[part]), weight=at[rank + 1] - at[rank])
            model = jax.tree.map(lambda p, g: p - 0.1 * g, model, gradients)
            expected = jax.tree.map(lambda p, g: p - 0.1 * g, expected, gradient_fn(expected, x, y))
        problems = [problem_of(model[name], numpy.asarray(expected[name]), 1e-11) for name in expected]
    check_on_all_ranks("".join(problems))
