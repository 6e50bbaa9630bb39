"""Callbacks of Keras in a `Trainer`, by classes that look like them."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.testing import run_ranks


class Callback:
    """As the base of Keras' callbacks."""

    def set_model(self, model):
        self.model = model

    def set_params(self, params):
        self.params = params

    def __getattr__(self, name):
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def of_keras(kind):
    """Give a class the module of one of Keras' own."""
    kind.__module__ = f"keras.src.callbacks.{kind.__name__}"
    return kind


of_keras(Callback)


def fitted(*callbacks, epochs=4):
    strategy = mpidist.MirroredStrategy()
    with strategy.scope():
        variable, optimizer = mpidist.Variable(numpy.ones(2)), mpidist.optimizers.SGD(0.1)
    trainer = mpidist.Trainer(lambda w, x: ((w * w).sum(), 2 * w), variable, optimizer)
    return trainer.fit(numpy.zeros((6, 2)), batch_size=3, epochs=epochs, callbacks=callbacks, verbose=0)


def test_it_is_called_at_its_turns_and_may_end_the_training():
    class Ending(Callback):
        seen = 0

        def on_epoch_end(self, epoch, logs=None):
            self.seen += 1
            if logs["loss"] < 1.5:
                self.model.stop_training = True

    def fn():
        ending = Ending()
        losses = fitted(ending).history["loss"]
        return losses, ending.seen, ending.params["epochs"]

    for losses, seen, epochs in run_ranks(2, fn):
        # w shrinks by 0.8 in each of two steps of an epoch: of 2 w², the mean of 1 and 0.64, and so on
        numpy.testing.assert_allclose(losses, [1.64, 1.64 * 0.8**4])
        assert (seen, epochs) == (2, 4)


def test_a_scheduler_sets_the_rate_of_an_epoch_once_also_if_that_is_resumed_in_its_middle(tmp_path):
    @of_keras
    class LearningRateScheduler(Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate /= 2

    class Interrupted(Exception):
        pass

    class Interrupt(mpidist.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.trainer.steps_made == 4:
                raise Interrupted

    def fn(*more):
        saving = mpidist.callbacks.ModelCheckpoint(tmp_path, "loss", save_freq=1, resume=True)
        rates = []
        noted = mpidist.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: rates.append(saving.trainer.optimizer.learning_rate)
        )
        fitted(LearningRateScheduler(), saving, noted, *more, epochs=3)
        return rates

    with pytest.raises(Interrupted):
        run_ranks(2, fn, Interrupt())  # the last save is in the middle of the second epoch of two steps
    assert run_ranks(2, fn) == [[0.025, 0.0125]] * 2


@of_keras
class EarlyStopping(Callback):
    """As that of Keras: it ends a training whose loss was no better for some epochs."""

    patience, monitor = 3, "loss"

    def on_train_begin(self, logs=None):
        self.wait, self.best, self.best_epoch, self.stopped_epoch = 0, None, 0, 0

    def on_epoch_end(self, epoch, logs=None):
        self.wait += 1
        if self.best is None or logs["loss"] < self.best:
            self.wait, self.best, self.best_epoch = 0, logs["loss"], epoch
        if self.wait >= self.patience:
            self.stopped_epoch = epoch
            self.model.stop_training = True


@of_keras
class ReduceLROnPlateau(Callback):
    """As that of Keras: it halves a rate when the loss was no better for some epochs."""

    patience, monitor = 2, "loss"

    def on_train_begin(self, logs=None):
        self.wait, self.best, self.cooldown_counter = 0, None, 0

    def on_epoch_end(self, epoch, logs=None):
        self.wait += 1
        if self.best is None or logs["loss"] < self.best:
            self.wait, self.best = 0, logs["loss"]
        if self.wait >= self.patience:
            self.wait = 0
            self.model.optimizer.learning_rate /= 2


def _until_the_end(tmp_path, *more):
    """Return the epochs and the last rate of trainings in which no loss is better than the first one, 1."""
    saving = mpidist.callbacks.ModelCheckpoint(tmp_path, "loss", save_freq=1, resume=True)
    stopping = EarlyStopping()
    strategy = mpidist.MirroredStrategy()
    with strategy.scope():
        variable, optimizer = mpidist.Variable(numpy.ones(2)), mpidist.optimizers.SGD(0.25)
    trainer = mpidist.Trainer(lambda w, x: (1.0, 0 * w), variable, optimizer)
    callbacks = [ReduceLROnPlateau(), stopping, saving, *more]
    trainer.fit(numpy.zeros((6, 2)), batch_size=3, epochs=9, callbacks=callbacks, verbose=0)
    return stopping.stopped_epoch, stopping.best_epoch, optimizer.learning_rate


@pytest.mark.parametrize("steps", [3, 4, 5, 6])
def test_what_callbacks_remember_of_epochs_is_saved(tmp_path, steps):
    class Interrupted(Exception):
        pass

    class Interrupt(mpidist.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self.trainer.steps_made > steps:
                raise Interrupted

    with pytest.raises(Interrupted):
        run_ranks(2, _until_the_end, tmp_path, Interrupt())
    # three epochs after the first; the rate is halved after two of them
    assert run_ranks(2, _until_the_end, tmp_path) == [(3, 0, 0.125)] * 2


def test_what_a_callback_remembers_of_another_log_is_not_taken_over(tmp_path, monkeypatch):
    run_ranks(2, _until_the_end, tmp_path)  # saved last in epoch 3, before that is judged
    monkeypatch.setattr(EarlyStopping, "monitor", "val_loss")
    with pytest.warns(RuntimeWarning, match="remembered of 'loss'; it begins anew with 'val_loss'"):
        assert run_ranks(2, _until_the_end, tmp_path)[0][:2] == (6, 3)


def test_a_class_of_the_user_s_with_such_a_name_has_no_state(tmp_path):
    class EarlyStopping(Callback):
        pass

    def fn():
        saving = mpidist.callbacks.ModelCheckpoint(tmp_path, "loss", save_freq=1)
        return len(fitted(EarlyStopping(), saving).history["loss"])

    assert run_ranks(2, fn) == [4, 4]


def test_what_writes_is_the_chief_s():
    class CSVLogger(Callback):
        seen = 0

        def on_epoch_end(self, epoch, logs=None):
            self.seen += 1

    def fn():
        logger = CSVLogger()
        fitted(logger)
        return logger.seen

    assert run_ranks(2, fn) == [4, 0]


@pytest.mark.parametrize("name, advice", [
    ("ModelCheckpoint", "mpidist.callbacks.ModelCheckpoint"),
    ("TensorBoard", "mpidist.callbacks.TensorBoard"),
])  # fmt: skip
def test_what_needs_a_model_of_keras(name, advice):
    with pytest.raises(TypeError, match=f"callback Own works on a model of Keras.*use {advice}"):
        fitted(type("Own", (type(name, (Callback,), {}),), {})())


def test_early_stopping_that_restores_weights():
    callback = Callback()
    callback.restore_best_weights = True
    with pytest.raises(TypeError, match="mpidist.callbacks.EarlyStopping"):
        fitted(callback)


def test_what_is_no_callback():
    with pytest.raises(TypeError, match="a callback must be a mpidist.callbacks.Callback, got object"):
        fitted(object())
