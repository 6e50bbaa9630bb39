"""`model_to_estimator`: an Estimator of a Keras model does what Keras does on the global batch, in one process."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist import estimator
from mpidist.frameworks.keras import backends
from mpidist.world import world_communicator
from tests.frameworks import keras_models as models
from tests.frameworks.keras_models import keras

pytestmark = pytest.mark.mpi

ROWS, BATCH = 36, 3
X, Y, CLASSES = models.X[:ROWS], models.Y[:ROWS], models.CLASSES[:ROWS]


@pytest.fixture(autouse=True)
def _names():
    """Variables have their paths as names: alike on all ranks, whatever each has made in other tests."""
    keras.backend.clear_session(free_memory=False)


@pytest.fixture
def directory(tmp_path):
    return models.folder_of_rank_0(tmp_path)


def compiled(make=models.functional, optimizer=None, loss="mse", metrics=("mae",)):
    keras.utils.set_random_seed(3)
    model = make()
    model.compile(optimizer or keras.optimizers.SGD(0.05, momentum=0.9), loss=loss, metrics=list(metrics))
    return model


def classifier():
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax", name="classes")(inputs))


def input_fn_of(labels=Y, batch=BATCH):
    def input_fn(input_context):
        rows = mpidist.data.Dataset.from_arrays((X, labels))
        return rows.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).batch(batch)

    return input_fn


def config_of(name="MirroredStrategy"):
    strategy = getattr(mpidist, name)()
    return estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)


def by_keras(model, labels=Y):
    """Return weights by path, results and predictions of Keras itself, alone with the global batch."""
    size = BATCH * world_communicator().size
    model.fit(X, labels, batch_size=size, shuffle=False, verbose=0)
    weights = {each.path: keras.ops.convert_to_numpy(each) for each in model.variables}
    results = model.evaluate(X, labels, batch_size=size, verbose=0, return_dict=True)
    return weights, results, model.predict(X, verbose=0)


#: Rules that divide by small numbers make roundings larger.
WIDE = {"rtol": 2e-4, "atol": 3e-5}


def assert_as_keras(found, expected, labels=Y, output=None, bounds=models.BOUNDS):
    weights, results, predictions = expected
    assert sorted([*weights, "global_step"]) == found.get_variable_names()
    for name, value in weights.items():
        numpy.testing.assert_allclose(found.get_variable_value(name), value, err_msg=name, **bounds)
    ours = found.evaluate(input_fn_of(labels))
    assert ours.keys() == results.keys() | {"global_step"}
    for name, value in results.items():
        numpy.testing.assert_allclose(ours[name], value, err_msg=name, **bounds)
    predicted = list(found.predict(input_fn_of(labels)))
    (name,) = predicted[0]
    assert output in (None, name)
    numpy.testing.assert_allclose([each[name] for each in predicted], predictions, **bounds)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("MirroredStrategy", models.functional),
        ("MultiWorkerMirroredStrategy", models.sequential),
        ("CentralStorageStrategy", models.functional),
    ],
)
def test_ranks_do_what_keras_does_with_the_global_batch(directory, name, make):
    model = compiled(make)
    before = model.get_weights()
    found = estimator.model_to_estimator(model, directory, config_of(name))
    found.train(input_fn_of())
    assert all((one == other).all() for one, other in zip(before, model.get_weights(), strict=True))
    assert_as_keras(found, by_keras(model))


OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(0.01, beta_1=0.8),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Ftrl": lambda: keras.optimizers.Ftrl(
        0.1, -0.7, 0.2, 0.01, l2_regularization_strength=0.02, l2_shrinkage_regularization_strength=0.03, beta=0.4
    ),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.01, momentum=0.5),
    "SGD with a schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "SGD that clips": lambda: keras.optimizers.SGD(0.1, nesterov=True, momentum=0.5, global_clipnorm=0.3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_have_the_same_settings(directory, name):
    model = compiled(optimizer=OPTIMIZERS[name]())
    found = estimator.model_to_estimator(model, directory, config_of())
    found.train(input_fn_of())
    assert_as_keras(found, by_keras(model), bounds=models.BOUNDS if name.startswith("SGD") else WIDE)


@pytest.mark.skipif(backends.version() < (3, 14), reason="adds up over rows")
def test_a_mean_over_rows_that_a_layer_adds(directory):
    model = compiled(lambda: adding_up_rows("l2"))
    found = estimator.model_to_estimator(model, directory, config_of())
    found.train(input_fn_of())
    assert_as_keras(found, by_keras(model))


def test_classes_and_metrics_that_are_objects(directory):
    metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy(name="entropy")]
    loss = keras.losses.SparseCategoricalCrossentropy()
    model = compiled(classifier, loss=loss, metrics=metrics)
    found = estimator.model_to_estimator(model, directory, config_of())
    found.train(input_fn_of(CLASSES))
    assert_as_keras(found, by_keras(model, CLASSES), CLASSES, "classes")


def test_a_frozen_layer_stays_as_it_is(directory):
    model = models.functional()
    model.layers[1].trainable = False
    model.compile(keras.optimizers.SGD(0.1), loss="mse")
    frozen = model.layers[1].get_weights()[0]
    found = estimator.model_to_estimator(model, directory, config_of())
    found.train(input_fn_of())
    path = model.layers[1].kernel.path
    assert (found.get_variable_value(path) == frozen).all()
    assert_as_keras(found, by_keras(model))


def test_a_training_goes_on_from_the_folder(directory):
    model = compiled()
    for _ in range(2):
        estimator.model_to_estimator(model, directory, config_of()).train(input_fn_of(), steps=2)
    found = estimator.model_to_estimator(model, directory, config_of())
    assert found.get_variable_value("global_step") == 4
    size = BATCH * world_communicator().size
    rows = numpy.r_[0 : 2 * size, 0 : 2 * size]
    model.fit(X[rows], Y[rows], batch_size=size, shuffle=False, verbose=0)
    for each in model.variables:
        value = keras.ops.convert_to_numpy(each)
        numpy.testing.assert_allclose(found.get_variable_value(each.path), value, **models.BOUNDS)


def with_layer(layer):
    inputs = keras.Input((3,))
    return keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))


CHANGING = {
    "batch normalization": keras.layers.BatchNormalization,
    "dropout": lambda: keras.layers.Dropout(0.5, seed=1),
}


@pytest.mark.parametrize("name", CHANGING)
def test_layers_that_change_variables_are_not_trained(directory, name):
    found = estimator.model_to_estimator(compiled(lambda: with_layer(CHANGING[name]())), directory, config_of())
    found.evaluate(input_fn_of())
    with pytest.raises(NotImplementedError, match="the model changes variable .* while it trains"):
        found.train(input_fn_of())


def several_outputs():
    inputs = keras.Input((3,))
    return keras.Model(inputs, [keras.layers.Dense(1)(inputs), keras.layers.Dense(1)(inputs)])


def in_a_scope():
    with mpidist.MultiWorkerMirroredStrategy().scope():
        return compiled()


def with_loss_weights():
    model = models.sequential()
    model.compile("sgd", "mse", loss_weights=[0.5])
    return model


def adding_up_rows(regularizer="orthogonal_regularizer"):
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activity_regularizer=regularizer)])


def within_bounds():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_constraint="non_neg")])


REFUSED = {
    "weights of losses": (with_loss_weights, NotImplementedError, "without loss_weights"),
    "a constraint": (lambda: compiled(within_bounds), NotImplementedError, "kernel' has a constraint"),
    "a sum of rows": (lambda: compiled(adding_up_rows), NotImplementedError, "has an activity_regularizer"),
    "no model": (lambda: 3, TypeError, "must be a keras.Model, got int"),
    "not compiled": (models.functional, ValueError, "has not been compiled yet"),
    "not built": (lambda: compiled(models.deferred), ValueError, "the model has no weights yet"),
    "a sum": (
        lambda: compiled(loss=keras.losses.MeanSquaredError(reduction="sum")),
        NotImplementedError,
        "the loss must be a mean over the rows",
    ),
    "several losses": (lambda: compiled(several_outputs, loss=["mse", "mae"]), NotImplementedError, "with one loss"),
    "an optimizer": (lambda: compiled(optimizer=keras.optimizers.Lion()), NotImplementedError, "the model has a Lion"),
    "a setting": (
        lambda: compiled(optimizer=keras.optimizers.Adam(amsgrad=True, use_ema=True)),
        NotImplementedError,
        "use_ema=True, .*amsgrad=True|amsgrad=True, .*use_ema=True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_not_converted(directory, name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        estimator.model_to_estimator(make(), directory)


def test_a_loss_that_is_a_function_gets_labels_like_the_predictions(directory):
    """As by Keras: labels (rows,) and predictions (rows, 1) would else be taken for a square."""
    model = compiled(loss=lambda y, outputs: keras.ops.mean((y - outputs) ** 2, -1), metrics=())
    found = estimator.model_to_estimator(model, directory, config_of())
    labels = Y[:, 0]
    found.train(input_fn_of(labels))
    assert_as_keras(found, by_keras(model, labels), labels)


def test_a_mask_of_the_outputs_is_refused(directory):
    def masked():
        inputs = keras.Input((3, 1))
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Masking()(inputs)))

    model = compiled(masked, metrics=())
    found = estimator.model_to_estimator(model, directory, config_of())

    def input_fn(input_context):
        rows = mpidist.data.Dataset.from_arrays((X[..., None], X[..., None]))
        return rows.shard(input_context.num_input_pipelines, input_context.input_pipeline_id).batch(BATCH)

    with pytest.raises(NotImplementedError, match="have a mask"):
        found.train(input_fn)


class Greatest(keras.metrics.Metric):
    def __init__(self, aggregation="sum", **settings):
        super().__init__(**settings)
        self.aggregation = aggregation
        self.most = self.add_variable((), "zeros", aggregation=aggregation)

    def get_config(self):
        return {**super().get_config(), "aggregation": self.aggregation}

    def update_state(self, y, outputs, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y)))

    def result(self):
        return self.most + 0.0


def scalar(y, outputs):
    return keras.ops.mean((y - outputs) ** 2)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=0), "has a mask, as with ignore_class"),
        (keras.losses.Dice(), "returned one number for all rows"),
        (scalar, "returned one number for all rows"),
    ],
)
def test_losses_that_are_no_means_over_rows(directory, loss, message):
    found = estimator.model_to_estimator(compiled(classifier, loss=loss, metrics=()), directory, config_of())
    labels = CLASSES if "mask" in message else numpy.abs(X)
    with pytest.raises(NotImplementedError, match=message):
        found.train(input_fn_of(labels))


def test_metrics_that_are_no_sums_over_rows(directory):
    keras.saving.register_keras_serializable("tests")(Greatest)
    keras.saving.register_keras_serializable("tests")(scalar)
    for metric, error, message in [
        (Greatest(), NotImplementedError, "does more than add to its variable"),
        (scalar, ValueError, "returned values of shape"),
    ]:
        found = estimator.model_to_estimator(compiled(metrics=[metric]), directory, config_of())
        with pytest.raises(error, match=message):
            found.evaluate(input_fn_of())
    mean = compiled(metrics=[Greatest(aggregation="mean")])
    with pytest.raises(NotImplementedError, match="variables with an aggregation"):
        estimator.model_to_estimator(mean, directory, config_of()).evaluate(input_fn_of())


def test_several_outputs_with_one_loss_are_not_trained(directory):
    found = estimator.model_to_estimator(compiled(several_outputs, metrics=()), directory, config_of())
    with pytest.raises(NotImplementedError, match="models with one output"):
        found.train(input_fn_of())


def test_a_model_that_trains_by_itself_is_not_converted(directory):
    model = in_a_scope()
    if world_communicator().size == 1:
        return
    with pytest.raises(ValueError, match="trains over all ranks by itself"):
        estimator.model_to_estimator(model, directory)
