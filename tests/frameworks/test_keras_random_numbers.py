"""Random numbers of layers on N ranks: each rank has its own, and rank 0 those of one process."""

from __future__ import annotations

import importlib.util

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

import mpidist
from tests.frameworks.keras_models import BACKEND, X, Y, assert_alike, compiled, rank, ranks

pytestmark = pytest.mark.mpi


class Noise(keras.layers.Layer):
    """Draws numbers while it is trained, without a seed or by a generator that was made without one."""

    def __init__(self, has_generator):
        super().__init__()
        self.generator = keras.random.SeedGenerator() if has_generator else None
        self.drawn = []

    def call(self, inputs, training=False):
        if training:
            numbers = keras.random.uniform((4,), seed=self.generator)
            self.drawn.append(keras.ops.convert_to_numpy(numbers))
        return inputs


def trained(has_generator, is_distributed=True, seed=1):
    """Return a model that was trained in four steps, and what its layer has drawn; the seed is set alike."""
    keras.utils.set_random_seed(seed)

    def make():
        model = keras.Sequential([keras.Input((3,)), Noise(has_generator), keras.layers.Dense(1)])
        compiled(metrics=(), run_eagerly=True)(model)
        return model

    if is_distributed:
        with mpidist.MultiWorkerMirroredStrategy().scope():
            model = make()
    else:
        model = make()
    layer = model.layers[0]
    layer.drawn.clear()
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    model.train_on_batch(X[:1], Y[:1])  # other ranks have no rows
    return model, numpy.stack(layer.drawn)


def everywhere(values):
    """Return what each rank has."""
    return mpidist.MultiWorkerMirroredStrategy().gather(values[None], axis=0)


@pytest.mark.skipif(BACKEND != "torch", reason="a step of JAX is traced, and keeps no values")
@pytest.mark.parametrize("has_generator", [True, False])
def test_numbers_without_a_seed_are_a_rank_s_own(has_generator):
    model, drawn = trained(has_generator)
    of_all = everywhere(drawn)
    for step in range(4):
        assert len({each.tobytes() for each in of_all[:, step]}) == ranks()
    assert_alike(model)
    numpy.testing.assert_array_equal(trained(has_generator)[1], drawn)  # from run to run
    assert (trained(has_generator, seed=2)[1] != drawn).any()
    if rank() == 0:
        numpy.testing.assert_array_equal(trained(has_generator, is_distributed=False)[1], drawn)


def test_numbers_outside_of_steps_are_alike():
    """Every rank makes the same data; they are those of one process, whatever steps have drawn."""
    trained(False, is_distributed=False)
    expected = keras.ops.convert_to_numpy(keras.random.uniform((4,)))
    trained(False)
    found = keras.ops.convert_to_numpy(keras.random.uniform((4,)))
    numpy.testing.assert_array_equal(found, expected)


def test_a_loop_of_one_s_own():
    """In a replica a model's call draws a rank's own numbers; elsewhere, where all ranks have all rows, the same."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        inner = keras.Sequential([keras.Input((3,)), Noise(False), keras.layers.Dense(1)])
        model = keras.Sequential([keras.Input((3,)), inner])
    layer = inner.layers[0]
    layer.drawn.clear()
    strategy.run(lambda: model(X, training=True))
    model(X, training=True)
    inside, outside = everywhere(numpy.stack(layer.drawn)).swapaxes(0, 1)
    assert len({each.tobytes() for each in inside}) == ranks()
    assert (outside == outside[0]).all()


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_compiled_code_refuses_numbers_without_a_seed():
    """As in one process."""
    import jax

    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), Noise(False)])
    with pytest.raises(ValueError, match="you should only use seeded random ops"):
        strategy.run(jax.jit(lambda: model(X, training=True)))
    assert strategy.run(jax.jit(lambda: model(X))).shape == X.shape
