"""Gradients through collectives of autograd: one process on the global batch, finite differences, and closed forms."""

import gc
import weakref
from types import SimpleNamespace

import autograd
import autograd.numpy as anp
import numpy
import pytest

import mpidist.autograd
from mpidist.errors import CollectiveMismatchError, UnsupportedDtypeError
from mpidist.frameworks.replicas import replicas_in_force, replicas_of
from mpidist.testing import run_ranks

SIZES = [1, 2, 3]
ROWS, COLUMNS = 13, 4
RNG = numpy.random.default_rng(0)
X, W, B = RNG.normal(size=(ROWS, 5)), RNG.normal(size=(5, COLUMNS)), RNG.normal(size=COLUMNS)
TARGET = RNG.normal(size=(ROWS, COLUMNS))


def part(array, rank, size):
    """Return a rank's rows: uneven, and one rank of three has none."""
    bounds = {1: [0, ROWS], 2: [0, 9, ROWS], 3: [0, 9, 9, ROWS]}[size]
    return array[bounds[rank] : bounds[rank + 1]]


def place():
    replicas = replicas_in_force()
    return replicas.rank, replicas.size


def summed(gradients):
    return [mpidist.autograd.all_reduce(each) for each in gradients]


def normalized(h, count, total):
    """Return batch normalization, whose sums over rows are made by `total`."""
    mean = total(anp.sum(h, axis=0)) / count
    centred = h - mean
    variance = total(anp.sum(centred**2, axis=0)) / count
    return centred / anp.sqrt(variance + 1e-5)


def batch_norm_loss(parameters, x, target, total=lambda value: value):
    w, b = parameters
    h = normalized(anp.dot(x, w), ROWS, total)
    return anp.sum(anp.tanh(h * b) * target) / ROWS


def contrastive_loss(parameters, x, target, gather=lambda value: value, first=0):
    """Return this rank's part of the mean over rows of the loss that tells each row from those of all ranks."""
    w, b = parameters
    own = anp.tanh(anp.dot(x, w) + b)
    logits = anp.dot(own, gather(own).T)
    rows = numpy.arange(len(x))
    largest = anp.max(logits, axis=1, keepdims=True) if len(x) else 0.0
    logs = anp.log(anp.sum(anp.exp(logits - largest), axis=1)) + (largest[:, 0] if len(x) else 0.0)
    return anp.sum(logs - logits[rows, first + rows]) / ROWS


LOSSES = {
    "batch norm": (batch_norm_loss, lambda rank, size: {"total": mpidist.autograd.all_reduce}),
    "contrastive": (
        contrastive_loss,
        lambda rank, size: {
            "gather": mpidist.autograd.all_gather,
            "first": sum(len(part(X, each, size)) for each in range(rank)),
        },
    ),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_one_process_on_the_global_batch(name, size):
    loss, options = LOSSES[name]
    value, gradient = loss([W, B], X, TARGET), autograd.grad(loss)([W, B], X, TARGET)

    def step():
        rank, _ = place()
        x, target = part(X, rank, size), part(TARGET, rank, size)
        found, local = autograd.value_and_grad(loss)([W, B], x, target, **options(rank, size))
        return mpidist.autograd.all_reduce(found), summed(local)

    for found, gradients in run_ranks(size, step):
        numpy.testing.assert_allclose(found, value, rtol=1e-12)
        for each, expected in zip(gradients, gradient, strict=True):
            numpy.testing.assert_allclose(each, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_equal_finite_differences(name):
    """Central differences of the loss of all ranks, whose error is about 1e-10 for this step."""
    loss, options = LOSSES[name]

    def step():
        rank, size = place()
        x, target = part(X, rank, size), part(TARGET, rank, size)

        def whole(b):
            return mpidist.autograd.all_reduce(loss([W, b], x, target, **options(rank, size)))

        (gradient,) = summed(autograd.grad(loss)([W, B], x, target, **options(rank, size))[1:])
        differences = [(whole(B + 1e-5 * unit) - whole(B - 1e-5 * unit)) / 2e-5 for unit in numpy.eye(COLUMNS)]
        return gradient, differences

    for gradient, differences in run_ranks(2, step):
        numpy.testing.assert_allclose(gradient, differences, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("size", SIZES)
def test_closed_forms(size):
    """Of y = sum of x over ranks, and a loss of (rank + 1) y ** 2 on each: its gradient is 2 y times 1 + 2 + ..."""

    def step():
        rank, _ = place()
        x = numpy.arange(3.0) + rank

        def loss(x, op):
            return (rank + 1) * anp.sum(mpidist.autograd.all_reduce(x, op) ** 2)

        return [autograd.grad(loss)(x, op) for op in ("sum", "mean")]

    y, weights = size * numpy.arange(3.0) + size * (size - 1) / 2, size * (size + 1) / 2
    for by_sum, by_mean in run_ranks(size, step):
        numpy.testing.assert_allclose(by_sum, 2 * y * weights, rtol=1e-14)
        numpy.testing.assert_allclose(by_mean, 2 * y / size * weights / size, rtol=1e-14)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_gathered_array_and_its_gradient(size, axis):
    """Each rank's own part of the sum of what all ranks multiply with; rank r has r rows or columns."""
    lengths = range(size)

    def shape(length):
        return (length, 3) if axis == 0 else (2, length)

    def step():
        rank, _ = place()
        x = numpy.full(shape(rank), rank + 1.0)
        whole = mpidist.autograd.all_gather(x, axis)
        factors = numpy.arange(whole.size, dtype=float).reshape(whole.shape) * (rank + 1)
        gradient = autograd.grad(lambda x: anp.sum(mpidist.autograd.all_gather(x, axis) * factors))(x)
        return whole, gradient

    expected = numpy.concatenate([numpy.full(shape(each), each + 1.0) for each in lengths], axis)
    numbers = numpy.arange(expected.size, dtype=float).reshape(expected.shape) * size * (size + 1) / 2
    bounds = numpy.cumsum([0, *lengths])
    for rank, (whole, gradient) in enumerate(run_ranks(size, step)):
        numpy.testing.assert_array_equal(whole, expected)
        own = numpy.take(numbers, range(bounds[rank], bounds[rank + 1]), axis)
        numpy.testing.assert_array_equal(gradient, own)


def test_second_derivatives_and_forward_mode():
    """Of (sum of x) ** 3 on both ranks: 12 times the sum, and in forward mode 3 times its square."""

    def step():
        rank, _ = place()
        x = 1.0 + rank

        def cube(x):
            return mpidist.autograd.all_reduce(x) ** 3

        second = autograd.grad(lambda x: autograd.grad(cube)(x))(x)
        forward = autograd.make_jvp(cube)(x)(1.0)[1]
        return second, forward

    # grad: 2 ranks x 3 s ** 2; again, of the sum of both ranks' derivatives: 2 x 2 x 6 s
    for second, forward in run_ranks(2, step):
        assert second == 2 * 2 * 6 * 3.0
        assert forward == 3 * 9.0 * 2  # both ranks move


def test_numbers_and_other_dtypes():
    def step():
        rank, _ = place()
        return (
            mpidist.autograd.all_reduce(rank + 0.5),
            mpidist.autograd.all_reduce(numpy.array([rank + 1]), "mean"),
            mpidist.autograd.all_reduce(numpy.ones(2, "f4")).dtype,
            autograd.grad(lambda x: anp.sum(mpidist.autograd.all_reduce(x)))(numpy.ones(2, "f4")),
        )

    for number, mean, dtype, gradient in run_ranks(2, step):
        assert number == 2.0 and mean == [1.5] and dtype == "f4"
        assert gradient.dtype == "f4" and gradient.tolist() == [2.0, 2.0]


def test_the_strategy_in_force_says_which_ranks():
    def step():
        rank, _ = place()
        alone, together = mpidist.OneDeviceStrategy("/cpu:0"), mpidist.MultiWorkerMirroredStrategy()

        def gradient():
            return autograd.grad(lambda x: mpidist.autograd.all_reduce(x) ** 2)(rank + 1.0)

        return alone.run(gradient), together.run(gradient)

    assert run_ranks(2, step) == [(2.0, 12.0), (4.0, 12.0)]


def test_in_a_mesh_each_logical_device_reduces_over_replicas():
    """Two replicas of two ranks: ranks 0 and 2, and 1 and 3, add up theirs."""

    def step():
        rank, _ = place()
        topology = mpidist.tpu.experimental.initialize_tpu_system()
        assignment = mpidist.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 1, 2])
        strategy = mpidist.TPUStrategy(experimental_device_assignment=assignment)
        return strategy.run(lambda: mpidist.autograd.all_reduce(float(rank)))

    assert run_ranks(4, step) == [2.0, 4.0, 2.0, 4.0]


def test_a_strategy_with_servers_is_refused():
    strategy = SimpleNamespace(extended=SimpleNamespace(num_replicas=2, num_logical_devices=1))
    with pytest.raises(NotImplementedError, match="reduces nothing over replicas"):
        replicas_of(strategy)


def test_shapes_that_differ_are_named_on_all_ranks():
    def step():
        rank, _ = place()
        with pytest.raises(CollectiveMismatchError) as caught:
            mpidist.autograd.all_reduce(numpy.ones(2 + rank))
        return str(caught.value)

    for message in run_ranks(2, step):
        assert "float64 (2,)" in message and "float64 (3,)" in message and "mpidist.autograd" in message


def test_what_cannot_be_reduced_or_gathered():
    with pytest.raises(ValueError, match="got MAX"):
        mpidist.autograd.all_reduce(1.0, "max")
    with pytest.raises(UnsupportedDtypeError, match="bool"):
        run_ranks(2, lambda: mpidist.autograd.all_reduce(numpy.array([True])))
    with pytest.raises(ValueError, match="at least one dimension"):
        run_ranks(2, lambda: mpidist.autograd.all_gather(1.0))
    with pytest.raises(ValueError, match="axis 2 is out of range"):
        run_ranks(2, lambda: mpidist.autograd.all_gather(numpy.ones(3), 2))


def test_nothing_keeps_a_strategy_that_is_gone():
    def step():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        strategy.run(lambda: mpidist.autograd.all_reduce(1.0))
        return weakref.ref(strategy)

    found = run_ranks(2, step)
    gc.collect()
    assert [each() for each in found] == [None] * 2


@pytest.mark.parametrize("call", [mpidist.autograd.all_reduce, mpidist.autograd.all_gather])
def test_masked_arrays_are_refused_as_at_top_level(call):
    with pytest.raises(TypeError, match="a masked array, whose mask would be lost"):
        call(numpy.ma.array([1.0, 2.0], mask=[0, 1]))
    assert call(numpy.ma.array([1.0, 2.0])).tolist() == [1, 2]
