"""Optimizers inside of optimizers on N ranks: gradients are reduced once, and numbers are those of one process."""

from __future__ import annotations

import importlib.util

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

import mpidist
from mpidist.errors import CollectiveMismatchError
from mpidist.frameworks.keras import replica
from tests.frameworks.keras_models import (
    BACKEND,
    X,
    Y,
    assert_alike,
    assert_histories,
    assert_same,
    compiled,
    distributed,
    functional,
    pair,
    rank,
    ranks,
    sequential,
    stock,
)

pytestmark = pytest.mark.mpi


class Halving(keras.optimizers.Optimizer):
    """Gives another optimizer the halves of its gradients; it has it in a list, where nobody looks for it."""

    def __init__(self, inner):
        super().__init__(learning_rate=0.0)
        self.inside = [inner]

    def build(self, variables):
        self.inside[0].build(variables)
        super().build(variables)

    @property
    def variables(self):
        return self._variables + self.inside[0].variables

    def apply(self, grads, trainable_variables=None):
        self.inside[0].apply([each * 0.5 for each in grads], trainable_variables)

    def stateless_apply(self, optimizer_variables, grads, trainable_variables):
        own = len(self._variables)
        grads = [each * 0.5 for each in grads]
        found, others = self.inside[0].stateless_apply(optimizer_variables[own:], grads, trainable_variables)
        return found, [*map(keras.ops.convert_to_tensor, optimizer_variables[:own]), *others]


def sgd(**settings):
    return keras.optimizers.SGD(0.1, **settings)


WRAPPERS = {
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(sgd(), dynamic_growth_steps=3),
    "of one's own": lambda: Halving(sgd(momentum=0.5)),
    "three": lambda: keras.optimizers.LossScaleOptimizer(Halving(Halving(sgd()))),
    "factor": lambda: sgd(loss_scale_factor=64.0),
    "accumulating": lambda: keras.optimizers.LossScaleOptimizer(sgd(gradient_accumulation_steps=2)),
}


def made_in_scope(make, make_optimizer):
    """Return a model that is made and compiled in the scope, as its optimizers are."""
    with mpidist.MultiWorkerMirroredStrategy().scope():
        keras.utils.set_random_seed(3 + 50 * rank())
        model = make()
        model.compile(make_optimizer(), "mse", metrics=[])
    return model


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("batch_size", [16, 7])
def test_a_wrapper(wrapper, batch_size):
    def train(model):
        return model.fit(X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)

    one = stock(functional, compiled(optimizer=WRAPPERS[wrapper], metrics=()))
    expected = train(one)
    many = made_in_scope(functional, WRAPPERS[wrapper])
    assert_histories(expected, train(many))
    assert_same(one, many)


def test_a_wrapper_that_was_made_outside_of_the_scope():
    def train(model):
        return model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)

    (one, expected), (many, found) = pair(functional, compiled(optimizer=WRAPPERS["three"]))(train)
    assert_histories(expected, found)
    assert_same(one, many)


@pytest.mark.parametrize("optimizer", ["sgd", lambda: sgd(momentum=0.9)])
@pytest.mark.parametrize("large", [1.0, 40.0])
def test_mixed_precision_as_in_one_process(optimizer, large):
    """To the rounding of float16: also the steps that are left out, where gradients overflow, are the same."""

    def make_optimizer():
        return optimizer if isinstance(optimizer, str) else optimizer()

    def train(model):
        history = model.fit(X, large * Y, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"]
        return history, float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale))

    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        expected = train(stock(sequential, compiled(optimizer=make_optimizer, metrics=())))
        many = made_in_scope(sequential, make_optimizer)
        found = train(many)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert isinstance(many.optimizer, keras.optimizers.LossScaleOptimizer)
    assert found[1] == expected[1] and (large == 1.0 or found[1] < 2.0**15)
    numpy.testing.assert_allclose(found[0], expected[0], rtol=3e-3)
    assert_alike(many)


def test_a_wrapper_in_a_loop_of_one_s_own():
    """Gradients are summed once, in a loop that calls `apply`."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        optimizer = Halving(Halving(keras.optimizers.SGD(0.5)))
    variable = keras.Variable(numpy.zeros(3, "f4"))
    optimizer.build([variable])

    def step():
        gradient = keras.ops.convert_to_tensor(numpy.full(3, 1.0 + rank(), "f4"))
        optimizer.apply([gradient], [variable])

    strategy.run(step)
    total = sum(1.0 + each for each in range(ranks()))
    numpy.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -0.5 * total / 2 / 2, rtol=1e-6)


@pytest.mark.skipif(BACKEND != "torch", reason="on JAX a step applies gradients once")
def test_optimizers_in_a_list():
    """The model weights what any of them reduces by rows, whether it was given to the model or made in the scope."""
    import torch

    class Two(keras.Model):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = self.compute_loss(x, y, self(x, training=True))
            loss.backward()
            with torch.no_grad():
                for optimizer, layer in zip(self.optimizers, self.layers[1:], strict=True):
                    optimizer.apply([each.value.grad for each in layer.trainable_weights], layer.trainable_weights)
            return {"own": loss}

    def make():
        inputs = keras.Input((3,))
        model = Two(inputs, keras.layers.Dense(1)(keras.layers.Dense(6, activation="tanh")(inputs)))
        model.optimizers = [WRAPPERS["of one's own"](), sgd()]
        return model

    (one, _), (many, _) = pair(make, compiled())(lambda model: model.fit(X, Y, batch_size=7, verbose=0))
    assert_same(one, many)
    one = stock(make, compiled())
    one.fit(X, Y, batch_size=7, shuffle=False, verbose=0)
    many = made_in_scope(make, sgd)
    many.fit(X, Y, batch_size=7, shuffle=False, verbose=0)
    assert_same(one, many)


@pytest.mark.mpi(min_size=2)
def test_a_learning_rate_that_one_rank_sets():
    """Each call of `train_on_batch` compares it."""
    model = distributed(sequential, compiled())
    for _ in range(2):
        model.train_on_batch(X, Y)
    if rank() == 1:
        model.optimizer.learning_rate = 0.5
    with pytest.raises(CollectiveMismatchError, match=r"learning rate 0 \(Adam\): 0.(5|02) on .*, 0.(02|5) on "):
        model.train_on_batch(X, Y)
    model.optimizer.learning_rate = 0.25
    model.train_on_batch(X, Y)
    assert_alike(model)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("calls", [0, 1, 3])
def test_weights_that_one_rank_changes(calls, monkeypatch):
    """The first call of `train_on_batch` compares them, and then some calls."""
    monkeypatch.setattr(replica, "_CALLS_PER_COMPARISON", 3)
    model = distributed(sequential, compiled())
    model.fit(X, Y, verbose=0)
    for _ in range(calls):
        model.train_on_batch(X, Y)
    if rank() == 1:
        model.layers[-1].bias.assign([7.0])
    for _ in range(-calls % 3):
        model.train_on_batch(X, Y)
    with pytest.raises(CollectiveMismatchError, match="weights after train_on_batch.*variable 3 bias: 0x.* on "):
        model.train_on_batch(X, Y)


@pytest.mark.mpi(min_size=2)
def test_weights_are_compared_every_50_calls():
    model = distributed(sequential, compiled())
    model.train_on_batch(X, Y)
    if rank() == 1:
        model.layers[-1].bias.assign([7.0])
    for _ in range(49):
        model.train_on_batch(X[:4], Y[:4])
    with pytest.raises(CollectiveMismatchError, match="weights after train_on_batch"):
        model.train_on_batch(X[:4], Y[:4])


@pytest.mark.skipif(BACKEND != "torch", reason="a step of JAX that applies no gradients is refused")
@pytest.mark.mpi(min_size=2)
def test_a_step_that_updates_weights_by_itself():
    """`train_on_batch` finds it as `fit` does."""
    import torch

    class Own(keras.Model):
        def train_step(self, data):
            loss = self.compute_loss(*data[:2], self(data[0], training=True))
            loss.backward()
            with torch.no_grad():
                for each in self.trainable_variables:
                    each.value.sub_(0.1 * each.value.grad)
            return {"loss": loss}

    def make():
        inputs = keras.Input((3,))
        return Own(inputs, keras.layers.Dense(1)(inputs))

    with pytest.raises(CollectiveMismatchError, match="weights after train_on_batch"):
        distributed(make, compiled(metrics=())).train_on_batch(X, Y)


def applied(optimizer, variable):
    """Give an optimizer a gradient, in a replica, by the method of the backend."""

    def step():
        gradients = [keras.ops.ones(variable.shape)]
        if BACKEND == "torch":
            optimizer.apply(gradients, [variable])
            return
        state = [[each.value for each in several] for several in (optimizer.variables, [variable])]
        found = optimizer.stateless_apply(state[0], gradients, state[1])
        for several, values in zip(([variable], optimizer.variables), found, strict=True):
            for each, value in zip(several, values, strict=True):
                each.assign(value)

    optimizer.strategy_of_test.run(step)


def own_loop():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    variable = keras.Variable(numpy.zeros(3, "f4"))
    optimizer.build([variable])
    vars(optimizer)["strategy_of_test"] = strategy
    return optimizer, variable


@pytest.mark.mpi(min_size=2)
def test_a_learning_rate_that_one_rank_sets_in_a_loop_of_one_s_own():
    optimizer, variable = own_loop()
    applied(optimizer, variable)
    if rank() == 1:
        optimizer.learning_rate = 0.125
    with pytest.raises(CollectiveMismatchError, match="SGD, is 0.125 on rank 1, expected 0.5, as on rank 0"):
        applied(optimizer, variable)
    numpy.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -0.5 * ranks())  # it was not updated


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("calls", [0, 1])
def test_weights_that_one_rank_changes_in_a_loop_of_one_s_own(calls, monkeypatch):
    monkeypatch.setattr(replica, "_CALLS_PER_COMPARISON", 2)
    optimizer, variable = own_loop()
    for _ in range(calls):
        applied(optimizer, variable)
    if rank() == 1:
        variable.assign([1.0, 0.0, 0.0])
    for _ in range(calls):
        applied(optimizer, variable)
    with pytest.raises(CollectiveMismatchError, match="weights that an optimizer of Keras has updated.*variable 0"):
        applied(optimizer, variable)


@pytest.mark.parametrize("rate", [0.5, keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)])
def test_an_optimizer_of_one_s_own_in_a_loop_of_one_s_own(rate):
    """What its `apply` returns comes back, also where the rate is a schedule."""

    class Telling(keras.optimizers.SGD):
        def apply(self, grads, trainable_variables=None):
            super().apply(grads, trainable_variables)
            return float(grads[0][0])

    strategy, variable = mpidist.MultiWorkerMirroredStrategy(), keras.Variable(numpy.zeros(3, "f4"))
    with strategy.scope():
        optimizer = Telling(rate)
    found = []
    strategy.run(lambda: found.append(optimizer.apply([keras.ops.ones(3)], [variable])))
    assert found == [ranks()]
    numpy.testing.assert_allclose(keras.ops.convert_to_numpy(variable), -0.5 * ranks())


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
@pytest.mark.mpi(min_size=2)
def test_gradients_that_are_applied_in_compiled_code():
    import jax

    optimizer, variable = own_loop()
    state = [each.value for each in optimizer.variables]
    step = jax.jit(lambda state, value: optimizer.stateless_apply(state, [value], [value]))
    with pytest.raises(NotImplementedError, match="gradients are applied inside jax.jit"):
        optimizer.strategy_of_test.run(step, args=(state, variable.value))


@pytest.mark.mpi(min_size=2)
def test_a_model_that_is_trained_inside_of_a_step():
    if BACKEND != "torch":
        pytest.skip("a step of JAX is compiled")
    inner = distributed(sequential, compiled())

    class Outer(keras.Model):
        def train_step(self, data):
            inner.train_on_batch(*data[:2])
            return super().train_step(data)

    def make():
        inputs = keras.Input((3,))
        return Outer(inputs, keras.layers.Dense(1)(inputs))

    with pytest.raises(RuntimeError, match="call the model itself"):
        distributed(make, compiled()).fit(X, Y, verbose=0)
