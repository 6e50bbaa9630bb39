"""Inputs of Keras models on N ranks: everything that gives global batches, cut by rows; and layers with statistics."""

from __future__ import annotations

import importlib.util
import threading
import warnings

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

import mpidist
import mpidist.keras
from mpidist.errors import CollectiveMismatchError
from tests.frameworks.keras_models import (
    BACKEND,
    BOUNDS,
    CLASSES,
    ROWS,
    WEIGHTS,
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
    ranks,
    sequential,
    stock,
)

if BACKEND == "jax":
    import jax

pytestmark = pytest.mark.mpi

#: Of rows: one batch has fewer than there are ranks.
CUTS = [(0, 16), (16, 18), (18, 31), (31, 32), (32, 45)]


class Batches(keras.utils.PyDataset):
    def __init__(self, labels=Y, weights=None, **settings):
        super().__init__(**settings)
        self.arrays = [each for each in (X, labels, weights) if each is not None]

    @property
    def num_batches(self):
        return len(CUTS)

    def __getitem__(self, index):
        first, last = CUTS[index]
        return tuple(each[first:last] for each in self.arrays)


def generator(epochs=1):
    for first, last in CUTS * epochs:
        yield X[first:last], Y[first:last]


def loader(**settings):
    import torch

    rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(rows, batch_size=8, **settings)


@pytest.mark.parametrize("make", [
    Batches,
    lambda: Batches(weights=WEIGHTS),
    generator,
])  # fmt: skip
def test_what_gives_batches(make):
    def train(model):
        history = model.fit(make(), shuffle=False, validation_data=Batches(), verbose=0)
        return history, model.evaluate(make(), verbose=0), model.predict(make(), verbose=0)

    (one, expected), (many, found) = pair(deferred, compiled())(train)
    assert_histories(expected[0], found[0])
    assert_same(one, many)
    numpy.testing.assert_allclose(found[1], expected[1], **BOUNDS)
    numpy.testing.assert_allclose(found[2], expected[2], **BOUNDS)


LOADED = {"threads": {}, "processes": {"use_multiprocessing": True}, "all at once": {"max_queue_size": 0}}


@pytest.mark.mpi(min_size=2)  # one rank has the batches of Keras alone
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("loaded", LOADED.values(), ids=LOADED)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("steps", [None, 3])
def test_workers_load_the_batches_of_one_worker(steps, shuffle, loaded):
    """Of one process without workers: Keras alone gives batches that workers had loaded before the epoch again."""
    settings = {"shuffle": shuffle, "steps_per_epoch": steps, "epochs": 3, "verbose": 0}

    def train(model):
        keras.utils.set_random_seed(9)
        own = {} if model in alone else {"workers": 2, "max_queue_size": 3, **loaded}
        histories = [model.fit(Batches(**own), **settings) for _ in range(2)]
        return histories, model.evaluate(Batches(**own), verbose=0), model.predict(Batches(**own), verbose=0)

    alone = [stock(functional, compiled())]
    expected = train(alone[0])
    many = distributed(functional, compiled())
    found = train(many)
    for each, other in zip(expected[0], found[0], strict=True):
        assert_histories(each, other)
    assert_same(alone[0], many)
    numpy.testing.assert_allclose(found[1], expected[1], **BOUNDS)
    numpy.testing.assert_allclose(found[2], expected[2], **BOUNDS)


class Told(Batches):
    """Notes the batches that are loaded before it is told of their epoch, and gives workers the time for that."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.early, self.is_told, self.has_loaded = [], False, threading.Event()

    def __getitem__(self, index):
        if not self.is_told:
            self.early.append(index)
        self.has_loaded.set()
        return super().__getitem__(index)

    def on_epoch_begin(self):
        self.has_loaded.wait(0.2)
        self.is_told = True

    def on_epoch_end(self):
        self.is_told = False
        self.has_loaded.clear()


@pytest.mark.mpi(min_size=2)
def test_workers_load_no_batch_before_its_epoch():
    """Its order is not known then; a data set may change with its epoch, too."""
    many = distributed(functional, compiled())
    for _ in range(2):
        batches = Told(workers=2, max_queue_size=3)
        many.fit(batches, shuffle=True, epochs=2, verbose=0)
        assert batches.early == []
    assert_alike(many)


def rows_of_a_data_set(labels=Y):
    return mpidist.data.Dataset.from_arrays((X.astype("float64"), labels.astype("float64"))).batch(14)


def stream():
    batched = rows_of_a_data_set()
    return mpidist.data.Dataset.from_generator(lambda: iter(batched.unbatch())).batch(14)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says so at the end of every stream
@pytest.mark.parametrize("make", [rows_of_a_data_set, stream, lambda: rows_of_a_data_set().shuffle(9, seed=4)])
def test_a_data_set_is_its_batches(make):
    """With Keras alone, every epoch is an epoch of the data set; N ranks, which are given the data set itself, too."""

    def train(model, given):
        history = model.fit(given(make()), epochs=3, validation_data=given(make()), verbose=0)
        return history, model.evaluate(given(make()), verbose=0), model.predict(given(make()), verbose=0)

    by_hand, alone = stock(functional, compiled()), stock(functional, compiled())
    epochs, found = make(), train(alone, mpidist.keras.as_input)
    for _ in range(3):
        for x, y in [*epochs]:
            by_hand.train_on_batch(x, y)
    assert_same(by_hand, alone)
    many = distributed(functional, compiled())
    given = (lambda dataset: dataset) if mpidist.size() > 1 else mpidist.keras.as_input
    history, results, predicted = train(many, given)
    assert_histories(found[0], history)
    assert_same(alone, many)
    numpy.testing.assert_allclose(results, found[1], **BOUNDS)
    numpy.testing.assert_allclose(predicted, found[2], **BOUNDS)


def test_steps_of_a_data_set_that_repeats():
    def train(model):
        given = mpidist.keras.as_input(rows_of_a_data_set().repeat())
        return model.fit(given, epochs=2, steps_per_epoch=5, verbose=0)

    (one, expected), (many, found) = pair(functional, compiled())(train)
    assert_histories(expected, found)
    assert_same(one, many)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("given", "settings", "error", "message"), [
    (lambda: rows_of_a_data_set().unbatch(), {}, ValueError, r"has no batches; call batch\(n\)"),
    (lambda: rows_of_a_data_set().repeat(), {}, ValueError, "repeats forever; give steps_per_epoch"),
    (rows_of_a_data_set, {"class_weight": {0: 2.0}}, ValueError, "class_weight is for arrays"),
    (rows_of_a_data_set, {"y": Y}, ValueError, "y and sample_weight are given with arrays only"),
    (rows_of_a_data_set, {"validation_split": 0.5}, ValueError, "validation_split is for arrays"),
])  # fmt: skip
def test_data_sets_that_are_refused(given, settings, error, message):
    model = distributed(functional, compiled())
    with pytest.raises(error, match=message):
        model.fit(given(), verbose=0, **settings)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("made", [lambda dataset: dataset, iter])
def test_a_distributed_data_set_is_refused(made):
    model = distributed(functional, compiled())
    strategy = mpidist.MultiWorkerMirroredStrategy()
    parts = made(strategy.experimental_distribute_dataset(rows_of_a_data_set()))
    for call in (model.fit, model.evaluate, model.predict, mpidist.keras.as_input):
        with pytest.raises(TypeError, match=r"gives one replica's rows.*give it the mpidist.data.Dataset"):
            call(parts)


@pytest.mark.mpi(min_size=2)
def test_data_sets_that_differ():
    model = distributed(functional, compiled())
    with pytest.raises(CollectiveMismatchError, match="checksum of array 1 .every rank is given whole batches"):
        model.fit(rows_of_a_data_set(Y + rank()), verbose=0)


def test_steps_of_a_generator():
    def train(model):
        return model.fit(generator(4), epochs=2, steps_per_epoch=7, verbose=0)

    (one, expected), (many, found) = pair(functional, compiled())(train)
    assert_histories(expected, found)
    assert_same(one, many)


def test_class_weights_of_batches():
    def train(model):
        return model.fit(Batches(CLASSES), class_weight={1: 4.0}, shuffle=False, verbose=0)

    (one, expected), (many, found) = pair(classifier, compiled(crossentropy(), metrics=["accuracy"]))(train)
    assert_histories(expected, found)
    assert_same(one, many)


def test_a_loader_of_pytorch():
    pytest.importorskip("torch")

    def train(model):
        return model.fit(loader(), epochs=2, validation_data=loader(), verbose=0)

    (one, expected), (many, found) = pair(functional, compiled())(train)
    assert_histories(expected, found)
    assert_same(one, many)


@pytest.mark.parametrize("make", [Batches, loader])
def test_a_validation_leaves_the_order_of_rows(make):
    """Also where a loader of PyTorch draws a seed for each pass, from the generator that shuffles."""
    pytest.importorskip("torch")

    def train(model):
        history = model.fit(X, Y, batch_size=8, epochs=3, validation_data=make(), verbose=0)
        model.evaluate(make(), verbose=0)
        return history, model.fit(X, Y, batch_size=8, verbose=0)

    (one, expected), (many, found) = pair(functional, compiled())(train)
    for mine, other in zip(expected, found, strict=True):
        assert_histories(mine, other)
    assert_same(one, many)


def test_a_loader_that_shuffles_beside_shuffled_arrays():
    """With one seed on every rank: the order of arrays, which is the chief's, moves the generators of all."""
    torch = pytest.importorskip("torch")

    def train(model):
        keras.utils.set_random_seed(9)
        torch.manual_seed(9)  # which Keras does with its own backend only
        history = model.fit(X, Y, batch_size=8, epochs=2, validation_data=loader(shuffle=True), verbose=0)
        return history, model.fit(loader(shuffle=True), shuffle=False, verbose=0), numpy.random.random()

    (one, expected), (many, found) = pair(functional, compiled())(train)
    for mine, other in zip(expected[:2], found[:2], strict=True):
        assert_histories(mine, other)
    assert_same(one, many)
    assert found[2] == expected[2]


@pytest.mark.mpi(min_size=2)
def test_a_loader_that_shuffles_otherwise_on_each_rank():
    torch = pytest.importorskip("torch")
    model = distributed(functional, compiled())
    with pytest.raises(CollectiveMismatchError, match="checksum of array 0 .every rank is given whole batches"):
        model.fit(loader(shuffle=True, generator=torch.Generator().manual_seed(rank())), verbose=0)


@pytest.mark.mpi(min_size=2)
def test_data_that_end_on_one_rank_first():
    model = distributed(functional, compiled())

    def shorter():
        for number, batch in enumerate(generator()):
            if number < 3 or rank() > 0:
                yield batch

    with pytest.raises(CollectiveMismatchError, match=r"none \(the data ended after 3 batches\) on rank 0"):
        model.fit(shorter(), verbose=0)


@pytest.mark.mpi(min_size=2)
def test_data_of_which_one_rank_has_fewer():
    class Fewer(Batches):
        @property
        def num_batches(self):
            return len(CUTS) - (rank() == 1)

    model = distributed(functional, compiled())
    with pytest.raises(CollectiveMismatchError, match=r"batches in an epoch: (4|5)"):
        model.fit(Fewer(), verbose=0)


def test_the_chief_alone_warns_of_shuffle():
    model = distributed(functional, compiled())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(generator(), verbose=0)
    assert sum("`shuffle=True` was passed" in str(each.message) for each in caught) == (rank() == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("arrays, message", [
    (lambda: (X[: 45 - rank()], Y[: 45 - rank()]), r"array 0.*\(45, 3\)"),
    (lambda: (X + rank(), Y), r"checksum of array 0 \(every rank is given all rows\)"),
])  # fmt: skip
def test_arrays_that_differ(arrays, message):
    model = distributed(functional, compiled())
    with pytest.raises(CollectiveMismatchError, match=message):
        model.fit(*arrays(), verbose=0)
    with pytest.raises(CollectiveMismatchError, match="batch_size"):
        model.evaluate(X, Y, batch_size=8 + rank(), verbose=0)
    model.fit(X, Y, verbose=0)  # all are in step again
    assert_alike(model)


def test_arrays_of_the_backend():
    def train(model):
        given = [keras.ops.convert_to_tensor(each) for each in (X, Y)]
        return model.fit(*given, batch_size=8, verbose=0), model.predict(given[0], verbose=0)

    (one, expected), (many, found) = pair(functional, compiled())(train)
    assert_histories(expected[0], found[0])
    numpy.testing.assert_allclose(found[1], expected[1], **BOUNDS)


def test_doubles_become_floats():
    (one, expected), (many, found) = pair(functional, compiled())(
        lambda model: model.fit(X.astype("f8"), Y.astype("f8"), batch_size=8, verbose=0)
    )
    assert_histories(expected, found)
    assert_same(one, many)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits(dtype):
    """Of which Keras computes with floats; a loss that is a sum multiplies them on each replica."""
    weights = keras.ops.convert_to_tensor(WEIGHTS, dtype)

    def train(model):
        history = model.fit(X, Y, batch_size=7, sample_weight=weights, shuffle=False, verbose=0)
        return history, model.train_on_batch(X[:7], Y[:7], weights[:7])

    loss = keras.losses.MeanSquaredError(reduction="sum")
    (one, expected), (many, found) = pair(functional, compiled(loss, optimizer=lambda: keras.optimizers.SGD(0.01)))(
        train
    )
    assert_histories(expected[0], found[0])
    numpy.testing.assert_allclose(found[1], expected[1], **BOUNDS)
    assert_same(one, many)


@pytest.mark.skipif(BACKEND != "jax", reason="on PyTorch Keras itself computes means and sums with floats")
def test_weights_of_64_bits():
    """A loss that is a sum multiplies them on each replica, and rounds nothing."""

    class Squares(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return keras.ops.sum((y_true - y_pred) ** 2, axis=-1)

    def make():
        return keras.Sequential([keras.Input((3,), dtype="float64"), keras.layers.Dense(1, dtype="float64")])

    x, y, weights = X.astype("f8"), Y.astype("f8"), numpy.random.default_rng(2).uniform(size=ROWS)
    with jax.enable_x64(True):
        keras.config.set_floatx("float64")
        try:
            loss = Squares(reduction="sum")
            model = distributed(make, compiled(loss, metrics=(), optimizer=lambda: keras.optimizers.SGD(0.125)))
            kernel, bias = model.get_weights()
            model.fit(x, y, batch_size=ROWS, sample_weight=weights, verbose=0)
            found = model.get_weights()[0]
        finally:
            keras.config.set_floatx("float32")
    expected = kernel - 0.125 * x.T @ (2 * weights[:, None] * (x @ kernel + bias - y))
    numpy.testing.assert_allclose(found, expected, rtol=1e-13)


# -- layers -----------------------------------------------------------------------------------------------------------


def test_moving_averages_of_batch_normalization():
    """Those of the mean are the global batch's: the mean of parts, weighted by rows."""

    def make():
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
        )

    model = distributed(make, compiled())
    model.fit(X, Y, batch_size=20, shuffle=False, verbose=0)
    mean = numpy.zeros(3)
    for first, last in ((0, 20), (20, 40), (40, 45)):
        mean = 0.5 * mean + 0.5 * X[first:last].astype("f8").mean(axis=0)
    numpy.testing.assert_allclose(keras.ops.convert_to_numpy(model.layers[0].moving_mean), mean, rtol=1e-5, atol=1e-6)
    assert_alike(model)


def test_layers_that_are_frozen_keep_their_bits():
    def make():
        return keras.Sequential([
            keras.Input((3,)),
            keras.layers.Dense(5, activation="tanh", trainable=False),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ])  # fmt: skip

    model = distributed(make, compiled())
    model.evaluate(X, Y, verbose=0)  # the chief's weights
    before = model.layers[0].get_weights()
    model.fit(X, Y, batch_size=7, verbose=0)
    for old, new in zip(before, model.layers[0].get_weights(), strict=True):
        assert (old == new).all()
    assert_alike(model)


def test_dropout_differs_between_replicas():
    """A unit that is dropped adds nothing to the gradient of its weights: with a rate of a half, whole rows are 0."""

    def make():
        return keras.Sequential([keras.Input((64,)), keras.layers.Dropout(0.5, seed=1), keras.layers.Dense(1)])

    model = distributed(make, compiled(optimizer=lambda: keras.optimizers.SGD(1.0)))
    model.evaluate(numpy.ones((1, 64), "f4"), numpy.ones((1, 1), "f4"), verbose=0)
    before = model.get_weights()[0]
    rows = ranks()
    model.train_on_batch(numpy.ones((rows, 64), "f4"), numpy.full((rows, 1), 1000, "f4"))  # one row for each replica
    kept = numpy.count_nonzero(model.get_weights()[0] - before)
    assert (kept > 40) == (rows > 1)  # of 64: a half of one mask, three quarters of two
    assert_alike(model)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = distributed(functional, compiled())
        history = model.fit(X, Y, batch_size=8, epochs=8, verbose=0).history
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert history["loss"][-1] < history["loss"][0]
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    assert_alike(model)


# -- steps of one's own -----------------------------------------------------------------------------------------------


def own_step():
    """A model with the `train_step` of Keras' guide for the backend."""
    if BACKEND == "torch":
        import torch

        class Own(keras.Model):
            def train_step(self, data):
                x, y = data
                self.zero_grad()
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
                loss.backward()
                weights = list(self.trainable_weights)
                with torch.no_grad():
                    self.optimizer.apply([each.value.grad for each in weights], weights)
                self.metrics[0].update_state(loss)
                return {"own": loss, "loss": self.metrics[0].result()}

    else:
        import jax

        class Own(keras.Model):
            def loss_of(self, trainable, others, x, y):
                predictions, others = self.stateless_call(trainable, others, x, training=True)
                return self.compute_loss(x, y, predictions), others

            def train_step(self, state, data):
                trainable, others, optimizer, metrics = state
                x, y = data
                gradient_fn = jax.value_and_grad(self.loss_of, has_aux=True)
                (loss, others), gradients = gradient_fn(trainable, others, x, y)
                trainable, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trainable)
                tracked = self.metrics[0].stateless_update_state(metrics[:2], loss)
                logs = {"own": loss, "loss": self.metrics[0].stateless_result(tracked)}
                return logs, (trainable, others, optimizer, tracked + metrics[2:])

    inputs = keras.Input((3,))
    return Own(inputs, keras.layers.Dense(1)(keras.layers.Dense(6, activation="tanh")(inputs)))


def test_a_step_of_one_s_own():
    """Of what it returns and is no metric, the mean over the rows of the last step; a loss is a mean over rows."""

    def train(model):
        return model.fit(X, Y, batch_size=16, epochs=2, shuffle=False, verbose=0)

    (one, expected), (many, found) = pair(own_step, compiled())(train)
    assert_histories(expected, found)
    assert_same(one, many)


class OverPositives(keras.metrics.Metric):
    """The mean of outputs over rows with labels above 0: NaN of rows without."""

    def __init__(self):
        super().__init__(name="over_positives")
        self.total, self.count = [self.add_variable((), "zeros", name=name) for name in ("total", "count")]

    def update_state(self, labels, outputs, sample_weight=None):
        counts = keras.ops.cast(labels > 0, "float32")
        self.total.assign_add(keras.ops.sum(counts * outputs))
        self.count.assign_add(keras.ops.sum(counts))

    def result(self):
        return self.total / self.count


def test_a_metric_without_a_value_on_some_ranks():
    """Beside a number that a step of one's own returns, where results of metrics are found by their values."""

    class Own(keras.Sequential):
        def test_step(self, *arguments):
            result = super().test_step(*arguments)
            return {**result, "own": 2.0} if BACKEND == "torch" else ({**result[0], "own": 2.0}, *result[1:])

    labels = numpy.zeros_like(Y)
    labels[:2] = 1

    def evaluate(model):
        return model.evaluate(X, labels, batch_size=64, verbose=0, return_dict=True)

    make = pair(lambda: Own(sequential().layers), lambda model: model.compile("sgd", "mse", metrics=[OverPositives()]))
    (_, expected), (_, found) = make(evaluate)
    assert expected.keys() == found.keys() == {"loss", "over_positives", "own"}
    for name, value in expected.items():
        numpy.testing.assert_allclose(found[name], value, **BOUNDS, err_msg=name)


@pytest.mark.mpi(min_size=2)
@pytest.mark.skipif(BACKEND != "torch", reason="arrays of JAX are not written again")
def test_counts_of_a_step_of_one_s_own_beside_a_validation():
    """Keras gives the variable itself as the result, in which a validation counts anew: one rank shows that one."""
    import torch

    class Own(keras.Sequential):
        def train_step(self, data):
            x, y = data
            self.zero_grad()
            predictions = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predictions)
            loss.backward()
            weights = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([each.value.grad for each in weights], weights)
            for metric in self.metrics:
                metric.update_state(*([loss] if metric.name == "loss" else [y, predictions]))
            return {metric.name: metric.result() for metric in self.metrics}

    labels = (Y > 0).astype("float32")
    metrics = [keras.metrics.TruePositives(thresholds=0.0, name="positives")]
    model = distributed(lambda: Own(sequential().layers), compiled("hinge", metrics, keras.optimizers.SGD))
    model.layers[-1].bias.assign([9.0])  # so every row counts as positive
    history = model.fit(X, labels, batch_size=16, validation_data=(X[:7], labels[:7]), verbose=0).history
    assert (history["positives"], history["val_positives"]) == ([labels.sum()], [labels[:7].sum()])


def noted(shapes):
    """Return a class of models that note what their steps are given, without the number of rows."""

    def note(name, data):
        shapes[name] = keras.tree.map_structure(lambda leaf: leaf if leaf is None else tuple(leaf.shape)[1:], data)

    class Noting(keras.Model):
        def call(self, inputs):
            flat = [each for each in keras.tree.flatten(inputs) if each is not None]
            return self.last(sum(flat))

        def train_step(self, *arguments):
            note("train", arguments[-1])
            return super().train_step(*arguments)

        def test_step(self, *arguments):
            note("test", arguments[-1])
            return super().test_step(*arguments)

        def predict_step(self, *arguments):
            note("predict", arguments[-1])
            return super().predict_step(*arguments)

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred**2)

    def make():
        model = Noting()
        model.last = keras.layers.Dense(1)
        return model

    return make


def pieces(*parts):
    """Return a generator of batches that have these parts."""

    def generate():
        for first, last in CUTS:
            yield keras.tree.map_structure(lambda leaf, at=slice(first, last): leaf[at], parts)

    return (generate(),)


def bare_loader():
    if BACKEND != "torch":
        pytest.skip("Keras takes the tensors of such a loader apart")
    import torch

    return torch.utils.data.DataLoader(torch.from_numpy(X), batch_size=8)


GIVEN = {
    "inputs": lambda: (X,),
    "a list": lambda: ([X, X],),
    "a tuple": lambda: ((X, X),),
    "a mapping": lambda: ({"a": X},),
    "labels": lambda: (X, Y),
    "nested labels": lambda: (X, {"a": Y, "b": [Y]}),
    "weights": lambda: (X, Y, WEIGHTS),
    "a generator of inputs": lambda: pieces(X),
    "a generator of mappings": lambda: pieces({"a": X}),
    "a loader of bare inputs": lambda: (bare_loader(),),
    "a generator of pairs": lambda: pieces(X, Y),
    "a generator of three": lambda: pieces({"a": X}, Y, WEIGHTS),
    "a PyDataset": lambda: (Batches(weights=WEIGHTS),),
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_step_is_given_what_keras_gives_it(given):
    shapes = {}

    def train(model):
        shapes.clear()
        x, y, weights = (*GIVEN[given](), None, None)[:3]
        model.fit(x, y, batch_size=16, sample_weight=weights, shuffle=False, verbose=0)
        x, y, weights = (*GIVEN[given](), None, None)[:3]
        model.evaluate(x, y, batch_size=16, sample_weight=weights, verbose=0)
        model.predict(GIVEN[given]()[0], batch_size=16, verbose=0)
        return dict(shapes)

    (one, expected), (many, found) = pair(noted(shapes), compiled(metrics=()))(train)
    assert found == expected and set(found) == {"train", "test", "predict"}
    assert_same(one, many)


def test_a_step_for_one_batch_is_given_three_parts():
    """As by Keras, whatever `train_on_batch` was given."""
    shapes = {}

    def train(model):
        shapes.clear()
        model.train_on_batch(X, Y)
        model.test_on_batch(X, Y)
        return dict(shapes)

    (one, expected), (many, found) = pair(noted(shapes), compiled(metrics=()))(train)
    assert found == expected
    assert_same(one, many)


def test_an_optimizer_in_a_loop_of_one_s_own():
    """Gradients are summed, as `apply_gradients` of TensorFlow sums them."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.5)
    variable = keras.Variable(numpy.zeros(3, "f4"))

    def step():
        gradient = keras.ops.convert_to_tensor(numpy.full(3, 1.0 + rank(), "f4"))
        optimizer.apply([gradient], [variable])

    strategy.run(step)
    total = sum(1.0 + each for each in range(ranks()))
    assert (keras.ops.convert_to_numpy(variable) == -0.5 * total).all()
    if ranks() > 1:
        with pytest.raises(RuntimeError, match="strategy.run"):
            step()
