"""Accidents with Keras models on N ranks, and what cannot be right: errors that say what to do."""

from __future__ import annotations

import importlib.util

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

import mpidist
from mpidist.errors import CollectiveMismatchError
from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.world import world_communicator
from tests.frameworks.keras_models import (
    BACKEND,
    CLASSES,
    WEIGHTS,
    X,
    Y,
    assert_alike,
    assert_histories,
    assert_same,
    classifier,
    compiled,
    crossentropy,
    distributed,
    functional,
    pair,
    rank,
    ranks,
    sequential,
    stock,
)

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.mark.parametrize("call", [
    lambda model: model.compile("sgd", "mse"),
    lambda model: model.fit(X, Y, verbose=0),
    lambda model: model.train_on_batch(X, Y),
])  # fmt: skip
def test_a_model_that_was_made_outside_of_the_scope(call):
    model = stock(functional, compiled())
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope(), pytest.raises(RuntimeError, match=r"made outside of it.*strategy.distribute\(model\)"):
        call(model)
    strategy.distribute(model)
    with strategy.scope():
        call(model)


def test_models_that_differ():
    """Found at the end of the scope; of a model that is built by the first batch, in `fit`."""
    message = r"variable 0 kernel, trainable.*\(3, 2\).*\(3, 1\)"
    with pytest.raises(CollectiveMismatchError, match=message):
        distributed(lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1 + rank())]), compiled())
    model = distributed(lambda: keras.Sequential([keras.layers.Dense(1 + rank())]), compiled())
    with pytest.raises(CollectiveMismatchError, match=message):
        model.fit(X, Y, verbose=0)


def test_a_model_that_one_rank_makes_in_the_scope():
    def make():
        return [keras.Sequential([keras.Input((3,))]) for _ in range(1 + rank())]

    with pytest.raises(CollectiveMismatchError, match="end of a scope in which Keras models were made"):
        distributed(make, lambda models: None)
    distributed(sequential, compiled()).fit(X, Y, verbose=0)  # though Keras counts further on one rank


def test_a_layer_that_is_frozen_on_one_rank():
    model = distributed(sequential, compiled())
    if rank() == 1:
        model.layers[0].trainable = False
    with pytest.raises(CollectiveMismatchError, match="variable 0 kernel, not trainable"):
        model.fit(X, Y, verbose=0)


def test_optimizers_that_differ():
    model = distributed(sequential, compiled(optimizer=lambda: keras.optimizers.get(["sgd", "adam", "lion"][rank()])))
    with pytest.raises(CollectiveMismatchError, match="optimizer: .*SGD|optimizer: .*Adam"):
        model.fit(X, Y, verbose=0)


def test_a_batch_that_differs():
    """Each rank gives rows of its own, as with a loader of its own."""
    model = distributed(sequential, compiled())
    own = slice(4 * rank(), 4 * rank() + 4)
    for method in (model.train_on_batch, model.test_on_batch):
        with pytest.raises(CollectiveMismatchError, match=r"_on_batch of a Keras model.*checksum of array 0"):
            method(X[own], Y[own])


def test_gradients_for_different_variables():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(1.0)
    variables = [keras.Variable(numpy.zeros(2, "f4")) for _ in range(2)]
    optimizer.build(variables)
    gradient = keras.ops.ones(2)

    def step(*given):
        optimizer.apply(list(given), variables)

    with pytest.raises(CollectiveMismatchError, match="others None, for variables 0, 1 of those"):
        strategy.run(step, args=(gradient, None) if rank() == 0 else (None, gradient))
    strategy.run(step, args=(gradient, None))
    assert keras.ops.convert_to_numpy(variables[0]).tolist() == [-ranks()] * 2
    assert not keras.ops.convert_to_numpy(variables[1]).any()


def test_a_mean_that_is_rounded_is_that_of_all_replicas():
    """In float32 41 times 1/41 is less than 1; and a missing gradient is still seen."""
    replica = ModelReplica(mpidist.MultiWorkerMirroredStrategy())
    replica.count = 41
    replica.require_same_places([numpy.full(1, 41, "f4") * numpy.float32(1 / 41), numpy.zeros(1, "f4")], 1)
    for total in (numpy.full(1, 40, "f4") * numpy.float32(1 / 41), numpy.full(1, 1 / 41, "f4")):
        with pytest.raises(CollectiveMismatchError, match="for variables 0 of those"):
            replica.require_same_places([total], 1)


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
def test_a_step_of_jax_with_gradients_for_different_variables():
    class Own(keras.Model):
        def train_step(self, state, data):
            trainable, others, optimizer, metrics = state
            gradients = [None if place == rank() else each for place, each in enumerate(trainable)]
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
            return {}, (trainable, others, optimizer, metrics)

    def make():
        inputs = keras.Input((3,))
        heads = [keras.layers.Dense(1, use_bias=False)(inputs) for _ in range(ranks())]
        return Own(inputs, keras.layers.Add()(heads))

    model = distributed(make, compiled(metrics=[]))
    with pytest.raises(CollectiveMismatchError, match="others None, for variables 0, 1"):
        model.fit(X, Y, verbose=0)


def test_epochs_that_differ():
    model = distributed(sequential, compiled())
    with pytest.raises(CollectiveMismatchError, match="epochs: "):
        model.fit(X, Y, epochs=1 + rank(), verbose=0)


def test_a_model_of_another_strategy():
    model = distributed(sequential, compiled())
    other = mpidist.MirroredStrategy()
    with pytest.raises(RuntimeError, match="is distributed by .* and cannot be by <MirroredStrategy"):
        other.distribute(model)
    with other.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        model.fit(X, Y, verbose=0)


@pytest.mark.mpi(min_size=2)
def test_a_replica_of_several_ranks():
    size = world_communicator().size
    topology = mpidist.tpu.experimental.initialize_tpu_system()
    assignment = mpidist.tpu.experimental.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, size])
    strategy = mpidist.TPUStrategy(experimental_device_assignment=assignment)
    with strategy.scope(), pytest.raises(NotImplementedError, match="one rank in a replica"):
        sequential()


def test_objects_that_are_not_distributed():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with pytest.raises(TypeError, match="models and optimizers of Keras, got a Dense"):
        strategy.distribute(keras.layers.Dense(1))


class OwnDense(keras.layers.Dense):
    """May return what it likes."""


@pytest.mark.parametrize("layer", [
    lambda: keras.layers.Dense(4, activity_regularizer="orthogonal_regularizer"),
    lambda: keras.layers.Dense(4, activity_regularizer=lambda outputs: keras.ops.mean(outputs)),
    lambda: keras.layers.Lambda(lambda outputs: outputs, activity_regularizer="l2"),
    lambda: OwnDense(4, activity_regularizer="l2"),
])  # fmt: skip
def test_what_is_not_known_to_be_a_mean_over_the_rows(layer):
    model = distributed(lambda: keras.Sequential([keras.Input((3,)), layer()]), compiled())
    for call in (model.fit, model.evaluate):
        with pytest.raises(NotImplementedError, match="activity_regularizer.*add_loss"):
            call(X, X[:, :1], verbose=0)


def test_a_sum_over_the_rows_that_a_layer_makes(monkeypatch):
    """As Keras did before 3.14."""
    monkeypatch.setattr(backends, "version", lambda: (3, 13))

    def make():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activity_regularizer="l2")])

    with pytest.raises(NotImplementedError, match="activity_regularizer.*add_loss"):
        distributed(make, compiled()).fit(X, X[:, :1], verbose=0)


@pytest.mark.skipif(backends.version() < (3, 14), reason="adds up over rows")
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum"])
def test_a_mean_over_the_rows_that_a_layer_adds(reduction):
    """In the last batch ranks have 2 and 1 rows, or 2, 2 and 1."""

    def make():
        hidden = keras.layers.Dense(6, activation="tanh", activity_regularizer="l1l2")
        inputs, rows = keras.Input((3,)), keras.layers.ActivityRegularization(l2=0.1)
        return keras.Model(inputs, keras.layers.Dense(1)(rows(hidden(inputs))))

    def train(model):
        found = model.fit(X[:23], Y[:23], batch_size=20 - 2 * (ranks() == 3), epochs=2, verbose=0, shuffle=False)
        found.history["evaluated"] = model.evaluate(X, Y, batch_size=20, verbose=0)
        found.history["batch"] = model.train_on_batch(X[:1], Y[:1])
        return found

    loss = keras.losses.MeanSquaredError(reduction=reduction)
    (one, expected), (many, found) = pair(make, compiled(loss, metrics=[]))(train)
    assert_histories(expected, found)
    assert_same(one, many)


def masked():
    return keras.Sequential([
        keras.Input((4,)),
        keras.layers.Embedding(5, 3, mask_zero=True),
        keras.layers.Dense(1),
    ])  # fmt: skip


def test_a_mask_of_the_outputs():
    tokens = numpy.arange(48).reshape(12, 4) % 5
    model = distributed(masked, compiled(metrics=[]))
    with pytest.raises(NotImplementedError, match="have a mask.*sample_weight with zeros"):
        model.fit(tokens, tokens[..., None].astype("f4"), batch_size=6, verbose=0)


def test_variables_that_are_overwritten_by_gradients():
    def make():
        model = sequential()
        model.layers[0].kernel.overwrite_with_gradient = True
        return model

    with pytest.raises(NotImplementedError, match="kernel' is overwritten by its gradient.*mixed_bfloat16"):
        distributed(make, compiled()).fit(X, Y, verbose=0)


def test_a_loss_that_divides_by_weights():
    loss = crossentropy(reduction="mean_with_sample_weight")
    model = distributed(classifier, compiled(loss, metrics=[]))
    model.fit(X, CLASSES, verbose=0)
    with pytest.raises(NotImplementedError, match="sum_over_batch_size"):
        model.fit(X, CLASSES, sample_weight=WEIGHTS, verbose=0)


def test_losses_of_several_reductions():
    def make():
        inputs = keras.Input((3,))
        return keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])

    model = distributed(
        make, lambda model: model.compile("sgd", [keras.losses.MeanSquaredError(reduction="sum"), "mse"])
    )
    with pytest.raises(NotImplementedError, match="losses with the reductions sum, sum_over_batch_size"):
        model.fit(X, [Y, Y], verbose=0)


def test_arguments_that_do_not_fit():
    model = distributed(sequential, compiled())
    with pytest.raises(ValueError, match="validation_split is for arrays"):
        model.fit(iter([(X, Y)]), validation_split=0.2, verbose=0)
    with pytest.raises(ValueError, match="gives batches .inputs, labels, weights. of its own"):
        model.fit((each for each in [(X, Y)]), Y, verbose=0)
    with pytest.raises(ValueError, match="one number of rows"):
        model.fit(X, Y[:3], verbose=0)
    with pytest.raises(TypeError, match="CallbackList"):
        model.fit(X, Y, callbacks=keras.callbacks.CallbackList(), verbose=0)
    with pytest.raises(RuntimeError, match="fit, evaluate, train_on_batch"):
        model.train_step((X, Y)) if BACKEND == "torch" else model.test_step(([], [], []), (X, Y))
    model.fit(X, Y, verbose=0)
    assert_alike(model)


@pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch")
def test_a_step_that_pytorch_compiles():
    model = distributed(sequential, compiled(jit_compile=True))
    with pytest.raises(NotImplementedError, match="jit_compile=False"):
        model.fit(X, Y, verbose=0)


class _Twice(keras.Model):
    """Applies gradients twice."""

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        for _ in range(2):
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, trainable, trainable)
        return {}, (trainable, others, optimizer, metrics)


class _Never(keras.Model):
    """Updates its weights by itself."""

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        return {}, ([each * 0.5 for each in trainable], others, optimizer, metrics)


class _After(keras.Model):
    """Looks at the weights after the update."""

    def train_step(self, state, data):
        trainable, others, optimizer, metrics = state
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, trainable, trainable)
        trainable = [each * 0.5 for each in trainable]
        return {}, (trainable, others, optimizer, metrics)


@pytest.mark.skipif(BACKEND != "jax", reason="of JAX")
@pytest.mark.parametrize("kind, message", [
    (_Twice, "more than once"),
    (_Never, "must apply gradients by optimizer.stateless_apply"),
    (_After, "after optimizer.stateless_apply has updated"),
])  # fmt: skip
def test_steps_of_jax_that_cannot_be_split(kind, message):
    def make():
        inputs = keras.Input((3,))
        return kind(inputs, keras.layers.Dense(1)(inputs))

    model = distributed(make, compiled(metrics=[]))
    with pytest.raises(NotImplementedError, match=message):
        model.fit(X, Y, verbose=0)


@pytest.mark.skipif(BACKEND != "torch", reason="of PyTorch")
def test_a_step_of_pytorch_that_reduces_nothing():
    class Alone(keras.Model):
        def train_step(self, data):
            for each in self.trainable_weights:
                each.assign_add(keras.ops.ones_like(each) * rank())
            return {}

    def make():
        inputs = keras.Input((3,))
        return Alone(inputs, keras.layers.Dense(1)(inputs))

    with pytest.raises(CollectiveMismatchError, match="weights of a Keras model at the end of an epoch"):
        distributed(make, compiled(metrics=[])).fit(X, Y, verbose=0)


# -- losses and metrics of which the parts are not those of a whole batch ---------------------------------------------


def flat():
    """Of which the outputs have the axis of the rows alone."""
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), keras.layers.Reshape(())])


def scalar(y, outputs):
    return keras.ops.mean(keras.ops.square(keras.ops.subtract(y, outputs)))


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_on_batch", "test_on_batch"])
def test_losses_with_a_mask_of_their_own(call):
    """Two rows with 1 and 3 valid places: one process divides by 4, replicas would divide by 1 and by 3."""

    def places():
        return keras.Sequential([keras.Input((3, 2)), keras.layers.Dense(3)])

    labels = numpy.array([[0, -1, -1], [1, 2, 0]] * ranks())
    model = distributed(places, compiled(crossentropy(ignore_class=-1), metrics=[]))
    settings = {} if call.endswith("batch") else {"verbose": 0}
    with pytest.raises(NotImplementedError, match="has a mask, as with ignore_class.*sample_weight with zeros"):
        getattr(model, call)(numpy.ones((2 * ranks(), 3, 2), "f4"), labels, **settings)
    circle = distributed(classifier, compiled(keras.losses.Circle(), metrics=[]))
    with pytest.raises(NotImplementedError, match="'circle' has a mask"):
        getattr(circle, call)(X, CLASSES, **settings)


@pytest.mark.parametrize("loss", [
    keras.losses.Dice,
    keras.losses.Tversky,
    keras.losses.CosineSimilarity,
    lambda: scalar,
    lambda: keras.losses.MeanSquaredError(reduction="sum"),
])  # fmt: skip
@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_losses_that_are_one_number_for_all_rows(loss, call):
    model = distributed(flat, compiled(loss(), metrics=[]))
    with pytest.raises(NotImplementedError, match="returned one number for all rows.*axis=-1"):
        getattr(model, call)(X, Y[:, 0], verbose=0)


def test_means_that_are_one_number_for_all_rows():
    """Of outputs without another axis Keras' own losses are the mean of all rows, and weights make them none."""

    def train(model):
        return model.fit(X, Y[:, 0], batch_size=20, epochs=2, verbose=0, shuffle=False)

    (one, expected), (many, found) = pair(flat, compiled("mse", metrics=[]))(train)
    assert_same(one, many)
    assert_histories(expected, found)
    with pytest.raises(NotImplementedError, match="'mse' returned one number"):
        many.fit(X, Y[:, 0], sample_weight=WEIGHTS, verbose=0)


def test_dice_of_each_row():
    def make():  # positive: else sums that a loss divides by come near to 0
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, activation="softmax")])

    def train(model):
        return model.fit(X, numpy.abs(X), batch_size=20, epochs=2, verbose=0, shuffle=False)

    (one, expected), (many, found) = pair(make, compiled(keras.losses.Dice(axis=-1), metrics=[]))(train)
    assert_same(one, many)
    assert_histories(expected, found)


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_on_batch"])
@pytest.mark.parametrize("metric", [scalar, keras.losses.MeanSquaredError()])
def test_metrics_that_are_one_number_for_all_rows(metric, call):
    """Each part would count once: of parts with 3 and 1 rows, the one row like the three together."""
    model = distributed(sequential, compiled(metrics=[metric]))
    settings = {} if call.endswith("batch") else {"verbose": 0}
    with pytest.raises(ValueError, match=r"returned values of shape \(\) for \d+ rows: return a value for each"):
        getattr(model, call)(X, Y, **settings)


class Own(keras.metrics.Metric):
    """A metric with one variable, which begins with a number."""

    def __init__(self, start=0.0, **settings):
        super().__init__(name="own")
        self._start = start
        self.kept = self.add_variable((), "zeros", name="kept", **settings)

    def reset_state(self):
        self.kept.assign(self._start)

    def result(self):
        return self.kept + 0.0


class Greatest(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.kept.assign(keras.ops.maximum(self.kept, keras.ops.max(y)))


class Least(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.kept.assign(keras.ops.minimum(self.kept, keras.ops.min(y)))


class Last(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.kept.assign(keras.ops.mean(y))


class Moving(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.kept.assign(0.99 * self.kept + 0.01 * keras.ops.mean(y))


class Total(Own):
    """Adds up by `assign`, as metrics of Keras do."""

    def update_state(self, y, outputs, sample_weight=None):
        self.kept.assign(self.kept + keras.ops.sum(y))


class Flag(Own):
    def update_state(self, y, outputs, sample_weight=None):
        self.kept.assign(True)

    def result(self):
        return keras.ops.cast(self.kept, "float32")


@pytest.mark.parametrize("call", ["fit", "evaluate", "train_on_batch"])
@pytest.mark.parametrize("kind", [Greatest, Least, Last, Moving, Flag])
def test_metrics_that_are_no_sums(kind, call):
    settings = {"dtype": "bool"} if kind is Flag else {}
    model = distributed(sequential, compiled(metrics=[kind(**settings)]))
    with pytest.raises(NotImplementedError, match="more than add to its variable 'own/kept'.*aggregation=\"mean\""):
        getattr(model, call)(X, Y, **({} if call.endswith("batch") else {"verbose": 0}))


@pytest.mark.parametrize("call", ["fit", "evaluate"])
def test_a_metric_that_begins_with_another_number_than_zero(call):
    model = distributed(sequential, compiled(metrics=[Total(start=1.0)]))
    with pytest.raises(NotImplementedError, match=f"'own/kept' begins with .* count {ranks()} times"):
        getattr(model, call)(X, Y, verbose=0)


def test_metrics_that_are_sums_or_say_what_they_are():
    def train(model):
        found = model.fit(X, Y, batch_size=20, verbose=0, shuffle=False).history["own"]
        return [*found, *model.evaluate(X, Y, batch_size=20, verbose=0)[1:]]

    (_, expected), (_, found) = pair(sequential, lambda model: model.compile("sgd", "mse", metrics=[Total()]))(train)
    numpy.testing.assert_allclose(found, expected, rtol=1e-5)
    numpy.testing.assert_allclose(found, Y.sum(), rtol=1e-5)

    ones = numpy.full_like(Y, 3.0)
    for rule in ("mean", "only_first_replica"):
        model = distributed(sequential, compiled(metrics=[Greatest(aggregation=rule)]))
        assert model.evaluate(X, ones, verbose=0)[1] == 3.0


class Inside(keras.Model):
    """Updates a metric where gradients are computed."""

    def __init__(self, *args, kind, **kwargs):
        super().__init__(*args, **kwargs)
        self.own = kind()

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.own.update_state(y_pred, y_pred)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def test_metrics_that_are_updated_where_gradients_are_computed():
    def inside(kind):
        inputs = keras.Input((3,))
        return Inside(inputs, keras.layers.Dense(1)(inputs), kind=kind)

    def train(model):
        return model.fit(X, Y, batch_size=20, epochs=2, verbose=0, shuffle=False)

    (one, expected), (many, found) = pair(lambda: inside(Total), compiled(metrics=[]))(train)
    assert "own" in found.history
    assert_histories(expected, found)
    assert_same(one, many)
    with pytest.raises(NotImplementedError, match="more than add to its variable 'own/kept'"):
        train(distributed(lambda: inside(Least), compiled(metrics=[])))


def test_a_sum_of_many_numbers_is_one_however_they_are_rounded():
    def train(model):
        return model.fit(X, 1e6 * Y, batch_size=2, verbose=0, shuffle=False).history["own"]

    model = distributed(sequential, lambda model: model.compile("sgd", "mse", metrics=[Total()]))
    numpy.testing.assert_allclose(train(model), 1e6 * Y.sum(dtype="f8"), rtol=1e-4)
