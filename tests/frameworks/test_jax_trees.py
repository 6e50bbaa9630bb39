"""`mpidist.jax`: trees reduced and broadcast, optax, and gradients through collectives; on any number of ranks.

The law: any number of ranks gives what one process gives on the global batch.
"""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.compression import Float16, TopK
from mpidist.cross_device_ops import AllReduceCrossDeviceOps
from mpidist.errors import CollectiveMismatchError, UnsupportedDtypeError
from mpidist.world import world_communicator

jax = pytest.importorskip("jax")
jax.config.update("jax_num_cpu_devices", 4)
jnp = jax.numpy
optax = pytest.importorskip("optax")

import mpidist.jax as mj  # noqa: E402 - where there is no JAX, these tests are skipped

pytestmark = pytest.mark.mpi

WIDTHS = (6, 5, 3)


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def place():
    communicator = world_communicator()
    return communicator.rank, communicator.size


def agreed(values):
    """Return whether all ranks have the same bits."""
    raw = b"".join(numpy.asarray(value).tobytes() for value in jax.tree.leaves(values))
    return len(set(world_communicator().exchange(raw))) == 1


# -- a model ----------------------------------------------------------------------------------------------------------


def parameters(dtype, seed=0):
    rng = numpy.random.default_rng(seed)
    pairs = zip(WIDTHS[:-1], WIDTHS[1:], strict=True)
    return [{"w": jnp.asarray(rng.normal(size=pair), dtype), "b": jnp.zeros(pair[1], dtype)} for pair in pairs]


def loss(model, x, y):
    for layer in model:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return ((x - y) ** 2).mean()


def batches(rows, steps, dtype):
    rng = numpy.random.default_rng(1)
    return [
        (rng.normal(size=(rows, WIDTHS[0])).astype(dtype), rng.normal(size=(rows, WIDTHS[-1])).astype(dtype))
        for _ in range(steps)
    ]


apply_updates = jax.jit(optax.apply_updates)


def part(batch, step, rank, size):
    """Return a rank's rows: even or uneven ones, and in some steps none for all ranks but the first and the last."""
    rows = len(batch[0])
    firsts = [numpy.arange(size) / size, (numpy.arange(size) / size) ** 0.5, [0, *([0.3] * (size - 1))]][step % 3]
    bounds = [*(int(rows * first) for first in firsts), rows]
    return [each[bounds[rank] : bounds[rank + 1]] for each in batch]


def one_process(optimizer, rows, steps, dtype):
    """Return the parameters after training on the global batches."""
    model, gradient_fn = parameters(dtype), jax.jit(jax.grad(loss))
    state, update = optimizer.init(model), jax.jit(optimizer.update)
    for batch in batches(rows, steps, dtype):
        updates, state = update(gradient_fn(model, *batch), state, model)
        model = apply_updates(model, updates)
    return model


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam, clipped": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(1e-2)),
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_one_process_on_the_global_batch(name, x64):
    (rank, size), steps, rows = place(), 10, 10
    expected = one_process(OPTIMIZERS[name](), rows, steps, "f8")
    optimizer = mj.distributed(OPTIMIZERS[name]())
    model = mj.broadcast_tree(parameters("f8", seed=rank))
    state, gradient_fn = optimizer.init(model), jax.jit(jax.grad(loss))
    for step, batch in enumerate(batches(rows, steps, "f8")):
        x, y = part(batch, step, rank, size)
        updates, state = optimizer.update(gradient_fn(model, x, y), state, model, weight=len(x))
        model = apply_updates(model, updates)
    assert agreed((model, state))
    for found, each in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        numpy.testing.assert_allclose(found, each, rtol=1e-12, atol=1e-12)


def test_training_in_float32_without_x64():
    (rank, size), steps, rows = place(), 10, 12
    expected = one_process(optax.sgd(0.1), rows, steps, "f4")
    model, gradient_fn = mj.broadcast_tree(parameters("f4", seed=rank)), jax.jit(jax.grad(loss))
    for step, batch in enumerate(batches(rows, steps, "f4")):
        x, y = part(batch, step, rank, size)
        gradients = mj.reduce_tree(gradient_fn(model, x, y), weight=len(x))
        model = jax.tree.map(lambda p, g: p - 0.1 * g, model, gradients)
    assert agreed(model)
    for found, each in zip(jax.tree.leaves(model), jax.tree.leaves(expected), strict=True):
        numpy.testing.assert_allclose(found, each, rtol=1e-5, atol=1e-6)


# -- values and dtypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["sum", "mean", "MEAN"])
@pytest.mark.parametrize("dtype", ["f4", "f2", "bfloat16", "i4", "u1", "c8"])
def test_leaves_keep_their_dtype(dtype, op):
    rank, size = place()
    tree = {"a": jnp.full((3, 2), rank + 1, dtype), "b": (None, jnp.asarray(rank, dtype))}
    found = mj.reduce_tree(tree, op)
    divisor = size if op != "sum" else 1
    is_mean_of_integers = op != "sum" and dtype in ("i4", "u1")
    for leaf, total in ((found["a"], size * (size + 1) / 2), (found["b"][1], size * (size - 1) / 2)):
        assert isinstance(leaf, jax.Array) and leaf.dtype == ("f4" if is_mean_of_integers else dtype)
        numpy.testing.assert_array_equal(leaf, jnp.full(leaf.shape, total / divisor, leaf.dtype))
    assert found["b"][0] is None


def test_float64_is_never_lost():
    """Of arrays that were made with x64, of NumPy's, and of numbers, in a process without x64."""
    (rank, _), value = place(), 1.0 + 2.0**-50
    with jax.enable_x64(True):
        wide, other = jnp.full(3, value), jnp.full(3, value + rank)
    found = mj.reduce_tree([wide, numpy.full(3, value), value, numpy.float64(value)], "mean")
    assert not jax.config.jax_enable_x64
    assert [type(each) for each in found[1:]] == [numpy.ndarray, float, numpy.float64]
    for each in found:
        assert numpy.asarray(each).dtype == "f8" and (numpy.asarray(each) == value).all()
    again = mj.broadcast_tree([other, numpy.full(3, value + rank)])
    assert all(each.dtype == "f8" and (numpy.asarray(each) == value).all() for each in again)


def test_integers_are_exact_and_their_mean_is_a_float(x64):
    (rank, size), big = place(), 2**53 + 1
    found = mj.reduce_tree([jnp.asarray(big), numpy.asarray(big), big], "sum")
    assert [int(each) for each in found] == [size * big] * 3
    assert [type(each) for each in found[1:]] == [numpy.ndarray, int]
    mean = mj.reduce_tree([jnp.asarray(rank), numpy.asarray(rank), rank])
    assert [float(each) for each in mean] == [(size - 1) / 2] * 3
    assert mean[0].dtype == mean[1].dtype == "f8" and type(mean[2]) is float


@pytest.mark.parametrize("weight", [None, "rows"])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_weak_types_stay_weak(shape, weight):
    rank, size = place()
    leaf = jax.jit(lambda: jax.lax.full_like(jnp.asarray(1.0), 1.0 + rank, shape=shape))()
    assert leaf.weak_type
    found = mj.reduce_tree(leaf, weight=weight and rank + 1)
    assert found.weak_type and (found + jnp.ones(shape, "bfloat16")).dtype == "bfloat16"
    weights = numpy.arange(1, size + 1) if weight else numpy.ones(size)
    numpy.testing.assert_allclose(found, (weights * numpy.arange(1, size + 1)).sum() / weights.sum(), rtol=1e-6)
    assert not mj.reduce_tree(jnp.ones(shape)).weak_type
    assert mj.broadcast_tree(leaf).weak_type


@pytest.mark.parametrize("dtype", ["f2", "bfloat16"])
def test_16_bits_are_rounded_once(dtype):
    """256 + 1 + 1 would stay at 256 in bfloat16, and 2048 + 1 + 1 at 2048 in float16."""
    rank, size = place()
    start = 2048 if dtype == "f2" else 256
    x = jnp.asarray([start if rank == 0 else 1], dtype)
    assert mj.reduce_tree(x, "sum")[0] == jnp.asarray(start + size - 1, dtype)
    weighted = mj.reduce_tree(x, weight=rank + 1)
    exact = (start + sum(range(2, size + 1))) / (size * (size + 1) / 2)
    assert weighted[0] == jnp.asarray(exact, dtype) and weighted.dtype == dtype


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "bfloat16"])
def test_a_rank_without_rows_does_not_count(dtype, x64):
    rank, size = place()
    weight = 0 if rank == size - 1 and size > 1 else 2
    value = jnp.full(5, rank + 1, dtype)
    if weight == 0 and dtype != "i4":
        value = value * jnp.nan
    found = mj.reduce_tree({"w": value, "n": float("nan") if weight == 0 else 1.0}, weight=weight)
    counted = numpy.arange(1, size) if size > 1 else [1]
    numpy.testing.assert_array_equal(numpy.asarray(found["w"], "f8"), numpy.mean(counted))
    assert found["n"] == 1.0


def test_weights_that_are_none_of_rows_are_refused_on_all_ranks():
    rank, size = place()
    for weight, words in [(-1, "-1 on rank 0"), (float("nan"), "nan on rank 0"), (float("inf"), "inf on rank 0")]:
        with pytest.raises(ValueError, match=f"not negative; got {words}"):
            mj.reduce_tree(jnp.ones(2), weight=weight if rank == 0 else 1)
    with pytest.raises(ValueError, match="the weights of all . ranks are 0"):
        mj.reduce_tree(jnp.ones(2), weight=0)
    with pytest.raises(ValueError, match="a weight is for op='mean'"):
        mj.reduce_tree(jnp.ones(2), "sum", weight=1)
    assert mj.reduce_tree(jnp.ones(2), weight=rank + 1).tolist() == [1.0, 1.0]


def test_other_operations_are_refused():
    with pytest.raises(ValueError, match="SUM or MEAN, got MAX"):
        mj.reduce_tree(jnp.ones(2), "max")


def test_trees_without_leaves_and_with_empty_arrays():
    assert mj.reduce_tree({"a": None, "b": ()}) == {"a": None, "b": ()}
    assert mj.broadcast_tree([]) == []
    found = mj.reduce_tree((jnp.zeros((0, 3)), numpy.zeros((2, 0))), "sum")
    assert found[0].shape == (0, 3) and found[1].shape == (2, 0)
    assert mj.broadcast_tree(jnp.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("weight", [None, 2])
def test_gradients_of_integers_have_no_values_and_come_back(weight):
    rank, size = place()

    def scaled(model):
        return model["w"].sum() * (rank + 1.0) + model["steps"].sum() * 0.0

    model = {"w": jnp.ones(3), "steps": jnp.arange(4), "none": jnp.zeros((0, 2), int)}
    gradients = jax.grad(scaled, allow_int=True)(model)
    assert gradients["steps"].dtype == jax.dtypes.float0
    for found in (mj.reduce_tree(gradients), mj.TreeReduction("mean")(gradients, weight)):
        numpy.testing.assert_allclose(found["w"], numpy.full(3, (size + 1) / 2))
        assert [found[name].dtype for name in ("steps", "none")] == [jax.dtypes.float0] * 2
        assert [found[name].shape for name in ("steps", "none")] == [(4,), (0, 2)]
    assert mj.broadcast_tree(gradients)["steps"].dtype == jax.dtypes.float0


def test_any_pytree():
    rank, size = place()
    state = optax.adam(1e-3).init({"w": jnp.full(3, float(rank)), "static": None})
    found = mj.broadcast_tree(state, root_rank=size - 1)
    assert jax.tree.structure(found) == jax.tree.structure(state) and type(found) is type(state)

    class Layer:
        def __init__(self, w):
            self.w = w

    jax.tree_util.register_pytree_with_keys(
        Layer, lambda layer: ([(jax.tree_util.GetAttrKey("w"), layer.w)], None), lambda _, leaves: Layer(*leaves)
    )
    assert (mj.reduce_tree(Layer(jnp.full(2, rank + 1.0)), "sum").w == size * (size + 1) / 2).all()


# -- aliases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("elements", [100, 4096, 100_003, 1_000_000])
def test_what_jax_was_handed_is_never_written_again(elements, weighted):
    """The race: JAX reads host memory after the call that handed it over.  Some results are kept, others let go."""
    rank, size = place()
    kept, later = [], jax.jit(lambda w, b: (w + w, b * 1))
    for step in range(14):
        tree = {"w": jnp.full(elements, step, "f4"), "b": jnp.full(7, step, "f4"), "n": numpy.full(9, float(step))}
        found = mj.reduce_tree(tree, weight=rank + 1 if weighted else None)
        lazily = later(found["w"], found["b"])
        kept = [*kept[-3:], (step, found, lazily)] if step % 3 else [(step, found, lazily), *kept[1:]]
        del found, lazily
        for then, tree, (doubled, same) in kept:
            for array, factor in ((tree["w"], 1), (tree["b"], 1), (tree["n"], 1), (doubled, 2), (same, 1)):
                difference = numpy.asarray(array) - factor * then
                assert numpy.abs(difference).max() <= 1e-6 * factor * then, (then, step)


@pytest.mark.parametrize("elements", [100, 1_000_000])
def test_results_may_be_donated(elements):
    """What a jitted function makes in the memory of its donated arguments is not written by later reductions."""
    rank, size = place()
    take = jax.jit(lambda tree: jax.tree.map(lambda each: each + 1, tree), donate_argnums=0)
    kept = []
    for step in range(12):
        taken = take(mj.reduce_tree({"w": jnp.full(elements, step, "f4"), "b": jnp.full(64, step, "f4")}))
        if step % 2:
            taken = take(mj.broadcast_tree(taken))
        kept = [*kept[-3:], (step + 1 + step % 2, taken)]
        for then, tree in kept:
            assert (numpy.asarray(tree["w"]) == then).all() and (numpy.asarray(tree["b"]) == then).all()


def test_the_arrays_of_numpy_are_the_caller_s():
    given = numpy.ones(1000)
    first = mj.reduce_tree({"a": given})["a"]
    first += 5
    second = mj.reduce_tree({"a": given})["a"]
    assert (second == 1).all() and (first == 6).all() and (given == 1).all() and first.flags.writeable
    third = mj.broadcast_tree(given)
    third += 1
    assert (given == 1).all()


# -- starting and waiting ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
def test_several_trees_under_way(weighted):
    rank, size = place()
    weight = rank + 1 if weighted else None
    weights = numpy.arange(1, size + 1) if weighted else numpy.ones(size)
    first, second = mj.TreeReduction(), mj.TreeReduction()
    handles = [first.start(jnp.full(9, float(rank)), weight), second.start([jnp.full(5, 2.0 * rank)], weight)]
    a, (b,) = handles[0].wait(), handles[1].wait()
    mean = (weights * numpy.arange(size)).sum() / weights.sum()
    numpy.testing.assert_allclose(a, mean, rtol=1e-6)
    numpy.testing.assert_allclose(b, 2 * mean, rtol=1e-6)
    assert (handles[0].wait() == a).all()


@pytest.mark.mpi(min_size=2)
def test_a_second_start_before_the_first_was_waited_for():
    rank, size = place()
    reduction = mj.TreeReduction()
    handle = reduction.start(jnp.full(9, float(rank)))
    with pytest.raises(RuntimeError, match="is under way"):
        reduction.start(jnp.full(9, 100.0))
    assert (handle.wait() == (size - 1) / 2).all()


def test_compressed_trees_and_their_state():
    (rank, _), reduction = place(), mj.TreeReduction("mean", TopK(0.2))
    optimizer = mj.distributed(optax.sgd(1.0), reduction=reduction)
    assert reduction.state_dict() == {}
    total, state = jnp.zeros(10), optimizer.init(jnp.zeros(10))
    given = [numpy.random.default_rng([rank, step]).normal(size=10).astype("f4") for step in range(6)]
    for gradient in given:
        updates, state = optimizer.update(jnp.asarray(gradient), state)
        total = total - updates
    saved = reduction.state_dict()
    everything = mj.reduce_tree(numpy.sum(given, axis=0))
    lost = saved["float32.residues"].sum(axis=0)
    numpy.testing.assert_allclose(total + lost, everything, rtol=1e-4, atol=1e-5)
    restored = mj.TreeReduction("mean", TopK(0.2))
    restored.load_state_dict(saved)
    numpy.testing.assert_array_equal(restored(jnp.ones(10)), reduction(jnp.ones(10)))
    reduction({"another": jnp.ones(3)})
    with pytest.raises(RuntimeError, match="2 trees of different structures"):
        reduction.state_dict()


@pytest.mark.parametrize("weighted", [False, True])
def test_compression_to_float16_within_its_error(weighted):
    rank, size = place()
    values = numpy.random.default_rng(rank).normal(size=300).astype("f4")
    weights = numpy.arange(1, size + 1) if weighted else numpy.ones(size)
    found = mj.TreeReduction("mean", Float16())({"w": jnp.asarray(values)}, weight=rank + 1 if weighted else None)
    every = numpy.stack([numpy.random.default_rng(each).normal(size=300) for each in range(size)])
    exact = weights @ every / weights.sum()
    bound = 2.0**-10 * (weights @ numpy.abs(every) / weights.sum()) * 1.01 + 1e-7
    assert (numpy.abs(numpy.asarray(found["w"]) - exact) <= bound).all() and agreed(found)


# -- accidents --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [mj.reduce_tree, mj.broadcast_tree], ids=["reduce", "broadcast"])
@pytest.mark.parametrize("transform", [
    lambda fn: jax.jit(fn),
    lambda fn: jax.vmap(fn),
    lambda fn: jax.grad(lambda x: fn(x)["a"].sum()),
], ids=["jit", "vmap", "grad"])  # fmt: skip
def test_inside_a_transformation_of_jax_it_is_an_error(transform, function):
    with pytest.raises(TypeError, match=r"inside jit, grad .*\(leaf 'a' has no value yet\).*outside"):
        transform(lambda x: function({"a": x}))(jnp.ones(3))


@pytest.mark.parametrize("function", [mj.reduce_tree, mj.broadcast_tree], ids=["reduce", "broadcast"])
def test_donated_arrays_are_named(function):
    tree = {"layers": [{"w": jnp.ones((512, 512))}]}
    function(tree)
    jax.jit(lambda tree: jax.tree.map(lambda each: each + 1, tree), donate_argnums=0)(tree)
    assert tree["layers"][0]["w"].is_deleted()
    with pytest.raises(ValueError, match=r"leaf 'layers/0/w' was deleted: .*donate"):
        function(tree)


@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_random_keys_are_broadcast(make):
    rank, size = place()
    keys = mj.broadcast_tree({"key": jax.random.split(make(rank), 3)}, root_rank=size - 1)["key"]
    expected = jax.random.split(make(size - 1), 3)
    assert keys.dtype == expected.dtype
    numpy.testing.assert_array_equal(jax.random.bits(keys[0], (4,)), jax.random.bits(expected[0], (4,)))


def test_random_keys_have_no_sum():
    with pytest.raises(TypeError, match=r"leaf 'key' is an array of random keys, which have no sum"):
        mj.reduce_tree({"key": jax.random.key(0)})


@pytest.mark.mpi(min_size=2)
def test_keys_of_different_kinds_are_named():
    rank, _ = place()
    key = jax.random.key(0, impl="threefry2x32" if rank == 0 else "rbg")
    with pytest.raises(CollectiveMismatchError, match=r"'key' key<rbg> \(\)"):
        mj.broadcast_tree({"key": key})


@pytest.mark.parametrize("leaf", ["text", print, object()], ids=["text", "function", "object"])
@pytest.mark.parametrize("function", [mj.reduce_tree, mj.broadcast_tree], ids=["reduce", "broadcast"])
def test_leaves_that_are_no_arrays_are_named(function, leaf):
    with pytest.raises(TypeError, match=r"leaf 'activation' is a .*; expected arrays of JAX or NumPy"):
        function({"activation": leaf, "w": jnp.ones(2)})


@pytest.mark.parametrize("leaf", [numpy.array([True]), jnp.ones(3, "float8_e4m3fn")], ids=["bool", "float8"])
def test_dtypes_without_a_sum_are_named_and_broadcast(leaf):
    with pytest.raises(UnsupportedDtypeError, match=r"leaf 'mask': there is no reduction 'sum'"):
        mj.reduce_tree({"mask": leaf})
    found = mj.broadcast_tree(leaf)
    assert found.dtype == leaf.dtype and type(found) is type(leaf)
    numpy.testing.assert_array_equal(numpy.asarray(found, "f4"), numpy.asarray(leaf, "f4"))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("function", [mj.reduce_tree, mj.broadcast_tree], ids=["reduce", "broadcast"])
@pytest.mark.parametrize(("other", "words"), [
    ({"w": numpy.ones((2, 4), "f4"), "b": numpy.ones(3, "f4")}, r"'w' float32 \(2, 4\)"),
    ({"w": numpy.ones((2, 3), "f8"), "b": numpy.ones(3, "f4")}, r"'w' float64 \(2, 3\)"),
    ({"w": numpy.ones((2, 3), "f4")}, r"passed 1 tensor"),
    ({"w": numpy.ones((2, 3), "f4"), "b": None}, r"passed 1 tensor"),
    ({"w": numpy.ones((2, 3), "f4"), "c": numpy.ones(3, "f4")}, r"'c' float32 \(3,\)"),
], ids=["shape", "dtype", "missing", "none", "name"])  # fmt: skip
def test_trees_that_differ_between_ranks_are_named(other, words, function):
    rank, size = place()
    same = {"w": numpy.ones((2, 3), "f4"), "b": numpy.ones(3, "f4")}
    with pytest.raises(CollectiveMismatchError, match=words):
        function(other if rank == size - 1 else same)
    function(same)


@pytest.mark.mpi(min_size=2)
def test_a_weight_on_one_rank_only_is_named():
    rank, _ = place()
    with pytest.raises(CollectiveMismatchError, match="weights of the ranks"):
        mj.reduce_tree(jnp.ones(3), weight=2 if rank == 0 else None)


def test_multi_steps_around_it_is_an_error():
    optimizer = optax.MultiSteps(mj.distributed(optax.sgd(0.1)), 2)
    with pytest.raises(TypeError, match="inside jit"):
        optimizer.update(jnp.ones(3), optimizer.init(jnp.ones(3)), jnp.ones(3))


def test_extra_arguments_reach_the_transformation():
    """Of a transformation that adds its extra argument, which is no array."""
    rank, size = place()

    def update(updates, state, params=None, *, value_fn, **extra):
        return jax.tree.map(lambda each: each + value_fn(), updates), state

    inner = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    optimizer = optax.chain(mj.distributed(inner, "sum"), optax.scale(2.0))
    x = jnp.full(3, rank + 1.0)
    found, _ = optimizer.update(x, optimizer.init(x), x, value_fn=lambda: 5.0)
    assert found.tolist() == [2 * (size * (size + 1) / 2 + 5)] * 3


@pytest.mark.mpi(min_size=2)
def test_extra_arguments_that_differ_between_ranks_are_refused():
    """By them parameters would drift apart: Polyak's step is the loss over the squared norm of the gradient."""
    rank, size = place()
    optimizer = mj.distributed(optax.polyak_sgd())
    x = jnp.ones(3)
    with pytest.raises(CollectiveMismatchError, match="value: .*value=mpidist.jax.reduce_tree"):
        optimizer.update(x, optimizer.init(x), x, value=jnp.float32(rank))
    with pytest.raises(CollectiveMismatchError, match="value: 0x"):
        optimizer.update(x, optimizer.init(x), x, value=numpy.full(3, rank))
    value = mj.reduce_tree(jnp.float32(rank), weight=rank + 1)
    found, _ = optimizer.update(x, optimizer.init(x), x, value=value)
    expected = sum(each * (each + 1) for each in range(size)) / sum(range(size + 1)) / 3
    numpy.testing.assert_allclose(found, numpy.full(3, -min(expected, 1.0)), rtol=1e-6)
    assert agreed(found)


def test_a_root_that_is_none():
    with pytest.raises(ValueError, match="root_rank .* is no rank of a world of"):
        mj.broadcast_tree(jnp.ones(2), root_rank=place()[1])


def test_other_things_than_transformations_are_refused():
    with pytest.raises(TypeError, match="takes an optax transformation"):
        mj.distributed(lambda updates, state, params: (updates, state))
    with pytest.raises(TypeError, match="pass an instance"):
        mj.TreeReduction("mean", Float16)


# -- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [("d",), (), (None, "d")])
def test_sharded_arrays_are_gathered_and_put_back(spec):
    rank, size = place()
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    values = numpy.arange(64.0, dtype="f4").reshape(8, 8)
    leaf = jax.device_put(values * (rank + 1), sharding)
    for found, factor in ((mj.reduce_tree(leaf, "sum"), size * (size + 1) / 2), (mj.broadcast_tree(leaf), 1)):
        assert found.sharding == sharding
        numpy.testing.assert_array_equal(found, values * factor)


@pytest.mark.parametrize("elements", [3, 100_000])
def test_an_array_stays_on_its_device_and_is_committed_as_it_was(elements):
    device = jax.devices()[2]
    leaves = [jax.device_put(jnp.ones(elements), device), jax.device_put(jnp.ones(5), device), jnp.ones(elements)]
    for found in (mj.reduce_tree(leaves), mj.broadcast_tree(leaves)):
        assert [leaf.devices() for leaf in found] == [{device}, {device}, {jax.devices()[0]}]
        assert [leaf.committed for leaf in found] == [True, True, False]
        assert all((leaf == 1).all() for leaf in found)


def test_short_leaves_of_many_dtypes_come_back_in_their_places(x64):
    rank, size = place()
    dtypes = ["f4", "f8", "bfloat16", "f4", "i4", "f8", "bfloat16", "f4"]
    tree = [jnp.full((index, 2), index + rank, dtype) for index, dtype in enumerate(dtypes)]
    for index, (found, dtype) in enumerate(zip(mj.reduce_tree(tree, "sum"), dtypes, strict=True)):
        assert found.dtype == dtype and found.shape == (index, 2)
        assert (found == index * size + size * (size - 1) / 2).all()


def test_arrays_on_several_gpus_are_refused_with_what_to_do():
    """A stand-in for the placement of such an array: there is no GPU here."""
    from types import SimpleNamespace

    from mpidist.frameworks.jax.leaf import LeafKind, leaf_of

    placement = SimpleNamespace(is_fully_addressable=True, device_set=[SimpleNamespace(platform="gpu")] * 2)
    with pytest.raises(UnsupportedDtypeError, match=r"leaf 'w' lies on 2 gpu devices.*device_get"):
        leaf_of(LeafKind(jax.Array, numpy.dtype("f4"), (3,), placement), "w", "mpidist.jax.reduce_tree")
    elsewhere = SimpleNamespace(is_fully_addressable=False)
    with pytest.raises(UnsupportedDtypeError, match="sharded over several processes of jax.distributed"):
        leaf_of(LeafKind(jax.Array, numpy.dtype("f4"), (3,), elsewhere), "w", "mpidist.jax.reduce_tree")


# -- strategies -------------------------------------------------------------------------------------------------------


def test_the_strategy_in_force_says_which_ranks():
    rank, size = place()
    alone, together = mpidist.OneDeviceStrategy("/cpu:0"), mpidist.MultiWorkerMirroredStrategy()
    x = jnp.full(3, rank + 1.0)
    assert alone.run(lambda: mj.reduce_tree(x, "sum")).tolist() == [rank + 1.0] * 3
    assert together.run(lambda: mj.reduce_tree(x, "sum")).tolist() == [size * (size + 1) / 2] * 3
    weighted = together.run(lambda: mj.reduce_tree(x, weight=rank + 1))
    numpy.testing.assert_allclose(weighted, (2 * size + 1) / 3, rtol=1e-6)


class Halves(mpidist.CrossDeviceOps):
    """A user's own way of reducing."""

    def reduce_implementation(self, reduce_op, value, destinations, options):
        return value / 2

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        return [value / 2 for value, _ in pairs]


class Doubling(AllReduceCrossDeviceOps):
    """A user's own way, with messages."""

    def batch_reduce_implementation(self, reduce_op, pairs, options):
        return [2 * each for each in super().batch_reduce_implementation(reduce_op, pairs, options)]


@pytest.mark.parametrize("make", [AllReduceCrossDeviceOps, Doubling], ids=["bound", "a user's own"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_tree_without_leaves_on_one_rank_is_told_so(make, is_weighted):
    strategy = mpidist.MirroredStrategy(cross_device_ops=make())
    rank, size = place()

    def on_rank(tree):
        return strategy.run(lambda: mj.reduce_tree(tree, weight=rank + 1.0 if is_weighted else None))

    assert on_rank({}) == {}
    if size > 1:
        with pytest.raises(CollectiveMismatchError, match="passed 0 tensors|called all_reduce"):
            on_rank({} if rank == 0 else {"a": jnp.ones(2)})
    assert on_rank({}) == {}


def test_a_user_s_own_way_of_reducing_is_taken():
    strategy = mpidist.MirroredStrategy(cross_device_ops=Halves())
    found = strategy.run(lambda: mj.reduce_tree([jnp.ones(3), jnp.ones(2)], "sum"))
    assert [each.tolist() for each in found] == ([[0.5] * 3, [0.5] * 2] if place()[1] > 1 else [[1.0] * 3, [1.0] * 2])


# -- gradients through collectives ------------------------------------------------------------------------------------

ROWS = 13


def rows_of(rank, size):
    return {1: [0, 13], 2: [0, 9, 13], 3: [0, 9, 10, 13]}.get(size, numpy.linspace(0, 13, size + 1).astype(int))[
        rank : rank + 2
    ]


@jax.jit
def hidden(w, x):
    h = x @ w
    return h, h.sum(axis=0)


@jax.jit
def centred(h, mean):
    return h - mean, ((h - mean) ** 2).sum(axis=0)


@jax.jit
def normalized(c, variance):
    return jnp.tanh(c / jnp.sqrt(variance + 1e-5))


@jax.jit
def end(own, every, target, first):
    logits = own @ every.T
    numbers = jnp.arange(len(own))
    contrast = jax.nn.logsumexp(logits, axis=1) - logits[numbers, first + numbers]
    return (contrast.sum() + (own * target).sum()) / ROWS


def model_loss(w, x, target, total=lambda value: value, gather=lambda value: value, first=0):
    """Return this rank's part of a loss with batch normalization over all rows, and a contrastive term."""
    h, sums = hidden(w, x)
    c, squares = centred(h, total(sums) / ROWS)
    own = normalized(c, total(squares) / ROWS)
    return end(own, gather(own), target, first)


def test_gradients_through_collectives_equal_one_process(x64):
    rank, size = place()
    rng = numpy.random.default_rng(0)
    x, w, target = (jnp.asarray(rng.normal(size=shape)) for shape in [(ROWS, 5), (5, 4), (ROWS, 4)])
    value, gradient = jax.value_and_grad(model_loss)(w, x, target)
    first, last = rows_of(rank, size)
    options = {"total": mj.all_reduce, "gather": mj.all_gather, "first": first}
    found, local = jax.value_and_grad(model_loss)(w, x[first:last], target[first:last], **options)
    numpy.testing.assert_allclose(mj.reduce_tree(found, "sum"), value, rtol=1e-12)
    total = mj.reduce_tree(local, "sum")
    numpy.testing.assert_allclose(total, gradient, rtol=1e-10, atol=1e-12)

    def whole(w):
        return float(mj.reduce_tree(model_loss(w, x[first:last], target[first:last], **options), "sum"))

    for place_ in [(0, 0), (2, 1), (4, 3)]:
        step = jnp.zeros_like(w).at[place_].set(1e-5)
        difference = (whole(w + step) - whole(w - step)) / 2e-5
        numpy.testing.assert_allclose(total[place_], difference, rtol=1e-6, atol=1e-9)


def test_closed_forms_of_gradients(x64):
    """Of y = sum of x over ranks and losses (rank + 1) y ** 2; once more, of the derivative."""
    rank, size = place()
    x = jnp.arange(3.0) + rank
    y, weights = size * numpy.arange(3.0) + size * (size - 1) / 2, size * (size + 1) / 2

    def local(x, op):
        return (rank + 1) * (mj.all_reduce(x, op) ** 2).sum()

    numpy.testing.assert_allclose(jax.grad(local)(x, "sum"), 2 * y * weights, rtol=1e-14)
    numpy.testing.assert_allclose(jax.grad(local)(x, "mean"), 2 * y * weights / size**2, rtol=1e-14)
    twice = jax.grad(lambda x: jax.grad(local)(x, "sum").sum())(x)
    numpy.testing.assert_allclose(twice, numpy.full(3, 2 * size * weights), rtol=1e-14)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gathering_and_its_gradient(axis):
    rank, size = place()
    lengths = range(size)
    shapes = [(each, 3) if axis == 0 else (2, each) for each in lengths]
    x = jnp.full(shapes[rank], rank + 1.0)
    whole = mj.all_gather(x, axis)
    expected = numpy.concatenate([numpy.full(shape, each + 1.0) for each, shape in enumerate(shapes)], axis)
    numpy.testing.assert_array_equal(whole, expected)
    factors = jnp.arange(float(whole.size)).reshape(whole.shape) * (rank + 1)
    gradient = jax.grad(lambda x: (mj.all_gather(x, axis) * factors).sum())(x)
    numbers = numpy.arange(expected.size, dtype=float).reshape(expected.shape) * size * (size + 1) / 2
    first = sum(lengths[:rank])
    numpy.testing.assert_array_equal(gradient, numpy.take(numbers, range(first, first + rank), axis))


def test_float64_of_numpy_is_kept_by_collectives():
    (_, size), x = place(), numpy.full(2, 1.0 + 2.0**-50)
    found = mj.all_reduce(x, "mean"), mj.all_gather(x)
    x[:] = 0  # not shared with JAX
    assert [each.dtype for each in found] == ["f8", "f8"]
    assert all((numpy.asarray(each) == 1.0 + 2.0**-50).all() for each in found) and found[1].shape == (2 * size,)


@pytest.mark.parametrize("function", [mj.all_reduce, mj.all_gather])
def test_collectives_inside_jit_are_an_error(function):
    with pytest.raises(TypeError, match="inside jit"):
        jax.jit(function)(jnp.ones(3))
    with pytest.raises(TypeError, match="inside jit"):
        jax.grad(jax.jit(lambda x: function(x).sum()))(jnp.ones(3))


def test_what_cannot_be_gathered():
    with pytest.raises(ValueError, match="at least one dimension"):
        mj.all_gather(jnp.asarray(1.0))
    with pytest.raises(ValueError, match="axis 1 is out of range"):
        mj.all_gather(jnp.ones(3), 1)


@pytest.mark.parametrize("call", [mj.all_reduce, mj.all_gather, mj.reduce_tree, mj.broadcast_tree])
def test_masked_arrays_are_refused(call):
    with pytest.raises(TypeError, match=r"masked array, whose mask would be lost|is a numpy\.ma\.MaskedArray"):
        call(numpy.ma.array([1.0, 2.0], mask=[0, 1]))
