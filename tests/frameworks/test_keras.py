"""Keras: a model that would not be distributed is an error; its layers in a function of a `Trainer` are fine."""

from __future__ import annotations

import importlib.util
import os
import sys

import numpy
import pytest

import mpidist

os.environ.setdefault("KERAS_BACKEND", "jax")
if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

pytestmark = pytest.mark.mpi

X = numpy.random.default_rng(0).normal(size=(24, 3)).astype("f4")
Y = X.sum(axis=1, keepdims=True)


def functional(keras):
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(1)(inputs))


def sequential(keras):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def subclass(keras):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    return Own()


def fitted(model):
    model.compile("sgd", "mse")
    return model.fit(X, Y, epochs=1, verbose=0).history["loss"]


@pytest.mark.parametrize("make", [functional, sequential, subclass])
def test_a_model_that_is_made_in_the_scope(make):
    """Keras is imported inside of it, at the first time."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    finders = list(sys.meta_path)
    with strategy.scope():
        import keras

        if strategy.num_replicas_in_sync == 1:
            assert len(fitted(make(keras))) == 1
        else:
            with pytest.raises(NotImplementedError, match="a Keras model is made in .*mpidist.Trainer"):
                make(keras)
    added = [finder for finder in sys.meta_path if finder not in finders]
    assert not [finder for finder in added if type(finder).__module__.startswith("mpidist")]
    assert keras.Model.__new__.__module__.startswith("keras") and not {"compile", "fit"} & set(vars(keras.Model))
    assert len(fitted(make(keras))) == 1  # as ever, outside


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make", [functional, sequential, subclass])
def test_a_model_that_is_made_outside_of_it(make):
    import keras

    model, compiled = make(keras), make(keras)
    compiled.compile("sgd", "mse")
    with mpidist.MultiWorkerMirroredStrategy().scope():
        with pytest.raises(NotImplementedError, match="a Keras model is compiled in"):
            model.compile("sgd", "mse")
        with pytest.raises(NotImplementedError, match="a Keras model is trained in"):
            compiled.fit(X, Y, verbose=0)
        with pytest.raises(NotImplementedError, match="a Keras model is trained in"):
            compiled.train_on_batch(X, Y)
        assert compiled.predict(X, verbose=0).shape == (24, 1)


def test_a_model_as_the_function_of_a_trainer():
    """The closed form of linear regression by gradient descent."""
    import jax
    import keras

    model = sequential(keras)

    def loss(parameters, x, y):
        predictions, _ = model.stateless_call(parameters, [], x)
        return ((predictions - y) ** 2).mean(), predictions

    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpidist.Variable(numpy.zeros(each.shape, "f4")) for each in model.trainable_variables]
        optimizer = mpidist.optimizers.SGD(0.1)
    value_and_grad_fn = jax.jit(jax.value_and_grad(loss, has_aux=True))
    trainer = mpidist.Trainer(value_and_grad_fn, variables, optimizer, metrics=["mse"])
    history = trainer.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    w, b, squares = numpy.zeros((3, 1)), numpy.zeros(1), []
    for x, y in zip(X.reshape(3, 8, 3), Y.reshape(3, 8, 1), strict=True):
        difference = x @ w + b - y
        squares.append(numpy.mean(difference**2))
        w, b = w - 0.2 * x.T @ difference / 8, b - 0.2 * difference.mean(axis=0)
    numpy.testing.assert_allclose(variables[0].value, w, rtol=1e-4)
    numpy.testing.assert_allclose([history["mse"], history["loss"]], [[numpy.mean(squares)]] * 2, rtol=1e-4)
