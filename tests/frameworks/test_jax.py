"""JAX, which aliases aligned memory and computes after the call: the numbers are those before the update, always.

Parameters are s times ones, with powers of two everywhere, so all expected values are exact: after k steps by 1 / W,
rows of ones times the parameters give k, and once more times the parameters k squared.
"""

from __future__ import annotations

import numpy
import pytest

import mpidist

jax = pytest.importorskip("jax")
jnp = jax.numpy

pytestmark = pytest.mark.mpi

#: 1 MiB of parameters: updated in the reduction.  Rows of a quarter of that: after it.
WIDTHS = [512, 256]
STEPS, BATCH = 4, 12
TRIALS = 10


def made(kind, width):
    strategy = kind()
    with strategy.scope():
        return strategy, mpidist.Variable(numpy.zeros((width, width), "f4")), mpidist.optimizers.SGD(1.0)


def update(strategy, variable, optimizer):
    """Add 1 / W to every parameter."""
    share = numpy.full(variable.shape, -1 / variable.shape[0] / strategy.num_replicas_in_sync, "f4")
    strategy.run(lambda: optimizer.apply_gradients([(share, variable)]))


def with_jax(width):
    """Return (value_and_grad_fn, predict_fn) as users write them, and the same with predictions as aux."""

    def predict(w, x):
        return x @ w @ w

    def loss(w, x, y):
        return -w.sum() / width

    def loss_aux(w, x, y):
        return loss(w, x, y), predict(w, x)

    plain = jax.jit(jax.value_and_grad(loss)), jax.jit(predict)
    return plain, (jax.jit(jax.value_and_grad(loss_aux, has_aux=True)), None)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("is_aux", [False, True])
def test_metrics_are_those_of_the_parameters_before_each_update(width, is_aux):
    strategy, w, optimizer = made(mpidist.MultiWorkerMirroredStrategy, width)
    value_and_grad_fn, predict_fn = with_jax(width)[is_aux]
    x, y = numpy.ones((STEPS * BATCH, width), "f4"), numpy.zeros((STEPS * BATCH, width), "f4")
    for _ in range(TRIALS):
        w.assign(numpy.zeros_like(w.value))
        trainer = mpidist.Trainer(value_and_grad_fn, w, optimizer, metrics=["mse"], predict_fn=predict_fn)
        data = mpidist.data.Dataset.from_arrays((x, y)).batch(BATCH)
        history = trainer.fit(data, validation_data=data, verbose=0).history
        assert history["mse"] == [numpy.mean([float(k) ** 4 for k in range(STEPS)])]
        assert history["val_mse"] == [float(STEPS) ** 4]
        numpy.testing.assert_allclose(history["loss"], -numpy.mean(range(STEPS)), rtol=1e-5)
        assert (w.value == STEPS / width).all()
        if not is_aux:
            assert (trainer.predict(x) == STEPS**2).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [
    mpidist.MultiWorkerMirroredStrategy,
    mpidist.experimental.CentralStorageStrategy,
])  # fmt: skip
def test_results_that_are_read_after_the_update(kind, width):
    """Of the whole value, of a part of it, and of what JAX makes of it without computing anything."""
    strategy, w, optimizer = made(kind, width)
    whole = jax.jit(lambda w: (w @ w @ w @ w + 1).sum())
    part = jax.jit(lambda w: (w @ w.T @ w + 1).sum())
    for _ in range(TRIALS):
        w.assign(numpy.zeros((width, width), "f4"))
        found = whole(w.value), part(w.value[width // 2 :])
        taken = jnp.asarray(w.value), jax.device_put(w.value), jnp.asarray(w)
        update(strategy, w, optimizer)
        w.assign_add(numpy.ones((width, width), "f4"))
        assert (float(found[0]), float(found[1])) == (width**2, width**2 / 2)
        assert [float(each.sum()) for each in taken] == [0.0] * 3


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_held_stays_as_it_is(width):
    strategy, w, optimizer = made(mpidist.MultiWorkerMirroredStrategy, width)
    held = []
    for step in range(3 * TRIALS):
        held.append((step, w.value[step % 7 :], jnp.asarray(w.value), jax.device_put(w.value)))
        update(strategy, w, optimizer)
        held = held[-TRIALS:] if step % 3 else held[::2]  # some are let go, so their memory is used again
        for then, *arrays in held:
            for array in arrays:
                assert (numpy.asarray(array) == then / width).all(), (then, step)


def test_gradients_of_one_s_own_loop_equal_those_of_numpy():
    strategy, w, optimizer = made(mpidist.MultiWorkerMirroredStrategy, 64)
    gradient_fn = jax.jit(jax.grad(lambda w, x: ((x @ w - 1) ** 2).sum() / BATCH / 64))
    x = numpy.random.default_rng(0).normal(size=(STEPS * BATCH, 64)).astype("f4")
    batches = [x[first : first + BATCH] for first in range(0, len(x), BATCH)]
    expected = numpy.zeros((64, 64))
    for batch in batches:
        expected -= batch.T @ (2 * (batch @ expected - 1)) / BATCH / 64
    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(lambda batch=batch: optimizer.apply_gradients([(gradient_fn(w.value, batch), w)]))
    numpy.testing.assert_allclose(w.value, expected, rtol=1e-4, atol=1e-6)
