"""Keras models on N ranks train, evaluate and predict as one process does on the global batch."""

from __future__ import annotations

import importlib.util
import sys

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

import mpidist
from mpidist.frameworks.keras.served_model import _Totals
from mpidist.frameworks.keras.served_step import StepResult
from tests.frameworks.keras_models import (
    BACKEND,
    BOUNDS,
    CLASSES,
    MODELS,
    WEIGHTS,
    Subclassed,
    X,
    Y,
    assert_alike,
    assert_histories,
    assert_same,
    classifier,
    compiled,
    crossentropy,
    deferred,
    distributed,
    functional,
    pair,
    rank,
    sequential,
    stock,
)

pytestmark = pytest.mark.mpi

#: Of 45 rows: the last batch has 13 rows; 1 row, so that replicas have none; all batches do.
BATCH_SIZES = [16, 4, 1]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_fit_evaluate_and_predict(make, shuffle):
    def train(model):
        history = model.fit(X, Y, batch_size=16, epochs=2, shuffle=shuffle, validation_data=(X[:7], Y[:7]), verbose=0)
        return history, model.evaluate(X, Y, batch_size=10, verbose=0), model.predict(X, batch_size=10, verbose=0)

    (one, expected), (many, found) = pair(make, compiled())(train)
    assert_histories(expected[0], found[0])
    assert_same(one, many)
    numpy.testing.assert_allclose(found[1], expected[1], **BOUNDS)
    numpy.testing.assert_allclose(found[2], expected[2], **BOUNDS)


@pytest.mark.parametrize("name", ["MirroredStrategy", "CentralStorageStrategy", "TPUStrategy"])
def test_the_other_strategies_of_a_rank_a_replica(name):
    def train(model):
        history = model.fit(X, Y, batch_size=16, epochs=1, verbose=0)
        return history, model.evaluate(X, Y, batch_size=10, verbose=0), model.predict(X, batch_size=10, verbose=0)

    (one, expected), (many, found) = pair(sequential, compiled(), strategy=getattr(mpidist, name)())(train)
    assert_histories(expected[0], found[0])
    assert_same(one, many)
    numpy.testing.assert_allclose(found[1], expected[1], **BOUNDS)
    numpy.testing.assert_allclose(found[2], expected[2], **BOUNDS)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_uneven_and_empty_parts(batch_size):
    def train(model):
        history = model.fit(X[:13], Y[:13], batch_size=batch_size, epochs=2, verbose=0)
        return history, model.evaluate(X[:5], Y[:5], batch_size=batch_size, return_dict=True, verbose=0)

    (one, expected), (many, found) = pair(functional, compiled())(train)
    assert_histories(expected[0], found[0])
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    assert_same(one, many)
    assert many.predict(X[:1], verbose=0).shape == (1, 1)


@pytest.mark.parametrize("settings", [
    {"sample_weight": WEIGHTS},
    {"class_weight": {0: 0.5, 2: 3.0}},
    {"validation_split": 0.3},
    {"steps_per_epoch": 2},
    {"batch_size": None, "steps_per_epoch": 4},
    {"shuffle": "batch"},
])  # fmt: skip
def test_arguments_of_fit(settings):
    settings = {"batch_size": 8, "epochs": 2, "verbose": 0, **settings}
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)]
    compile_fn = compiled(crossentropy(), metrics=metrics, weighted_metrics=["sparse_categorical_crossentropy"])
    (one, expected), (many, found) = pair(classifier, compile_fn)(lambda model: model.fit(X, CLASSES, **settings))
    assert_histories(expected, found)
    assert_same(one, many)


def test_weights_whose_columns_lie_one_after_the_other():
    """So PyTorch makes orthogonal ones."""

    def make():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, kernel_initializer="orthogonal")])

    def train(model):
        model.train_on_batch(X[:7], Y[:7])
        return model.fit(X[::-1], Y[::-1], batch_size=8, shuffle=False, verbose=0)

    (one, expected), (many, found) = pair(make, compiled())(train)
    assert_histories(expected, found)
    assert_same(one, many)


def test_metrics_whose_states_are_no_means():
    def compile_fn(model):
        counts = [keras.metrics.AUC(from_logits=True, name="auc"), keras.metrics.Precision(thresholds=0.0, name="p")]
        model.compile("sgd", keras.losses.BinaryCrossentropy(from_logits=True), metrics=counts)

    def train(model):
        return model.fit(X, CLASSES > 0, batch_size=16, epochs=2, verbose=0, validation_data=(X[:9], CLASSES[:9] > 0))

    (one, expected), (many, found) = pair(sequential, compile_fn)(train)
    assert_histories(expected, found)


def test_several_inputs_and_outputs():
    def make():
        first, second = keras.Input((3,), name="first"), keras.Input((3,), name="second")
        hidden = keras.layers.Dense(5, activation="tanh")(keras.layers.Concatenate()([first, second]))
        outputs = {
            "value": keras.layers.Dense(1, name="value")(hidden),
            "kind": keras.layers.Dense(3, name="kind")(hidden),
        }
        return keras.Model({"first": first, "second": second}, outputs)

    def compile_fn(model):
        losses = {"value": "mse", "kind": crossentropy()}
        model.compile("adam", losses, loss_weights={"value": 2.0, "kind": 0.5}, metrics={"kind": ["accuracy"]})

    inputs, labels = {"first": X, "second": X[::-1]}, {"value": Y, "kind": CLASSES}

    def train(model):
        history = model.fit(inputs, labels, batch_size=7, epochs=2, sample_weight=WEIGHTS, verbose=0)
        return history, model.predict(inputs, batch_size=7, verbose=0)

    (one, expected), (many, found) = pair(make, compile_fn)(train)
    assert_histories(expected[0], found[0])
    assert_same(one, many)
    for name, value in expected[1].items():
        numpy.testing.assert_allclose(found[1][name], value, **BOUNDS)


def test_losses_that_are_sums_with_weights_for_some_outputs():
    def make():
        inputs = keras.Input((3,))
        return keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(inputs) for name in "ab"})

    def train(model):
        weights = {"a": WEIGHTS, "b": None}
        return model.fit(X, {"a": Y, "b": Y}, sample_weight=weights, batch_size=20, shuffle=False, verbose=0)

    losses = {name: keras.losses.MeanSquaredError(reduction="sum") for name in "ab"}
    compile_fn = compiled(losses, metrics=(), optimizer=lambda: keras.optimizers.SGD(0.002))
    (one, expected), (many, found) = pair(make, compile_fn)(train)
    assert_histories(expected, found)
    assert_same(one, many)


def test_a_model_of_which_all_weights_are_frozen():
    def make():
        model = sequential()
        model.trainable = False
        return model

    def train(model):
        model.stop_training = False
        return model.fit(X, Y, batch_size=20, epochs=2, shuffle=False, verbose=0)

    (one, expected), (many, found) = pair(make, compiled())(train)
    assert_histories(expected, found)
    assert_same(one, many)


@pytest.mark.parametrize("sample_weight", [None, WEIGHTS])
def test_a_loss_that_is_a_sum(sample_weight):
    compile_fn = compiled(keras.losses.MeanSquaredError(reduction="sum"), optimizer=lambda: keras.optimizers.SGD(0.002))
    (one, expected), (many, found) = pair(functional, compile_fn)(
        lambda model: model.fit(X, Y, batch_size=8, sample_weight=sample_weight, validation_data=(X, Y), verbose=0)
    )
    assert_histories(expected, found)
    assert_same(one, many)


@pytest.mark.parametrize("optimizer", [
    lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.05),
    lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 3, 0.5), clipnorm=0.01),
    lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_overwrite_frequency=3),
    lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3),
])  # fmt: skip
def test_settings_of_optimizers(optimizer):
    def train(model):
        return model.fit(X, Y, batch_size=8, epochs=2, verbose=0)

    (one, expected), (many, found) = pair(functional, compiled(optimizer=optimizer))(train)
    assert_histories(expected, found)
    assert_same(one, many)
    for mine, other in zip(one.optimizer.variables, many.optimizer.variables, strict=True):
        numpy.testing.assert_allclose(
            keras.ops.convert_to_numpy(other), keras.ops.convert_to_numpy(mine), rtol=1e-4, atol=1e-5, err_msg=mine.path
        )


@pytest.mark.parametrize("settings", [{"run_eagerly": True}, {"steps_per_execution": 2}])
def test_settings_of_compile(settings):
    if BACKEND == "torch" and "steps_per_execution" in settings:
        pytest.skip("Keras on PyTorch makes one step at a time")

    def train(model):
        return model.fit(X, Y, batch_size=8, epochs=2, verbose=0)

    (one, expected), (many, found) = pair(functional, compiled(**settings))(train)
    assert_histories(expected, found)
    assert_same(one, many)


def test_batches_one_by_one():
    def train(model):
        found = [model.train_on_batch(X[:rows], Y[:rows], WEIGHTS[:rows]) for rows in (8, 5, 1)]
        found.append(model.test_on_batch(X[:2], Y[:2]))
        return found, model.train_on_batch(X[:4], Y[:4], return_dict=True)

    (one, expected), (many, found) = pair(deferred, compiled())(train)
    numpy.testing.assert_allclose(found[0], expected[0], **BOUNDS)
    assert found[1] == pytest.approx(expected[1], rel=1e-5)
    assert_same(one, many)


@pytest.mark.skipif(BACKEND != "torch", reason="steps of JAX have other arguments")
def test_numbers_of_an_own_test_step_weigh_as_the_rows_of_the_last_batch():
    """Keras returns those of the last step."""

    class Own(keras.Model):
        def test_step(self, data):
            return {"own": keras.ops.mean(data[1])}

    def make():
        inputs = keras.Input((3,))
        return Own(inputs, keras.layers.Dense(1)(inputs))

    model = distributed(make, compiled(metrics=[]))
    labels = numpy.arange(7, dtype="f4")
    found = model.evaluate(X[:7], labels, batch_size=4, verbose=0, return_dict=True)
    assert found["own"] == pytest.approx(labels[4:].mean())


def test_the_last_word_of_a_worker_is_that_with_the_most_batches():
    """A batch that runs again after the death of a worker is older than what came before it."""
    model = stock(functional, compiled(metrics=[]))
    model.evaluate(X[:2], Y[:2], verbose=0)
    totals = _Totals(model, 2)
    for worker, batches, total in (("a", 1, 4.0), ("a", 3, 30.0), ("a", 2, 10.0), ("b", 1, 6.0)):
        held = [numpy.array(total, "f4"), numpy.array(8.0 * batches, "f4")]
        totals.add(StepResult(worker, batches, held, {"loss": 0.0}, 0, None))
    assert totals.logs()["loss"] == pytest.approx((30 + 6) / (24 + 8))


def test_a_model_that_is_given_to_the_strategy():
    """It was compiled before, and trains on after a fit that was each rank's own."""
    model = stock(functional, compiled(), seed=3 + rank())
    model.fit(X, Y, batch_size=16, verbose=0)
    strategy = mpidist.MultiWorkerMirroredStrategy()
    assert strategy.distribute(model) is model
    one = stock(functional, compiled())
    one.fit(X, Y, batch_size=16, verbose=0)
    keras.utils.set_random_seed(5)
    expected = one.fit(X, Y, batch_size=16, verbose=0)
    keras.utils.set_random_seed(5 + rank())
    assert_histories(expected, model.fit(X, Y, batch_size=16, verbose=0))
    assert_same(one, model)


CALLS = {
    "call": lambda model: keras.ops.convert_to_numpy(model(X)),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
}


@pytest.mark.parametrize("how", CALLS)
@pytest.mark.parametrize("make", [functional, deferred, Subclassed])
def test_a_model_that_is_called_before_it_is_trained(make, how):
    """Its weights are rank 0's: from the end of the scope on, or since its first call."""

    def made(model):
        return CALLS[how](model), model.get_weights()

    (_, expected), (many, found) = pair(make, compiled())(made)
    numpy.testing.assert_allclose(found[0], expected[0], **BOUNDS)
    for mine, other in zip(expected[1], found[1], strict=True):
        numpy.testing.assert_array_equal(other, mine)
    if rank() == 0:
        CALLS[how](many)  # from now on it is each rank's own affair
    assert_alike(many)


def test_a_model_that_is_called_when_it_was_given_to_the_strategy():
    keras.utils.set_random_seed(3)
    expected = sequential().get_weights()
    keras.utils.set_random_seed(3 + rank())
    inner = sequential()
    outer = keras.Sequential([keras.Input((3,)), inner])
    mpidist.MultiWorkerMirroredStrategy().distribute(outer)
    for mine, other in zip(inner.get_weights(), expected, strict=True):
        numpy.testing.assert_array_equal(mine, other)


def test_weights_that_were_loaded_on_one_rank(tmp_path):
    model = distributed(functional, compiled())
    if rank() == 0:
        model.set_weights([numpy.full(each.shape, 0.25, "f4") for each in model.get_weights()])
    one = stock(functional, compiled())
    one.set_weights([numpy.full(each.shape, 0.25, "f4") for each in one.get_weights()])
    numpy.testing.assert_allclose(model.predict(X, verbose=0), one.predict(X, verbose=0), **BOUNDS)
    assert_alike(model)


def test_the_scope_leaves_nothing_behind():
    before = keras.Model.__new__, keras.Model.compile, keras.Model.fit, keras.optimizers.Optimizer.__init__
    finders = list(sys.meta_path)
    with mpidist.MultiWorkerMirroredStrategy().scope():
        made = sequential()
    assert (keras.Model.__new__, keras.Model.compile, keras.Model.fit, keras.optimizers.Optimizer.__init__) == before
    assert sys.meta_path == finders
    assert "__init__" not in vars(keras.optimizers.Optimizer) or before[3].__module__.startswith("keras")
    other = sequential()
    assert type(other) is keras.Sequential and isinstance(made, keras.Sequential)
    other.compile("sgd", "mse")
    assert len(other.fit(X, Y, verbose=0).history["loss"]) == 1


def test_a_model_that_is_saved_is_a_plain_one(tmp_path):
    model = distributed(sequential, compiled())
    model.fit(X, Y, verbose=0)
    path = tmp_path / "model.keras"
    model.save(path)
    model.save_weights(tmp_path / "model.weights.h5")
    again = keras.models.load_model(path)
    assert type(again) is keras.Sequential and type(again.optimizer) is type(keras.optimizers.Adam())
    numpy.testing.assert_allclose(again.predict(X, verbose=0), model.predict(X, verbose=0), **BOUNDS)
    fresh = sequential()
    fresh.load_weights(tmp_path / "model.weights.h5")
    assert_same(fresh, model)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.keras", "model.weights.h5"]


def test_a_model_as_the_function_of_a_trainer():
    """The closed form of linear regression by gradient descent."""
    if BACKEND != "jax":
        pytest.skip("its gradient is computed by JAX")
    import jax

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    def loss(parameters, x, y):
        predictions, _ = model.stateless_call(parameters, [], x)
        return ((predictions - y) ** 2).mean(), predictions

    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpidist.Variable(numpy.zeros(each.shape, "f4")) for each in model.trainable_variables]
        optimizer = mpidist.optimizers.SGD(0.1)
    value_and_grad_fn = jax.jit(jax.value_and_grad(loss, has_aux=True))
    trainer = mpidist.Trainer(value_and_grad_fn, variables, optimizer, metrics=["mse"])
    x, y = X[:24], Y[:24]
    history = trainer.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    w, b, squares = numpy.zeros((3, 1)), numpy.zeros(1), []
    for rows, labels in zip(x.reshape(3, 8, 3), y.reshape(3, 8, 1), strict=True):
        difference = rows @ w + b - labels
        squares.append(numpy.mean(difference**2))
        w, b = w - 0.2 * rows.T @ difference / 8, b - 0.2 * difference.mean(axis=0)
    numpy.testing.assert_allclose(variables[0].value, w, rtol=1e-4)
    numpy.testing.assert_allclose([history["mse"], history["loss"]], [[numpy.mean(squares)]] * 2, rtol=1e-4)


def test_metrics_and_callbacks_of_keras_in_a_trainer():
    """The metric is that of all rows, and the training ends in the epoch in which Keras' own would end it."""

    def train(metrics, callbacks):
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable, optimizer = mpidist.Variable(numpy.zeros((3, 1))), mpidist.optimizers.SGD(0.5)

        def value_and_grad(w, x, y):
            scores = 1 / (1 + numpy.exp(-x @ w))
            loss = -numpy.log(numpy.where(y == 1, scores, 1 - scores)).mean()
            return (loss, scores), x.T @ (scores - y) / len(x)

        trainer = mpidist.Trainer(value_and_grad, variable, optimizer, metrics=metrics)
        return trainer.fit(X, Y > 0, batch_size=16, epochs=9, callbacks=callbacks, verbose=0)

    def settings(library):
        rates = library.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)
        return [library.callbacks.EarlyStopping("loss", patience=0, min_delta=0.02, mode="min"), rates]

    found = train([keras.metrics.AUC(name="auc"), keras.metrics.BinaryAccuracy(name="b")], settings(keras))
    expected = train([mpidist.metrics.AUC(name="auc"), "binary_accuracy"], settings(mpidist))
    assert 1 < len(found.history["loss"]) < 9
    numpy.testing.assert_allclose(found.history["loss"], expected.history["loss"])
    numpy.testing.assert_allclose(found.history["auc"], expected.history["auc"], rtol=1e-6)
    numpy.testing.assert_allclose(found.history["b"], expected.history["binary_accuracy"], rtol=1e-6)
