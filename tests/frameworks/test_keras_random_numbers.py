"""Random numbers of layers on N ranks: each rank has its own, and outside of steps all have those of one seed."""

from __future__ import annotations

import importlib.util
import random
import threading

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

import mpidist
from tests.frameworks.keras_models import BACKEND, X, Y, assert_alike, compiled, rank, ranks

pytestmark = pytest.mark.mpi

#: What a layer draws while it is trained, of its generator, made without a seed; the rows do not matter.
DRAWS = {
    "keras.random": lambda layer: keras.random.uniform((64,)),
    "generator": lambda layer: keras.random.uniform((64,), seed=layer.generator),
    "gamma": lambda layer: keras.random.gamma((64,), 2.0),
    "dropout": lambda layer: keras.random.dropout(keras.ops.ones((64,)), 0.5, seed=layer.generator),
    "dropout without": lambda layer: keras.random.dropout(keras.ops.ones((64,)), 0.5),
    "Dropout": lambda layer: layer.dropout(keras.ops.ones((64,)), training=True),
    "noise": lambda layer: layer.noise(keras.ops.ones((64,)), training=True),
}

_of_torch = pytest.mark.skipif(BACKEND != "torch", reason="a step of JAX is traced, and keeps no values")


class Drawing(keras.layers.Layer):
    def __init__(self, draw):
        super().__init__()
        self.draw, self.drawn = DRAWS[draw], []
        self.generator = keras.random.SeedGenerator()
        self.dropout, self.noise = keras.layers.Dropout(0.5), keras.layers.GaussianNoise(1.0)

    def call(self, inputs, training=False):
        if training:
            self.drawn.append(keras.ops.convert_to_numpy(self.draw(self)))
        return inputs


def made(draw, seed=1, scope=True):
    """Return a model with a layer that draws, and the layer."""

    def make():
        model = keras.Sequential([keras.Input((3,)), Drawing(draw), keras.layers.Dense(1)])
        compiled(metrics=(), run_eagerly=True)(model)
        return model

    keras.utils.set_random_seed(seed)
    if scope:
        with mpidist.MultiWorkerMirroredStrategy().scope():
            model = make()
    else:
        model = make()
    model.layers[0].drawn.clear()
    return model


def trained(draw, seed=1, scope=True):
    """Return a model that was trained in four steps, and what its layer has drawn; seeds are set alike on all ranks."""
    model = made(draw, seed, scope)
    model.fit(X, Y, batch_size=16, shuffle=False, verbose=0)
    model.train_on_batch(X[:1], Y[:1])  # other ranks have no rows
    return model, numpy.stack(model.layers[0].drawn)


def everywhere(values):
    """Return what each rank has."""
    return mpidist.MultiWorkerMirroredStrategy().gather(values[None], axis=0)


@_of_torch
@pytest.mark.parametrize("draw", DRAWS)
def test_numbers_without_a_seed_are_a_rank_s_own(draw):
    model, drawn = trained(draw)
    of_all = everywhere(drawn).reshape(-1, drawn.shape[-1])  # by rank and step
    assert len({each.tobytes() for each in of_all}) == 4 * ranks()
    assert_alike(model)
    numpy.testing.assert_array_equal(trained(draw)[1], drawn)  # from run to run
    of_one = trained(draw, scope=False)[1]
    if rank() == 0 and "ropout" not in draw:  # which in one process asks the generator of PyTorch
        numpy.testing.assert_array_equal(drawn, of_one)


@_of_torch
@pytest.mark.parametrize("draw", ["keras.random", "Dropout"])
def test_another_seed_gives_other_numbers(draw):
    assert (trained(draw)[1] != trained(draw, seed=2)[1]).any()


def test_dropout_differs_between_ranks():
    """In a loop of one's own, as in `fit`."""
    keras.utils.set_random_seed(1)
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5)])
    masks = []
    for _ in range(2):
        strategy.run(lambda: masks.append(keras.ops.convert_to_numpy(model(numpy.ones((4, 64), "f4"), training=True))))
    of_all = everywhere(numpy.stack(masks)).reshape(2 * ranks(), -1)
    assert set(numpy.unique(of_all)) == {0.0, 2.0}
    assert len({each.tobytes() for each in of_all}) == 2 * ranks()


@pytest.mark.parametrize("draw", ["keras.random", "generator"])
def test_numbers_outside_of_steps_are_those_of_one_process(draw):
    """Every rank may make the same data by them."""

    def outside():
        found = [numpy.array([random.random()] * 4), keras.ops.convert_to_numpy(keras.random.uniform((4,)))]
        if BACKEND == "torch":
            import torch

            found.append(torch.rand(4).numpy())
        return numpy.stack(found)

    trained(draw, scope=False)
    expected = outside()
    trained(draw)
    numpy.testing.assert_array_equal(outside(), expected)


@_of_torch
def test_numbers_outside_of_steps_with_dropout_are_alike():
    """Also where the ranks have other numbers of rows, for which they draw."""
    import torch

    keras.utils.set_random_seed(1)
    with mpidist.MultiWorkerMirroredStrategy().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    compiled(metrics=())(model)
    model.train_on_batch(X[:7], Y[:7])
    of_all = everywhere(torch.rand(4).numpy())
    assert (of_all == of_all[0]).all()


@pytest.mark.parametrize("draw", ["keras.random", "dropout without"])
def test_a_loop_of_one_s_own(draw):
    """In a replica a model's call draws a rank's own numbers; elsewhere, where all ranks have all rows, the same."""
    inner = made(draw)
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), inner])
    layer = inner.layers[0]
    layer.drawn.clear()
    strategy.run(lambda: model(X, training=True))
    model(X, training=True)
    inside, outside = everywhere(numpy.stack(layer.drawn)).swapaxes(0, 1)
    assert len({each.tobytes() for each in inside}) == ranks()
    assert (outside == outside[0]).all()


@_of_torch
def test_other_threads_draw_as_ever():
    """Such as those that make batches."""
    model, found = made("keras.random"), []

    def draw(layer):
        thread = threading.Thread(target=lambda: found.append(keras.random.uniform((4,)).numpy()))
        thread.start()
        thread.join()
        return keras.random.uniform((4,))

    model.layers[0].draw = draw
    model.train_on_batch(X, Y)
    of_all = everywhere(numpy.stack([*found, *model.layers[0].drawn]))
    assert (of_all[:, 0] == of_all[0, 0]).all()
    assert len({each.tobytes() for each in of_all[:, 1]}) == ranks()


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_compiled_code_refuses_numbers_without_a_seed():
    """As in one process."""
    import jax

    strategy = mpidist.MultiWorkerMirroredStrategy()
    model = made("keras.random")
    with pytest.raises(ValueError, match="you should only use seeded random ops"):
        strategy.run(jax.jit(lambda: model(X, training=True)))
    assert strategy.run(jax.jit(lambda: model(X))).shape == Y.shape
