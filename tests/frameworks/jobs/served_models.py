"""Jobs in which servers hold the variables of Keras models: ``served_models.py NAME FOLDER`` on each rank."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import keras
import numpy

import mpidist
from mpidist.parameter_server.consistency import BackupWorkers

X = numpy.random.default_rng(0).normal(size=(48, 4)).astype("float32")
Y = numpy.tanh(X.sum(axis=1, keepdims=True))
WEIGHTS = numpy.linspace(0.5, 1.5, len(X), dtype="float32")
BOUNDS = {"rtol": 2e-4, "atol": 2e-5}


def plain():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])


def with_state():
    """Dropout draws from a seed, and moving averages are no weights."""
    inputs = keras.Input((4,))
    hidden = keras.layers.BatchNormalization()(keras.layers.Dense(8, activation="tanh")(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.2, seed=7)(hidden)))


class Deferred(keras.Model):
    """Is built by the first batch, and has a step of its own."""

    def __init__(self):
        super().__init__()
        self.last = keras.layers.Dense(1)

    def call(self, inputs):
        return self.last(keras.ops.tanh(inputs))


class Peak(keras.metrics.Metric):
    """The greatest output of an epoch: not the sum of those of its batches."""

    def __init__(self, name="peak", dtype=None, aggregation="sum"):
        super().__init__(name=name, dtype=dtype)
        self.most = self.add_variable((), "zeros", aggregation=aggregation, name="most")

    def update_state(self, y, outputs, sample_weight=None):
        self.most.assign(keras.ops.maximum(self.most, keras.ops.max(outputs)))

    def result(self):
        return self.most + 0.0


def compiled(make, optimizer, own=(Peak,)):
    keras.utils.set_random_seed(5)
    model = make()
    metrics = ["mae", keras.metrics.RootMeanSquaredError(), *(each() for each in own)]
    model.compile(optimizer=optimizer, loss="mse", metrics=metrics)
    return model


class MeanPeak(Peak):
    """The mean of the greatest outputs of several workers."""

    def __init__(self, **settings):
        super().__init__(aggregation="mean", **settings)


class Begun(keras.metrics.Sum):
    """Begins with 1."""

    def reset_state(self):
        self.total.assign(1.0)

    def update_state(self, y, outputs, sample_weight=None):
        super().update_state(y)


class Renaming(Deferred):
    """Returns the results of metrics by names of its own, and looks at the steps and the rate of its optimizer."""

    def train_step(self, *given):
        found = super().train_step(*given)
        logs, *state = found if isinstance(found, tuple) else (found,)
        is_torch = keras.backend.backend() == "torch"  # with JAX, optimizers have no values in a step
        seen = self.optimizer.iterations, self.optimizer.learning_rate
        steps, rate = [keras.ops.convert_to_tensor(each) + 0 for each in seen] if is_torch else [logs["loss"]] * 2
        logs = {"parts": {"d_loss": logs["loss"]}, "steps": steps, "rate": rate}
        return (logs, *state) if state else logs


class Twins(keras.layers.Layer):
    """Two weights have one path."""

    def build(self, shape):
        self.one, self.other = (self.add_weight(shape=(shape[-1], 1), name="w", initializer="ones") for _ in range(2))

    def call(self, inputs):
        return inputs @ self.one + 2 * (inputs @ self.other)


def within_bounds():
    return keras.Sequential([keras.Input(X.shape[1:]), keras.layers.Dense(1, kernel_constraint="non_neg")])


def twins():
    return keras.Sequential([keras.Input((4,)), Twins()])


def normed():
    """A layer that assigns weights which are trained, with PyTorch."""
    inner = keras.layers.SpectralNormalization(keras.layers.Dense(8, activation="tanh"))
    return keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(1)])


class Warm(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that Keras cannot find by its name."""

    def __call__(self, step):
        return 0.1 * keras.ops.minimum(1.0, keras.ops.cast(step + 1, "float32") / 9.0)


def accumulating(rate):
    return keras.optimizers.SGD(rate, momentum=0.9, gradient_accumulation_steps=3)


COOLING = keras.callbacks.LearningRateScheduler(lambda epoch: 0.05 / (1 + epoch))

CASES = [
    (plain, lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.5), {"validation_split": 0.25}),
    (plain, lambda: keras.optimizers.RMSprop(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5)), {}),
    (with_state, lambda: "adam", {"sample_weight": WEIGHTS, "validation_data": (X, Y)}),
    (Deferred, lambda: keras.optimizers.AdamW(0.01), {"steps_per_epoch": 4, "validation_split": 0.25}),
    (plain, lambda: keras.optimizers.Adagrad(0.05), {"shuffle": True}),
    (plain, lambda: keras.optimizers.Ftrl(0.05, l1_regularization_strength=0.001), {"shuffle": True}),
    (Renaming, lambda: keras.optimizers.SGD(0.05), {"callbacks": [COOLING]}),
    (twins, lambda: keras.optimizers.SGD(0.01, momentum=0.9), {}),
    (normed, lambda: accumulating(Warm()), {}),
    (plain, lambda: accumulating(0.05), {}),
]


def assert_alike(model, expected):
    for ours, theirs in zip(model.variables, expected.variables, strict=True):
        ours, theirs = map(keras.ops.convert_to_numpy, (ours, theirs))
        numpy.testing.assert_allclose(ours, theirs, err_msg=str(theirs), **BOUNDS)
    for ours, theirs in zip(model.optimizer.variables, expected.optimizer.variables, strict=True):
        ours, theirs = map(keras.ops.convert_to_numpy, (ours, theirs))
        numpy.testing.assert_allclose(ours, theirs, err_msg=str(theirs), **BOUNDS)


def fitted(model, options, batch_size=8):
    keras.utils.set_random_seed(6)
    return model.fit(X, Y, batch_size=batch_size, epochs=2, verbose=0, **{"shuffle": False, **options}).history


def alone(folder):
    """One worker computes what one process computes: history, weights, and what the optimizer keeps."""
    strategy = mpidist.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        models = [compiled(make, optimizer()) for make, optimizer, _ in CASES]
        others = [compiled(plain, "adam") for _ in ACTS]
        bounded = compiled(within_bounds, "sgd")
    refused(lambda: bounded.fit(X, Y), NotImplementedError, "kernel' has a constraint")
    for model, (make, optimizer, options) in zip(models, CASES, strict=True):
        history = fitted(model, options)
        expected = compiled(make, optimizer())
        for name, values in fitted(expected, options).items():
            numpy.testing.assert_allclose(history[name], values, err_msg=name, **BOUNDS)
        if make is not with_state:  # whose worker draws the numbers of dropout
            assert_alike(model, expected)
        loss = model.train_on_batch(X, Y)[0]
        numpy.testing.assert_allclose(loss, expected.train_on_batch(X, Y)[0], **BOUNDS)
    for act, other in zip(ACTS, others, strict=True):
        expected = compiled(plain, "adam")
        numpy.testing.assert_allclose(act(other), act(expected), err_msg=act.__name__, **BOUNDS)
        assert_alike(other, expected)
    frozen_state(models[2])
    model = models[4]
    model.save(folder / "model.keras")
    assert b"mpidist" not in zipfile.ZipFile(folder / "model.keras").read("config.json")
    again = keras.saving.load_model(folder / "model.keras", {"Peak": Peak})
    assert type(again) is keras.Sequential
    assert_alike(again, model)
    found = loaded_without_mpidist(folder / "model.keras")
    for ours, theirs in zip(found, [*model.variables, *model.optimizer.variables], strict=True):
        numpy.testing.assert_array_equal(ours, keras.ops.convert_to_numpy(theirs))
    goes_on(strategy, model, again)


#: Has the arguments of a file to load, and of one for what it has: variables, and the optimizer's.
LOADING = f"""
import sys

sys.modules["mpidist"] = None
import keras
import numpy

{inspect.getsource(Peak)}

model = keras.saving.load_model(sys.argv[1], {{"Peak": Peak}})
assert type(model) is keras.Sequential and type(model.optimizer).__module__.startswith("keras.")
numpy.savez(sys.argv[2], *map(keras.ops.convert_to_numpy, [*model.variables, *model.optimizer.variables]))
assert not [name for name in sys.modules if name.startswith("mpidist.")]
"""


def loaded_without_mpidist(path):
    """Return what a process that has no mpidist finds in a file."""
    found = path.with_suffix(".npz")
    subprocess.run([sys.executable, "-c", LOADING, path, found], check=True, timeout=120)
    with numpy.load(found) as content:
        return [*content.values()]


class Watching(keras.callbacks.Callback):
    """Reads and writes the model between two batches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.iterations))

    def on_train_batch_end(self, batch, logs=None):
        self.seen += [logs["loss"], logs["peak"], float(self.model.get_weights()[0].sum())]
        self.model.set_weights([each.clip(-0.4, 0.4) for each in self.model.get_weights()])
        self.model.optimizer.learning_rate = 0.001 * len(self.seen)

    def on_epoch_end(self, epoch, logs=None):
        self.model.layers[0].trainable = keras.backend.backend() == "jax"  # which does not take that without `compile`

    def on_test_batch_end(self, batch, logs=None):
        self.seen.append(logs["loss"])


def watched(model):
    callback = Watching()
    fitted(model, {"callbacks": [callback], "validation_data": (X, Y)})
    return callback.seen


class Stopping(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            raise KeyboardInterrupt


def interrupted(model):
    """The model is as it was when the training was interrupted, and goes on from there."""
    try:
        fitted(model, {"callbacks": [Stopping()]})
    except KeyboardInterrupt:
        steps = float(model.optimizer.iterations)
    return [steps, *(each.sum() for each in model.get_weights()), *fitted(model, {})["loss"]]


def cubes(y, outputs):
    return keras.ops.mean(keras.ops.abs(y - outputs) ** 3)


def changed(model):
    """What is changed between two trainings, counts: slots, a setting of the optimizer, a loss with the same one."""
    found = fitted(model, {"class_weight": {0: 1.0, 1: 3.0}})["loss"]
    for each in model.optimizer.variables[2:]:
        each.assign(keras.ops.zeros(each.shape))
    model.optimizer.clipnorm = 0.01
    found += fitted(model, {})["loss"]
    model.compile(model.optimizer, cubes, metrics=[Peak(), cubes])
    found += fitted(model, {})["peak"]
    return found


def batches():
    for number in range(100):
        yield X[number % 40 :][:8], Y[number % 40 :][:8]


class Growing(keras.utils.PyDataset):
    """Counts what it is told of epochs."""

    scale = 1.0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.scale * X[8 * index :][:8], Y[8 * index :][:8]

    def on_epoch_end(self):
        self.scale += 0.1


def generated(model):
    given = {"validation_data": batches(), "validation_steps": 3, "epochs": 3, "verbose": 0}
    return model.fit(Growing(), shuffle=False, **given).history["val_loss"]


def evaluated(model):
    """An evaluation builds metrics on the chief, and not on workers."""
    return [model.evaluate(X, Y, verbose=0)[0], *fitted(model, {})["loss"]]


class Summary:
    """Takes down what `keras.callbacks.TensorBoard` gives to TensorFlow."""

    def __init__(self):
        self.scalars = []

    def create_file_writer(self, path):
        return self

    def as_default(self, step=None):
        return contextlib.nullcontext()

    def record_if(self, condition):
        return contextlib.nullcontext()

    def scalar(self, name, value, step):
        self.scalars.append((name, float(value), int(step)))

    def close(self):
        pass


def boarded(model):
    """What TensorBoard shows of batches, epochs and evaluations."""
    board = keras.callbacks.TensorBoard(write_graph=False, update_freq=2)
    board._summary_module = Summary()
    fitted(model, {"callbacks": [board], "validation_data": (X, Y)})
    return [part for _, *parts in sorted(board._summary_module.scalars) for part in parts]


ACTS = [watched, interrupted, changed, generated, evaluated, boarded]


def frozen_state(model):
    """A layer that is frozen on the chief computes on workers as a frozen one: its moving averages stay."""
    model.layers[2].trainable = False
    model.compile("sgd", "mse")
    before = [each.copy() for each in model.layers[2].get_weights()]
    fitted(model, {})
    for ours, theirs in zip(model.layers[2].get_weights(), before, strict=True):
        assert (ours == theirs).all()


def goes_on(strategy, model, again):
    """The next fit goes on from weights that were loaded, a learning rate that was set, a layer that is frozen."""
    model.set_weights([numpy.zeros_like(each) for each in model.get_weights()])
    model.optimizer.learning_rate = 0.5
    again.set_weights(model.get_weights())
    again.optimizer.learning_rate = 0.5
    fitted(model, {}), fitted(again, {})
    assert_alike(model, again)
    for each in (model, again):
        each.layers[0].trainable = False
        each.compile("sgd", "mse")
    before = model.layers[0].get_weights()[0].copy()
    fitted(model, {}), fitted(again, {})
    assert_alike(model, again)
    assert (model.layers[0].get_weights()[0] == before).all()


def datasets(context):
    """Return the batches of a worker, without an end."""
    assert context.num_input_pipelines == 2
    return mpidist.data.Dataset.from_arrays((X, Y)).shard(2, context.input_pipeline_id).batch(8).repeat()


def short(context):
    return mpidist.data.Dataset.from_arrays((X, Y)).batch(24)


def counting():
    """A layer counts rows, and another one keeps an average."""
    return keras.Sequential([keras.Input((4,)), Counting(), keras.layers.Dense(1)])


class Counting(keras.layers.Layer):
    def build(self, shape):
        self.rows, self.mean, self.calls = (
            self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation=each, name=each)
            for each in ("sum", "mean", "only_first_replica")
        )

    def call(self, inputs, training=False):
        if training:
            self.rows.assign_add(keras.ops.cast(keras.ops.shape(inputs)[0], "float32"))
            self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(inputs))
            self.calls.assign_add(1.0)
        return inputs


class Assigning(Counting):
    """Whether it adds is not known."""

    def call(self, inputs, training=False):
        if training:
            self.rows.assign(self.rows * 2)
        return inputs


class Unsaid(keras.layers.Layer):
    """What becomes of the counts of several workers is not said."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
        return inputs


TOGETHER = [
    (plain, lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1), {"shuffle": True}),
    (plain, lambda: "adam", {"sample_weight": WEIGHTS, "validation_split": 0.25}),
    (Deferred, lambda: accumulating(0.05), {}),
    (counting, lambda: keras.optimizers.SGD(0.05), {}),
    (normed, lambda: keras.optimizers.RMSprop(0.01), {}),
]


def greatest(y, outputs):
    return keras.ops.max(keras.ops.abs(y - outputs), axis=0)


def together(folder):
    """A step of three batches is one of a batch three times as large, whoever computes them; the last has fewer."""
    strategy = mpidist.ParameterServerStrategy(num_ps=1, consistency=BackupWorkers(3))
    with strategy.scope():
        models = [compiled(make, optimizer(), own=()) for make, optimizer, _ in TOGETHER]
        peaks = compiled(plain, "sgd")
        summed, scalar, number, by_column, spread = plain(), plain(), plain(), plain(), plain()
        by_column.compile("sgd", greatest)
        spread.compile("sgd", "mse", metrics=["poisson"])
        number.compile("sgd", "mse", metrics=[cubes])
        summed.compile("sgd", keras.losses.MeanSquaredError("sum"))
        scalar.compile("sgd", cubes)
        assigning = keras.Sequential([keras.Input((4,)), Assigning(), keras.layers.Dense(1)])
        assigning.compile("sgd", "mse")
        unsaid = keras.Sequential([keras.Input((4,)), Unsaid(), keras.layers.Dense(1)])
        unsaid.compile("sgd", "mse")
    refused(lambda: summed.fit(X, Y), NotImplementedError, "no mean over rows")
    refused(lambda: summed.fit(datasets, steps_per_epoch=4), NotImplementedError, "no next ones")
    for model, (make, optimizer, options) in zip(models, TOGETHER, strict=True):
        history = fitted(model, options, 7)
        expected = compiled(make, optimizer(), own=())
        for name, values in fitted(expected, options, 21).items():
            numpy.testing.assert_allclose(history[name], values, err_msg=name, **BOUNDS)
        assert_alike(model, expected)
    refused(lambda: peaks.fit(X, Y, verbose=0), NotImplementedError, "more than add to its variable 'peak/most'")
    refused(lambda: scalar.fit(X, Y, verbose=0), NotImplementedError, "one number for all rows")
    refused(lambda: number.fit(X, Y, verbose=0), ValueError, "return a value for each row")
    refused(lambda: by_column.fit(X, Y, verbose=0), ValueError, "'greatest' returned values of shape (1,)")
    refused(lambda: spread.fit(X, Y[:, 0], verbose=0), ValueError, "'poisson' returned values of shape")
    refused(lambda: assigning.fit(X, Y, verbose=0), NotImplementedError, "of which it is not known how much it adds")
    before = unsaid.get_weights()
    refused(lambda: unsaid.fit(X, Y, verbose=0), NotImplementedError, "its value over all replicas")
    for value, expected in zip(unsaid.get_weights(), before, strict=True):  # servers have no half of a step
        numpy.testing.assert_array_equal(value, expected)


class Odd(Deferred):
    """Applies gradients by an optimizer of its own."""

    def train_step(self, *given):
        optimizer, self.optimizer = self.optimizer, self.other
        try:
            return super().train_step(*given)
        finally:
            self.optimizer = optimizer


class Fitting(Deferred):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


class Wrong(keras.layers.Layer):
    def call(self, inputs, training=False):
        if training:
            raise OverflowError("of the user's")
        return inputs


def workers(folder):
    """Workers that do not wait for each other: data sets of their own, callbacks, errors."""
    strategy = mpidist.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        model = compiled(plain, keras.optimizers.SGD(0.05), own=(MeanPeak,))
        peaks, begun = compiled(plain, "sgd"), compiled(plain, "sgd", own=(Begun,))
        wrong = keras.Sequential([keras.Input((4,)), Wrong(), keras.layers.Dense(1)])
        wrong.compile("sgd", "mse", run_eagerly=True)
        adamax = compiled(plain, keras.optimizers.Adamax())
        odd, fitting = (compiled(make, "sgd", own=()) for make in (Odd, Fitting))
        odd.other = keras.optimizers.Adam()
    refused(lambda: model.fit(datasets), ValueError, "steps_per_epoch")
    refused(lambda: adamax.fit(X, Y), NotImplementedError, "Adamax")
    refused(lambda: fitting.fit(X, Y), NotImplementedError, "a fit of its own")
    refused(lambda: plain().fit(X, Y), ValueError, "compile")
    seen, best = [], folder / "best.keras"
    callbacks = [
        keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append((batch, sorted(logs)))),
        keras.callbacks.ModelCheckpoint(best, monitor="val_loss", save_best_only=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate if epoch < 5 else 0.0),
    ]
    history = model.fit(
        datasets, epochs=6, steps_per_epoch=10, callbacks=callbacks, validation_data=(X, Y), verbose=0
    ).history
    assert seen == [
        (batch, ["loss", "mae", "peak", "root_mean_squared_error"]) for _ in range(6) for batch in range(10)
    ]
    assert history["val_loss"][-1] == history["val_loss"][-2] < history["val_loss"][0]
    assert history["learning_rate"][-1] == 0.0 and int(model.optimizer.iterations) == 60
    kept = keras.saving.load_model(best, {"MeanPeak": MeanPeak})
    numpy.testing.assert_allclose(kept.predict(X, verbose=0), model.predict(X, verbose=0), **BOUNDS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(model.fit(short, epochs=3, steps_per_epoch=20, verbose=0).epoch) == 1
    assert any("the data ended after" in str(each.message) for each in caught), [str(each.message) for each in caught]
    try:
        wrong.fit(X, Y, verbose=0)
    except OverflowError as error:
        assert "of the user's" in str(error)
    else:
        raise AssertionError("an error of a layer was lost")
    refused(lambda: peaks.fit(X, Y, verbose=0), NotImplementedError, "more than add to its variable 'peak/most'")
    refused(lambda: begun.fit(X, Y, verbose=0), NotImplementedError, "would count 2 times")
    refused(lambda: odd.fit(X, Y, verbose=0), NotImplementedError, "not compiled with")
    with strategy.scope():
        late = compiled(plain, "sgd")
    refused(lambda: late.fit(X, Y, verbose=0), RuntimeError, "above the first fit")
    losses = []
    shown = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: losses.append(logs["loss"]))
    assert model.fit(X, Y, batch_size=8, callbacks=[shown], verbose=0).history["loss"] == losses[-1:]
    model.fit(X, Y, verbose=0)


class Dying(keras.layers.Layer):
    """Ends the second worker in its first step, or in one after `steps` others."""

    steps = 0

    def call(self, inputs, training=False):
        if training and mpidist.parameter_server.coordinator.values.on_worker.index == 1:
            if self.steps == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.steps -= 1
        return inputs


def output(y, outputs):
    return keras.ops.mean(outputs)


def counts_of_batches(steps):
    """Return how often each of six batches counted in three epochs, where the second worker died after so many steps.

    Batch b has ones in column b, and its loss is its mean output: by a rate of 1 its gradient takes 1 from weight b.
    """
    strategy = mpidist.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        last = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((6,)), Dying(), last])
        model.layers[0].steps = steps
        model.compile(keras.optimizers.SGD(1.0), output, run_eagerly=True)
    x = numpy.repeat(numpy.eye(6, dtype="float32"), 8, axis=0)
    history = model.fit(x, x[:, :1], batch_size=8, epochs=3, shuffle=False, verbose=0)
    assert len(history.epoch) == 3
    (weights,) = model.get_weights()
    assert int(model.optimizer.iterations) == -weights.sum()
    return -weights[:, 0]


def killed(folder):
    """Another worker computes the batch of one that is killed before it has pushed: each batch counts once an epoch."""
    numpy.testing.assert_array_equal(counts_of_batches(0), [3] * 6)


def killed_later(folder):
    """Of the batches that a worker has pushed, those whose results the chief lacks count twice in that epoch."""
    counts = counts_of_batches(3)
    assert {*counts} <= {3.0, 4.0} and counts.sum() <= 18 + 3, counts


def killed_together(folder):
    """Another worker computes the batch of one that is killed, and the numbers are those of one process."""
    strategy = mpidist.ParameterServerStrategy(num_ps=1, consistency=BackupWorkers(3))
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), Dying(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=True)
    expected = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    expected.compile(keras.optimizers.SGD(0.05), "mse")
    expected.set_weights(model.get_weights())
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    expected.fit(X, Y, batch_size=24, epochs=2, shuffle=False, verbose=0)
    assert_alike(model, expected)


def beside(folder):
    """An evaluator has the results of each epoch, from the file that was saved at its end."""
    strategy = mpidist.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        model = compiled(plain, keras.optimizers.SGD(0.05))
    if strategy.cluster_resolver.task_type == "evaluator":
        results = mpidist.SidecarEvaluator(model, (X, Y), folder, poll_seconds=0.05).start()
        numpy.save(folder / "losses.npy", [result.logs["loss"] for result in results])
        return
    saved = keras.callbacks.ModelCheckpoint(folder / "epoch-{epoch}.keras")
    history = model.fit(X, Y, batch_size=8, epochs=12, validation_data=(X, Y), callbacks=[saved], verbose=0).history
    numpy.save(folder / "expected.npy", history["val_loss"])


def restoring(folder):
    strategy = mpidist.ParameterServerStrategy(num_ps=1, on_server_failure="restore")
    with strategy.scope():
        model = compiled(plain, "sgd")
    refused(lambda: model.fit(X, Y, verbose=0), NotImplementedError, "BackupAndRestore")


def refused(call, kind, text):
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
    print("done")
