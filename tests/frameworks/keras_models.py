"""Models, data and comparisons for the tests with Keras, on the backend that the environment names."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras  # noqa: E402
import numpy  # noqa: E402

import mpidist  # noqa: E402
from mpidist.world import world_communicator  # noqa: E402

BACKEND = keras.backend.backend()

if BACKEND == "jax":  # what is compiled is kept: of a test, nearly all of the time is compilation
    import jax

    _kept = Path(__file__).parents[2] / "build" / "jax" / str(mpidist.MultiWorkerMirroredStrategy().extended.replica_id)
    jax.config.update("jax_compilation_cache_dir", str(_kept))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

ROWS = 45
X = numpy.random.default_rng(0).normal(size=(ROWS, 3)).astype("f4")
Y = numpy.tanh(X.sum(axis=1, keepdims=True))
CLASSES = (X[:, 0] > 0).astype("int32") + (X[:, 1] > 0.5)
WEIGHTS = numpy.random.default_rng(1).uniform(0.2, 2, ROWS).astype("f4")

#: Float32, with smooth functions only: where a rounding could put out a unit, no bound holds.
BOUNDS = {"rtol": 2e-5, "atol": 3e-6}


def functional():
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(6, activation="tanh", kernel_regularizer="l2")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden))


def sequential():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])


def deferred():
    """Built by the first batch."""
    return keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(6, activation="tanh")
        self.last = keras.layers.Dense(1)

    def call(self, inputs):
        return self.last(self.hidden(inputs))


class OwnFunctional(keras.Model):
    """A class of one's own that is made like a functional model."""


def own_functional():
    inputs = keras.Input((3,))
    return OwnFunctional(inputs, keras.layers.Dense(1)(keras.layers.Dense(6, activation="tanh")(inputs)))


MODELS = [functional, sequential, deferred, Subclassed, own_functional]


def classifier():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)])


def crossentropy(**settings):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **settings)


def stock(make, compile_fn, seed=3):
    """Return a compiled model that this rank has for itself."""
    keras.utils.set_random_seed(seed)
    model = make()
    compile_fn(model)
    return model


def distributed(make, compile_fn, seed=3, strategy=None):
    """Return a compiled model of the scope; its weights are those of `stock` on the chief only."""
    strategy = strategy or mpidist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(seed + 50 * strategy.extended.replica_id)
    with strategy.scope():
        model = make()
    compile_fn(model)
    return model


def pair(make, compile_fn, seed=3, strategy=None):
    """Return what a function does with each of the two, called with the stock one first; the seeds are set before."""

    def both(train):
        one = stock(make, compile_fn, seed)
        expected = train(one)
        many = distributed(make, compile_fn, seed, strategy)
        found = train(many)
        return (one, expected), (many, found)

    return both


def compiled(loss="mse", metrics=("mae", "mse"), optimizer=lambda: keras.optimizers.Adam(0.02), **settings):
    def compile_fn(model):
        model.compile(optimizer(), loss, metrics=list(metrics), **settings)

    return compile_fn


def assert_same(one, many):
    """Assert that models have the same weights, and that those of all ranks have the same bits."""
    for mine, other in zip(one.get_weights(), many.get_weights(), strict=True):
        numpy.testing.assert_allclose(other, mine, **BOUNDS)
    assert_alike(many)


def assert_alike(model):
    """Assert that the weights of a model have the same bits on all ranks."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    flat = numpy.concatenate([each.reshape(-1) for each in model.get_weights()])
    every = strategy.gather(flat[None], axis=0)
    assert (every == every[0]).all()


def assert_histories(expected, found):
    assert expected.history.keys() == found.history.keys() and expected.epoch == found.epoch
    for name in expected.history:
        numpy.testing.assert_allclose(found.history[name], expected.history[name], **BOUNDS, err_msg=name)


def folder_of_rank_0(tmp_path):
    """Return the folder of rank 0's test, on every rank."""
    return Path(world_communicator().exchange(str(tmp_path).encode())[0].decode())


def ranks():
    return mpidist.MultiWorkerMirroredStrategy().num_replicas_in_sync


def rank():
    return mpidist.MultiWorkerMirroredStrategy().extended.replica_id
