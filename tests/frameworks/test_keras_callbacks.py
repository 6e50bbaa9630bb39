"""Callbacks of Keras on N ranks: one rank writes, all ranks decide alike, and training goes on after an end."""

from __future__ import annotations

import importlib.util
import time

import numpy
import pytest

if importlib.util.find_spec("keras") is None:
    pytest.skip("there is no Keras", allow_module_level=True)

import keras

import mpidist
from mpidist.errors import CollectiveMismatchError, RemoteReplicaError
from tests.frameworks.keras_models import (
    BOUNDS,
    X,
    Y,
    assert_alike,
    assert_histories,
    assert_same,
    compiled,
    distributed,
    folder_of_rank_0,
    functional,
    pair,
    rank,
    ranks,
    stock,
)

pytestmark = pytest.mark.mpi


@pytest.fixture
def folder(tmp_path):
    return folder_of_rank_0(tmp_path)


def everywhere(value):
    """Return what each rank has."""
    return mpidist.MultiWorkerMirroredStrategy().gather(numpy.array([value]), axis=0).tolist()


@pytest.mark.parametrize("make", [
    lambda: keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.02, restore_best_weights=True),
    lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0, factor=0.5),
    lambda: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
])  # fmt: skip
def test_decisions_are_those_of_one_process(make):
    def train(model):
        return model.fit(X, Y, batch_size=16, epochs=6, validation_data=(X, Y), callbacks=[make()], verbose=0)

    (one, expected), (many, found) = pair(functional, compiled())(train)
    assert_histories(expected, found)
    assert_same(one, many)


def test_files_are_written_by_the_chief(folder):
    written = []

    class Noting(keras.callbacks.ModelCheckpoint):
        def on_epoch_end(self, epoch, logs=None):
            written.append(epoch)
            super().on_epoch_end(epoch, logs)

    model = distributed(functional, compiled())
    callbacks = [Noting(folder / "m.keras"), keras.callbacks.CSVLogger(folder / "log.csv")]
    model.fit(X, Y, epochs=2, callbacks=callbacks, verbose=0)
    assert written == ([0, 1] if rank() == 0 else [])
    everywhere(0)
    again = keras.models.load_model(folder / "m.keras")
    numpy.testing.assert_allclose(again.predict(X, verbose=0), model.predict(X, verbose=0), **BOUNDS)
    assert len((folder / "log.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize("voter", [0, -1])
def test_an_end_that_one_rank_asks_for(voter):
    """It goes along with the next step; at the end of an epoch it is counted."""
    last = ranks() - 1 if voter else 0

    class Ending(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if rank() == last and self.steps == 2:
                self.model.stop_training = True

    ending = Ending()
    distributed(functional, compiled()).fit(X, Y, batch_size=5, epochs=2, callbacks=[ending], verbose=0)
    assert everywhere(ending.steps) == [2 if ranks() == 1 else 3] * ranks()

    class EndingLate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank() == last and epoch == 1:
                self.model.stop_training = True

    history = distributed(functional, compiled()).fit(X, Y, epochs=4, callbacks=[EndingLate()], verbose=0)
    assert everywhere(len(history.epoch)) == [2] * ranks()


def test_a_training_that_is_resumed(folder):
    class Failing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise ArithmeticError("in the third epoch")

    def fit(model, *callbacks):
        backup = keras.callbacks.BackupAndRestore(folder / "backup")
        return model.fit(X, Y, batch_size=8, epochs=4, shuffle=False, callbacks=[backup, *callbacks], verbose=0)

    with pytest.raises(ArithmeticError, match="in the third epoch"):
        fit(distributed(functional, compiled()), Failing())
    everywhere(0)
    model = distributed(functional, compiled(), seed=8)
    history = fit(model)
    assert history.epoch == [2, 3]
    one = stock(functional, compiled())
    one.fit(X, Y, batch_size=8, epochs=4, shuffle=False, verbose=0)
    assert_same(one, model)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_on_one_rank(failing):
    class Failing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if rank() == failing and batch == 1:
                raise ArithmeticError("only here")

    model = distributed(functional, compiled())
    expected = ArithmeticError if rank() == failing else RemoteReplicaError
    with pytest.raises(expected, match="only here"):
        model.fit(X, Y, batch_size=5, callbacks=[Failing()], verbose=0)
    model.fit(X, Y, batch_size=5, verbose=0)  # all are in step again
    assert_alike(model)


@pytest.mark.mpi(min_size=2)
def test_weights_that_a_callback_changes_on_one_rank():
    class Changing(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if rank() == 1:
                self.model.layers[-1].bias.assign([7.0])

    model = distributed(functional, compiled())
    with pytest.raises(CollectiveMismatchError, match="weights of a Keras model.*variable 3 bias"):
        model.fit(X, Y, callbacks=[Changing()], verbose=0)


@pytest.mark.mpi(min_size=2)
def test_a_learning_rate_of_each_rank_becomes_the_chief_s():
    model = distributed(functional, compiled())
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 * (1 + rank()))
    model.fit(X, Y, epochs=2, callbacks=[schedule], verbose=0)
    assert_alike(model)
    assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == pytest.approx(0.01)


def test_an_evaluation_inside_of_fit():
    losses = []

    class Evaluating(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            losses.append((logs["val_loss"], self.model.evaluate(X, Y, batch_size=45, verbose=0)[0]))

    model = distributed(functional, compiled())
    model.fit(X, Y, epochs=2, validation_data=(X, Y), callbacks=[Evaluating()], verbose=0)
    for validation, evaluation in losses:
        assert evaluation == pytest.approx(validation, rel=1e-5)


def test_only_the_chief_shows_progress(capfd):
    model = distributed(functional, compiled())
    model.fit(X, Y, verbose=1)
    time.sleep(0)
    assert ("loss" in capfd.readouterr().out) == (rank() == 0)


def test_a_callback_of_a_trainer_is_refused_with_what_to_do(folder):
    if ranks() == 1:
        pytest.skip("one rank has a plain model")
    model = distributed(functional, compiled())
    with pytest.raises(TypeError, match=r"callback Report is for mpidist.Trainer.*begin, note and end"):
        model.fit(X, Y, batch_size=16, verbose=0, callbacks=[mpidist.callbacks.Report(folder)])


@pytest.mark.parametrize("first", [2, 3])
def test_callbacks_of_a_trainer_that_is_resumed_remember_the_epochs_before(folder, first):
    """No loss is better than the first: the rate is halved after two more epochs, and the fourth is the last."""

    def fitted(epochs):
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            variable, optimizer = mpidist.Variable(numpy.ones(2)), mpidist.optimizers.SGD(0.25)
        stopping = keras.callbacks.EarlyStopping("loss", patience=3, mode="min")
        plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, mode="min", min_delta=0.0)
        saving = mpidist.callbacks.ModelCheckpoint(folder, "loss", resume=True)
        trainer = mpidist.Trainer(lambda w, x: (1.0, 0 * w), variable, optimizer)
        trainer.fit(numpy.zeros((6, 2)), batch_size=3, epochs=epochs, callbacks=[stopping, plateau, saving], verbose=0)
        return trainer.epoch, stopping.stopped_epoch, stopping.best_epoch, optimizer.learning_rate

    assert fitted(first)[:2] == (first, 0)
    assert fitted(9) == (4, 3, 0, 0.125)
