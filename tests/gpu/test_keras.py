"""Keras models whose variables lie on a GPU; on the host with ``MPIDIST_TEST_ON=numpy``.

The law: ranks together do what one process does on the global batch.  That process is `Alone`, in NumPy's float64.
"""

from __future__ import annotations

import importlib.util
import os

import numpy
import pytest

from tests.gpu import library

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)
if library.is_numpy():  # before Keras is loaded
    os.environ |= {"KERAS_TORCH_DEVICE": "cpu", "JAX_PLATFORMS": "cpu"}

from tests.frameworks.keras_models import BACKEND, X, Y, compiled, distributed, sequential  # noqa: E402

if importlib.util.find_spec(BACKEND) is None:
    pytest.skip(f"there is no {BACKEND}", allow_module_level=True)

import keras  # noqa: E402

import mpidist  # noqa: E402
from mpidist.cluster.devices import gpu_of_name  # noqa: E402
from mpidist.frameworks.keras import backends  # noqa: E402
from tests.gpu.library import check_on_all_ranks, place, strategy  # noqa: E402

if BACKEND == "jax":
    import jax
else:
    import torch

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]

#: Of float32 against float64.
BOUNDS = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def gpu():
    """The number of this rank's GPU, where everything has to lie; None for the host, if NumPy is asked for."""
    library.require()
    number = None if library.is_numpy() else gpu_of_name(strategy().extended.device_name)
    has_gpu = torch.cuda.is_available() if BACKEND == "torch" else jax.default_backend() == "gpu"
    if not library.is_numpy() and (number is None or not has_gpu):
        pytest.skip(f"Keras on {BACKEND} sees no GPU")
    if BACKEND == "torch":
        yield number
        return
    with jax.default_matmul_precision("highest"):  # a GPU's own choice has 10 bits
        yield number


@pytest.fixture
def reduced(monkeypatch):
    """The places of all that is reduced in the test."""
    seam, found = backends.seam(), set()
    over_replicas = seam.over_replicas

    def noted(replica, op, tensors, *notes):
        found.update(seam.places_of(tensors))
        return over_replicas(replica, op, tensors, *notes)

    monkeypatch.setattr(seam, "over_replicas", noted)
    return found


def problem_of(name, found, expected):
    """Return what is wrong with numbers; empty if nothing is."""
    found = numpy.asarray(found)
    if numpy.shape(expected) == found.shape and numpy.allclose(found, expected, **BOUNDS):
        return ""
    return f"{name}: {found.reshape(-1)[:3]} in place of {numpy.reshape(expected, -1)[:3]}; "


def problem_of_places(gpu, model, reduced=None):
    """Return what is wrong with where a model and its optimizer lie, and what was reduced of them."""
    variables = {id(each): each for each in (*model.variables, *model.optimizer.variables)}.values()
    places = backends.seam().places_of([each.value for each in variables])
    if reduced is not None and place()[1] > 1:
        places = [*places, *(reduced or ["nothing was reduced"])]
    elsewhere = [each for each in places if each[1:] != (gpu is None, gpu)]
    return f"lie on {elsewhere}; " if elsewhere else ""


def problem_of_weights(model, expected):
    """Return what is wrong with a model's weights, which must have the same bits on all ranks."""
    found = model.get_weights()
    told = [problem_of(f"weight {at}", *pair) for at, pair in enumerate(zip(found, expected, strict=True))]
    is_same = len(set(mpidist.all_gather_object(b"".join(each.tobytes() for each in found)))) == 1
    return "".join(told) + ("" if is_same else "ranks have other bits")


class Alone:
    """The `sequential` model in one process: its weights, and its optimizer by name."""

    def __init__(self, model, name):
        self.weights = [each.astype("f8") for each in model.get_weights()]
        self._update = {"sgd": self._sgd, "adam": self._adam}[name]
        self._slots = [[numpy.zeros_like(each) for each in self.weights] for _ in "mv"]
        self._steps = 0

    def fit(self, batch_size, epochs):
        """Train on all rows in their order; return the mean losses, and absolute errors, of the epochs."""
        history = []
        for _ in range(epochs):
            told = []
            for first in range(0, len(X), batch_size):
                x, y = (each[first : first + batch_size].astype("f8") for each in (X, Y))
                hidden, error = self.outputs(x)
                error = error - y
                told.append((len(x), (error**2).mean(), abs(error).mean()))
                self._steps += 1
                self._update(self._gradients(x, hidden, 2 * error / len(x)))
            rows, losses, errors = map(numpy.array, zip(*told, strict=True))
            history.append((rows @ losses / len(X), rows @ errors / len(X)))
        return numpy.array(history)

    def outputs(self, x):
        """Return what both layers make of rows."""
        kernel, bias, last_kernel, last_bias = self.weights
        hidden = numpy.tanh(x @ kernel + bias)
        return hidden, hidden @ last_kernel + last_bias

    def _gradients(self, x, hidden, of_output):
        of_hidden = of_output @ self.weights[2].T * (1 - hidden**2)
        return [x.T @ of_hidden, of_hidden.sum(0), hidden.T @ of_output, of_output.sum(0)]

    def _sgd(self, gradients):
        for weight, gradient, velocity in zip(self.weights, gradients, self._slots[0], strict=True):
            velocity *= 0.9
            velocity -= 0.05 * gradient
            weight += velocity

    def _adam(self, gradients):
        rate = 0.02 * (1 - 0.999**self._steps) ** 0.5 / (1 - 0.9**self._steps)
        for weight, gradient, mean, square in zip(self.weights, gradients, *self._slots, strict=True):
            mean += 0.1 * (gradient - mean)
            square += 0.001 * (gradient**2 - square)
            weight -= rate * mean / (square**0.5 + 1e-7)


OPTIMIZERS = {"sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9), "adam": lambda: keras.optimizers.Adam(0.02)}


def made(name, over=None):
    """Return a distributed model, and one that is trained alone from the same weights."""
    model = distributed(sequential, compiled(optimizer=OPTIMIZERS[name], metrics=["mae"]), strategy=over)
    return model, Alone(model, name)


def fit(model, batch_size, epochs, **settings):
    """Train as `Alone` does; return its losses and absolute errors by epoch."""
    history = model.fit(X, Y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, **settings).history
    return numpy.stack([history["loss"], history["mae"]], axis=1)


@pytest.mark.parametrize("name, batch_size", [("sgd", 12), ("adam", 4)])
def test_ranks_train_to_the_numbers_of_one_process(gpu, reduced, name, batch_size):
    """Of 45 rows: the last batch has 9; or 1, so that other ranks have none."""
    model, alone = made(name)
    problem = problem_of("history", fit(model, batch_size, 2), alone.fit(batch_size, 2))
    check_on_all_ranks(problem + problem_of_weights(model, alone.weights) + problem_of_places(gpu, model, reduced))


def test_central_storage_has_a_copy_on_each_gpu(gpu, reduced):
    model, alone = made("sgd", mpidist.CentralStorageStrategy())
    problem = problem_of("history", fit(model, 12, 1), alone.fit(12, 1))
    check_on_all_ranks(problem + problem_of_weights(model, alone.weights) + problem_of_places(gpu, model, reduced))


def test_validation_evaluation_and_prediction(gpu):
    """Between the epochs of a training, and behind it; on JAX batches wait in line for a GPU."""
    model, alone = made("adam")
    history = model.fit(X, Y, batch_size=12, epochs=2, validation_data=(X, Y), validation_batch_size=8, verbose=0)
    alone.weights = [each.astype("f8") for each in model.get_weights()]
    outputs = alone.outputs(X.astype("f8"))[1]
    expected = ((outputs - Y) ** 2).mean(), abs(outputs - Y).mean()
    problem = problem_of("validation", [history.history[f"val_{each}"][-1] for each in ("loss", "mae")], expected)
    problem += problem_of("evaluation", model.evaluate(X, Y, batch_size=10, verbose=0), expected)
    problem += problem_of("prediction", model.predict(X, batch_size=10, verbose=0), outputs)
    problem += problem_of("one batch", model.test_on_batch(X, Y), expected)
    check_on_all_ranks(problem + problem_of_places(gpu, model))


def test_metrics_that_count_rows():
    """Precision and recall are quotients of counts over all ranks, and no means of the ranks' quotients."""
    names = ("precision", "recall", "accuracy")

    def compile_fn(model):
        metrics = [
            keras.metrics.Precision(0.4),
            keras.metrics.Recall(0.4),
            keras.metrics.BinaryAccuracy("accuracy", threshold=0.4),
        ]
        model.compile("sgd", "mse", metrics=metrics)

    model = distributed(sequential, compile_fn)
    outputs = Alone(model, "sgd").outputs(X.astype("f8"))[1]
    clear = abs(outputs[:, 0] - 0.4) > 1e-3
    x, is_true, is_found = X[clear], Y[clear] > 0, outputs[clear] > 0.4
    right = (is_true & is_found).sum()
    expected = right / is_found.sum(), right / is_true.sum(), (is_true == is_found).mean()
    found = model.evaluate(x, is_true.astype("f4"), batch_size=10, return_dict=True, verbose=0)
    assert 0 < right < min(is_found.sum(), is_true.sum())
    check_on_all_ranks(problem_of(names, [found[each] for each in names], expected))


def test_a_saved_training_goes_on(gpu, directory):
    """With the state of Adam, from the file of rank 0."""
    model, alone = made("adam")
    fit(model, 12, 2, callbacks=[keras.callbacks.ModelCheckpoint(directory / "{epoch}.keras")])
    mpidist.all_gather_object("written")
    with strategy().scope():
        again = keras.models.load_model(directory / "2.keras")
    problem = problem_of_weights(again, model.get_weights())
    problem += problem_of("history", fit(again, 12, 2), alone.fit(12, 4)[2:])
    check_on_all_ranks(problem + problem_of_weights(again, alone.weights) + problem_of_places(gpu, again))


def test_moving_averages_of_batch_normalization(gpu, reduced):
    """Means are those of all rows; variances those within the parts of the ranks."""
    rows = numpy.arange(72, dtype="f4").reshape(24, 3) ** 2 / 500

    def make():
        return keras.Sequential(
            [keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
        )

    model = distributed(make, compiled(metrics=()))
    model.fit(rows, rows[:, :1], batch_size=24, shuffle=False, verbose=0)
    mean, variance = (keras.ops.convert_to_numpy(each) for each in model.layers[0].non_trainable_variables)
    within = rows.astype("f8").reshape(place()[1], -1, 3).var(axis=1).mean(axis=0)
    problem = problem_of("mean", mean, 0.5 * rows.mean(axis=0)) + problem_of("variance", variance, 0.5 + 0.5 * within)
    check_on_all_ranks(problem + problem_of_places(gpu, model, reduced))


# -- places that are mixed ---------------------------------------------------------------------------------------------


def elsewhere(value):
    """Return a tensor of another device, and the name of this."""
    if BACKEND == "jax":
        moved = jax.device_put(value, jax.devices("cpu")[0])
        return moved, str(jax.devices("cpu")[0])
    name = "meta" if library.is_numpy() else "cpu"  # where nothing is computed
    return value.to(name), name


@pytest.mark.mpi(min_size=2)
@pytest.mark.gpu(only=BACKEND == "jax")
def test_gradients_on_two_devices_are_refused_with_the_names(gpu):
    with strategy().scope():
        variables = [keras.Variable(numpy.zeros(3, "f4")) for _ in "ab"]
        optimizer = keras.optimizers.SGD(0.5)
        gradients = [keras.ops.ones(3) * (place()[0] + 1.0) for _ in "ab"]
    strategy().run(lambda: optimizer.apply(gradients, variables))
    size = place()[1]
    found = [keras.ops.convert_to_numpy(each) for each in variables]
    check_on_all_ranks(problem_of("sums", found, numpy.full((2, 3), -0.25 * size * (size + 1))))
    moved, name = elsewhere(gradients[1])
    (own,) = backends.seam().places_of(gradients)
    with pytest.raises(NotImplementedError, match=f"lie on {', '.join(sorted([own.name, name]))};"):
        strategy().run(lambda: optimizer.apply([gradients[0], moved], variables))


@pytest.mark.mpi(min_size=2)
def test_a_layer_of_the_host_is_refused_before_it_trains_on_pytorch(gpu):
    """JAX moves what the chief gives all ranks; on the host all lie together."""
    with strategy().scope():
        with keras.device("cpu"):
            hidden = keras.layers.Dense(6, activation="tanh")
            hidden.build((None, 3))
        model = keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(1)])
    compiled(optimizer=OPTIMIZERS["sgd"], metrics=["mae"])(model)
    alone, told, problem = Alone(model, "sgd"), "", ""
    try:
        fit(model, 12, 1)
        alone.fit(12, 1)
        problem = problem_of_places(gpu, model)
    except NotImplementedError as error:
        told = str(error)
    assert len(set(mpidist.all_gather_object(bool(told)))) == 1
    assert bool(told) == (gpu is not None and BACKEND == "torch")
    assert not told or "cpu" in told.lower() and f"cuda:{gpu};" in told, told
    check_on_all_ranks(problem + problem_of_weights(model, alone.weights))
