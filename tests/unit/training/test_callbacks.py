"""What callbacks do, alike on all ranks and that a training goes on from its checkpoints with the same bits."""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib.util
import io
import logging
import math
import re
import struct
import sys
from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist.collectives.reductions import update
from mpidist.errors import CollectiveMismatchError, MissingDependencyError
from mpidist.testing import run_ranks
from mpidist.training import callbacks
from mpidist.training.callbacks import Callback, LambdaCallback, progress_bar
from mpidist.training.own_time import OwnTime, SlowReplica

_spec = importlib.util.spec_from_file_location("softplus_net", Path(__file__).with_name("softplus_net.py"))
net = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(net)


class Scripted:
    """A trainer of one variable whose loss is as written for each epoch; its gradient is always 1."""

    def __init__(self, losses, learning_rate=0.5):
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            self.variable = mpidist.Variable(numpy.zeros(1))
        self.losses = losses
        self.trainer = mpidist.Trainer(self.value_and_grad, self.variable, mpidist.optimizers.SGD(learning_rate))

    def value_and_grad(self, parameter, x):
        return self.losses[self.trainer.epoch], numpy.ones(1)

    def fit(self, *used, **options):
        options = {"epochs": len(self.losses), "callbacks": used, "batch_size": 2, **options}
        return self.trainer.fit(numpy.zeros(4), **options)


def on_two_ranks(fn, *args):
    """Return what both of two ranks return."""
    first, second = run_ranks(2, fn, *args)
    assert first == second
    return first


# -- the turns --------------------------------------------------------------------------------------------------------


def test_callbacks_are_called_at_every_turn_in_order():
    turns = []

    def on_rank():
        x, y = net.rows(4)
        names = [name for name in vars(Callback) if name.startswith("on_")]
        recorder = LambdaCallback(**{name: lambda *args, name=name: turns.append((name, *args[:-1])) for name in names})
        trainer = net.trainer(metrics=())
        trainer.fit(x, y, batch_size=2, validation_data=(x, y), callbacks=[recorder])
        trainer.predict(x, callbacks=[recorder])
        assert recorder.model is trainer

    run_ranks(1, on_rank)
    train = [turn for step in (0, 1) for turn in (("on_train_batch_begin", step), ("on_train_batch_end", step))]
    test = [turn for step in (0, 1) for turn in (("on_test_batch_begin", step), ("on_test_batch_end", step))]
    assert turns == [
        ("on_train_begin",),
        ("on_epoch_begin", 0),
        *train,
        ("on_test_begin",),
        *test,
        ("on_test_end",),
        ("on_epoch_end", 0),
        ("on_train_end",),
        ("on_predict_begin",),
        ("on_predict_batch_begin", 0),
        ("on_predict_batch_end", 0),
        ("on_predict_end",),
    ]


@pytest.mark.parametrize("validates", [False, True])
def test_params_tell_epochs_steps_and_validation(validates):
    def on_rank():
        callback, rows = Callback(), net.rows(10)
        data = rows if validates else None
        net.trainer().fit(*rows, batch_size=4, epochs=2, callbacks=[callback], validation_data=data)
        return callback.params

    assert on_two_ranks(on_rank) == {"epochs": 2, "steps": 3, "validates": validates}


def test_logs_of_a_batch_have_the_mean_loss_over_all_ranks_so_far():
    def on_rank():
        found = []
        script = Scripted([0.0])
        rank = script.trainer.strategy.extended.replica_id
        trainer = mpidist.Trainer(
            lambda parameter, x: (1.0 + rank, numpy.ones(1)), script.variable, mpidist.optimizers.SGD(0.1)
        )
        keep = LambdaCallback(on_train_batch_end=lambda batch, logs: found.append(logs["loss"]))
        trainer.fit(numpy.zeros(4), batch_size=3, callbacks=[keep])
        return found

    # 3 rows are 2 and 1, and the last row is the first rank's
    assert on_two_ranks(on_rank) == pytest.approx([(1 + 1 + 2) / 3, (1 + 1 + 2 + 1) / 4])


def test_what_is_no_callback_is_refused():
    with pytest.raises(TypeError, match=r"must be a mpidist.callbacks.Callback, got function"):
        run_ranks(1, lambda: Scripted([1.0]).fit(lambda epoch: None))
    with pytest.raises(TypeError, match="a callback has no 'on_epoch'; known ones: on_epoch_begin"):
        LambdaCallback(on_epoch=print)


# -- decisions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "options", "epochs"),
    [
        ([3.0, 2.0, 2.5, 1.0], {"patience": 1}, 3),
        ([3.0, 2.0, 2.5, 1.0], {"patience": 2}, 4),
        ([3.0, 2.9, 2.8, 1.0], {"patience": 1, "min_delta": 0.5}, 2),
        ([1.0, 2.0, 3.0, 4.0], {"patience": 2, "mode": "max"}, 4),
        ([5.0, 4.0, 3.5, 1.0], {"patience": 2, "baseline": 3.0}, 4),
        ([1.0, 2.0, 3.0, 4.0], {"patience": 1, "start_from_epoch": 2}, 4),
        ([math.nan, math.nan, 1.0], {"patience": 2}, 2),
    ],
)
def test_early_stopping_ends_a_training_that_gets_no_better(losses, options, epochs):
    def on_rank():
        return len(Scripted(losses).fit(callbacks.EarlyStopping("loss", **options)).epoch)

    assert on_two_ranks(on_rank) == epochs


def test_early_stopping_goes_back_to_the_best_variables():
    def on_rank():
        script = Scripted([3.0, 1.0, 2.0, 2.0, 2.0])
        stopping = callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
        script.fit(stopping)
        return script.variable.numpy()[0], stopping.best_epoch, stopping.stopped_epoch

    # two steps an epoch, each by 0.5; the best is the second epoch
    assert on_two_ranks(on_rank) == (-2.0, 1, 3)


class Graded(Scripted):
    """A trainer with metrics that are as written for each epoch: the share of predictions above 1/2."""

    def __init__(self, shares, metric):
        super().__init__(shares)
        self.trainer = mpidist.Trainer(
            self.graded, self.variable, mpidist.optimizers.SGD(0.5), metrics=[metric], predict_fn=lambda p, x: x
        )

    def graded(self, parameter, x, y):
        right = numpy.arange(len(y)) < round(self.losses[self.trainer.epoch] * len(y))
        return (1.0, right.astype("float32")), numpy.ones(1)

    def best_epochs(self, monitor, **options):
        used = callbacks.EarlyStopping(monitor, patience=9, restore_best_weights=True, **options)
        self.trainer.fit(numpy.zeros(4), numpy.ones(4), epochs=3, batch_size=4, callbacks=[used], verbose=0)
        return used.best_epoch


def share(y_true, y_pred):
    return y_pred


@pytest.mark.parametrize(
    ("metric", "monitor", "options", "best"),
    [
        (mpidist.metrics.Recall(name="found"), "found", {}, 1),
        (mpidist.metrics.BinaryAccuracy(name="right"), "right", {}, 1),
        (mpidist.metrics.MeanSquaredError(name="accuracy"), "accuracy", {}, 1),
        (share, "share", {"mode": "max"}, 1),
        (share, "share", {"mode": "min"}, 0),
    ],
)
def test_the_metric_tells_whether_its_log_is_to_grow(metric, monitor, options, best):
    assert run_ranks(1, lambda: Graded([0.25, 0.75, 0.5], metric).best_epochs(monitor, **options)) == [best]


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: callbacks.EarlyStopping("val_share"),
        lambda folder: callbacks.ReduceLROnPlateau("val_share"),
        lambda folder: callbacks.ModelCheckpoint(folder, "val_share", save_best_only=True),
    ],
)
def test_a_log_of_which_nothing_tells_is_refused_when_training_begins(tmp_path, make):
    with pytest.raises(ValueError, match=r"monitors 'val_share', and nothing tells .*give mode='max' or mode='min'"):
        run_ranks(1, lambda: Scripted([1.0]).fit(make(tmp_path)))


def test_a_log_that_is_not_there_is_warned_of_with_those_that_are():
    def on_rank():
        with pytest.warns(UserWarning, match="EarlyStopping monitors 'val_loss', which.* there are: loss"):
            Scripted([1.0]).fit(callbacks.EarlyStopping())

    run_ranks(1, on_rank)


def test_the_learning_rate_is_the_chiefs():
    def on_rank():
        script = Scripted([1.0, 1.0, 1.0])
        rank = script.trainer.strategy.extended.replica_id
        history = script.fit(callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 + rank))
        return history.history["learning_rate"], script.variable.numpy()[0]

    # 0.5 is halved in front of every epoch of two steps
    assert on_two_ranks(on_rank) == ([0.25, 0.125, 0.0625], -2 * (0.25 + 0.125 + 0.0625))


def test_a_schedule_may_ask_for_the_epoch_alone():
    def on_rank():
        return Scripted([1.0, 1.0]).fit(callbacks.LearningRateScheduler(lambda epoch: 1.0 + epoch)).history

    assert on_two_ranks(on_rank)["learning_rate"] == [1.0, 2.0]


def test_the_learning_rate_is_reduced_on_a_plateau():
    def on_rank():
        script = Scripted([3.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0], learning_rate=8.0)
        reduce = callbacks.ReduceLROnPlateau("loss", factor=0.25, patience=2, cooldown=1, min_lr=1.0)
        return script.fit(reduce).history["learning_rate"]

    # reduced after epochs 2 and 4, no further than 1
    assert on_two_ranks(on_rank) == [8.0, 8.0, 8.0, 2.0, 2.0, 1.0, 1.0]


@pytest.mark.parametrize("rate", [mpidist.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9), lambda step: 0.1])
@pytest.mark.parametrize(
    "callback",
    [lambda: callbacks.LearningRateScheduler(lambda epoch: 0.5), lambda: callbacks.ReduceLROnPlateau("loss")],
)
def test_a_schedule_is_not_replaced_by_a_number(callback, rate):
    def on_rank():
        script, used = Scripted([1.0] * 20, rate), callback()
        with pytest.raises(TypeError, match=f"{type(used).__name__} would replace the schedule .* of this SGD"):
            script.fit(used)  # Keras says so at the first reduction: here before a step is made
        return script.trainer.steps_made, script.trainer.optimizer.has_schedule

    assert on_two_ranks(on_rank) == (0, True)


def test_training_ends_at_once_when_the_loss_of_one_rank_is_nan(caplog):
    def on_rank():
        script = Scripted([1.0, 1.0, 1.0])
        rank = script.trainer.strategy.extended.replica_id
        script.losses = [1.0, math.nan if rank == 1 else 1.0, 1.0]
        history = script.fit(callbacks.TerminateOnNaN())
        return history.epoch, script.trainer.steps_made

    with caplog.at_level(logging.WARNING, "mpidist"):
        assert on_two_ranks(on_rank) == ([0, 1], 3)
    assert [record.getMessage() for record in caplog.records] == [
        "the loss is nan in step 0 of epoch 1, on ranks [1]: training ends"
    ]


# -- files ------------------------------------------------------------------------------------------------------------


def test_the_chief_writes_the_logs_as_csv(tmp_path):
    path = tmp_path / "log.csv"

    def on_rank():
        Scripted([2.0, 1.0]).fit(callbacks.CSVLogger(path))
        script = Scripted([2.0, 1.0, 0.5])
        script.fit(callbacks.CSVLogger(path, append=True), initial_epoch=2)

    run_ranks(2, on_rank)
    assert list(csv.reader(io.StringIO(path.read_text()))) == [
        ["epoch", "loss"],
        ["0", "2.0"],
        ["1", "1.0"],
        ["2", "0.5"],
    ]


@pytest.mark.parametrize("freq", [1, 2, 3, 5])
def test_the_columns_of_a_validation_are_there_whenever_it_is_made(tmp_path, freq):
    path, histories = tmp_path / "log.csv", []

    def on_rank():
        x, y = net.rows(4)
        options = {"validation_data": (x, y), "validation_freq": freq, "epochs": 4}
        used = [callbacks.CSVLogger(path), callbacks.ReduceLROnPlateau("loss")]
        histories.append(net.trainer().fit(x, y, callbacks=used, **options))

    run_ranks(1, on_rank)
    (history,) = histories
    lines = list(csv.DictReader(io.StringIO(path.read_text())))
    trained = {name for name in history.history if not name.startswith("val_")} - {"learning_rate"}
    assert set(lines[0]) == {"epoch", *trained, *(f"val_{name}" for name in trained)}
    for name in trained:
        assert [float(line[name]) for line in lines] == history.history[name]
        values = iter(history.history.get(f"val_{name}", []))
        expected = [str(next(values)) if (epoch + 1) % freq == 0 else "NA" for epoch in range(4)]  # Keras' word
        assert [line[f"val_{name}"] for line in lines] == expected


def test_logs_that_the_first_line_does_not_have_are_told_of_once(tmp_path):
    path = tmp_path / "log.csv"

    def on_rank():
        Scripted([2.0]).fit(callbacks.CSVLogger(path))
        add = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update({"late": 1.0} if epoch else {}))
        with pytest.warns(UserWarning, match=r"leaves out \['late'\]: the first line of .*log.csv") as told:
            Scripted([2.0, 1.0, 0.5, 0.25]).fit(add, callbacks.CSVLogger(path, append=True), initial_epoch=1)
        return len(told)

    assert run_ranks(1, on_rank) == [1]
    assert list(csv.reader(io.StringIO(path.read_text()))) == [
        ["epoch", "loss"],
        ["0", "2.0"],
        ["1", "1.0"],
        ["2", "0.5"],
        ["3", "0.25"],
    ]


def events(directory):
    """Return {(tag, step): value} of the event files in a directory."""
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in directory.iterdir():
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            found.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
            at += 12 + length + 4
    return found


def test_the_chief_writes_event_files(tmp_path):
    def on_rank():
        x, y = net.rows(8)
        trainer = net.trainer(metrics=["mae"])
        board = callbacks.TensorBoard(tmp_path, update_freq=3)
        return trainer.fit(x, y, batch_size=4, epochs=2, validation_data=(x, y), callbacks=[board]).history

    history = on_two_ranks(on_rank)
    train, validation = events(tmp_path / "train"), events(tmp_path / "validation")
    assert {step for tag, step in train if tag == "batch_loss"} == {3}
    for epoch in (0, 1):
        assert train["epoch_mae", epoch] == pytest.approx(history["mae"][epoch], rel=1e-6)
        assert train["epoch_learning_rate", epoch] == 0.5
        assert validation["epoch_loss", epoch] == pytest.approx(history["val_loss"][epoch], rel=1e-6)
    assert len(list((tmp_path / "train").iterdir())) == 1


def test_event_files_need_a_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingDependencyError, match="pip install tensorboardX"):
        callbacks.TensorBoard()


@pytest.mark.parametrize("frequency", ["step", 0, -1])
def test_how_often_must_make_sense(frequency, tmp_path):
    with pytest.raises(ValueError, match="update_freq must be"):
        callbacks.TensorBoard(update_freq=frequency)
    with pytest.raises(ValueError, match="save_freq must be"):
        callbacks.ModelCheckpoint(tmp_path, save_freq=frequency)


# -- checkpoints ------------------------------------------------------------------------------------------------------


class Interrupted(Exception):
    """What ends a training in the middle."""


class Interrupt(Callback):
    """Ends the training after a step."""

    def __init__(self, after):
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        if self.trainer.steps_made == self.after:
            raise Interrupted


def trained(directory, interrupt=0, feed=None, **options):
    """Train on all ranks, resuming what is in the directory; return variables and logs, or nothing if interrupted."""
    x, y = net.rows(22)
    trainer = net.trainer(optimizer=mpidist.optimizers.Adam(0.05))
    backup = callbacks.BackupAndRestore(directory, save_freq=2, delete_checkpoint=False)
    used = [callbacks.EarlyStopping("val_loss", patience=3), backup, Interrupt(interrupt)]
    given = ((x, y), {"batch_size": 4, "seed": 5}) if feed is None else ((feed(x, y),), {"steps_per_epoch": 4})
    try:
        history = trainer.fit(*given[0], epochs=3, validation_data=(x, y), callbacks=used, **given[1])
    except Interrupted:
        return None
    return net.values(trainer), history.history


def shuffled(x, y):
    return mpidist.data.Dataset.from_arrays((x, y)).shuffle(seed=5).repeat().batch(4)


@pytest.fixture(scope="module")
def whole_trainings(tmp_path_factory):
    """Return what gives variables and logs of a training on two ranks that is not interrupted, by its feed."""
    return functools.cache(lambda feed: run_ranks(2, trained, tmp_path_factory.mktemp("whole"), 0, feed)[0])


@pytest.mark.parametrize("feed", [None, shuffled], ids=["arrays", "repeated data set"])
@pytest.mark.parametrize("interrupt", [1, 3, 6, 7, 11])
def test_an_interrupted_training_ends_with_the_same_bits(tmp_path, interrupt, feed, whole_trainings):
    whole, logs = whole_trainings(feed)
    assert run_ranks(2, trained, tmp_path / "run", interrupt, feed) == [None, None]
    for values, resumed in run_ranks(2, trained, tmp_path / "run", 0, feed):
        numpy.testing.assert_array_equal(values, whole)
        for name in logs:
            assert resumed[name] == pytest.approx(logs[name][-len(resumed[name]) :], rel=1e-14)


@pytest.mark.parametrize("least_bytes", [1, update.LEAST_BYTES])
def test_an_interrupted_training_rounds_as_the_whole_one_before_a_smaller_batch(tmp_path, least_bytes, monkeypatch):
    """What is expected of a step, the rows of the step before, is a part of the checkpoint."""
    monkeypatch.setattr(update, "LEAST_BYTES", least_bytes)

    def on_rank(directory, *more):
        trainer = net.trainer()
        backup = callbacks.BackupAndRestore(directory, save_freq=2, delete_checkpoint=False)
        trainer.fit(*net.rows(14), batch_size=5, epochs=2, callbacks=[backup, *more])
        return net.values(trainer)

    whole = run_ranks(3, on_rank, tmp_path / "whole")[0]
    with pytest.raises(Interrupted):
        run_ranks(3, lambda: on_rank(tmp_path / "run", Interrupt(3)))
    for values in run_ranks(3, on_rank, tmp_path / "run"):
        numpy.testing.assert_array_equal(values, whole)


@pytest.mark.parametrize("sizes", [(3, 1), (1, 4)])
def test_an_interrupted_training_goes_on_on_another_number_of_ranks(tmp_path, sizes):
    before, after = sizes
    whole, logs = run_ranks(before, trained, tmp_path / "whole")[0]
    run_ranks(before, trained, tmp_path / "run", 9)
    for values, resumed in run_ranks(after, trained, tmp_path / "run"):
        numpy.testing.assert_allclose(values, whole, rtol=1e-12)
        numpy.testing.assert_allclose(resumed["loss"], logs["loss"][1:], rtol=1e-12)
        numpy.testing.assert_allclose(resumed["auc"], logs["auc"][1:], rtol=1e-12)


@pytest.mark.parametrize("told", [0, 1])
def test_a_training_that_is_told_to_end_saves_on_all_ranks_and_goes_on(tmp_path, told, caplog):
    x, y = net.rows(22)

    def exit_fn():
        raise Interrupted

    def on_rank(directory, tell_after):
        trainer = net.trainer()
        rank = trainer.strategy.extended.replica_id
        config = mpidist.experimental.TerminationConfig(
            lambda: rank == told and trainer.steps_made == tell_after, exit_fn, poll_seconds=0
        )
        options = {"delete_checkpoint": False, "save_before_preemption": True, "termination_config": config}
        backup = callbacks.BackupAndRestore(directory, **options)
        try:
            trainer.fit(x, y, batch_size=4, epochs=3, callbacks=[backup])
        except Interrupted:
            return trainer.steps_made, None
        return trainer.steps_made, net.values(trainer)

    (_, whole), _ = run_ranks(2, on_rank, tmp_path / "whole", 0)
    (first, nothing), (second, _) = run_ranks(2, on_rank, tmp_path / "run", 8)
    assert first == second in (8, 9) and nothing is None
    assert f"the job was told to end: saved after {first} steps; it exits" in caplog.text
    for _, values in run_ranks(2, on_rank, tmp_path / "run", 0):
        numpy.testing.assert_array_equal(values, whole)


@pytest.mark.parametrize("backup", [False, True])
@pytest.mark.parametrize("interrupt", [2, 3, 4, 6])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_epoch_that_is_resumed_in_its_middle_has_one_rate(tmp_path, ranks, interrupt, backup):
    def on_rank(*more):
        script = Scripted([1.0] * 3)
        saving = (
            callbacks.BackupAndRestore(tmp_path, save_freq=1, delete_checkpoint=False)
            if backup
            else callbacks.ModelCheckpoint(tmp_path, "loss", save_freq=1, resume=True)
        )
        rates = callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        found = script.fit(rates, saving, *more, verbose=0).history["learning_rate"]
        return found, script.variable.numpy()[0]

    with pytest.raises(Interrupted):
        run_ranks(ranks, on_rank, Interrupt(interrupt))
    rates = [0.25, 0.125, 0.0625]  # of epochs of two steps; the last save was one step before the interruption
    assert run_ranks(ranks, on_rank) == [(rates[(interrupt - 2) // 2 :], -2 * sum(rates))] * ranks


def test_a_training_that_is_not_resumed_sets_the_rate_of_its_first_epoch_anew():
    def on_rank():
        script, rates = Scripted([1.0] * 3), callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
        found = [script.fit(rates, epochs=2, initial_epoch=1).history["learning_rate"] for _ in range(2)]
        return found, script.variable.numpy()[0]

    assert on_two_ranks(on_rank) == ([[0.25], [0.125]], -2 * (0.25 + 0.125))


def test_a_callback_whose_state_differs_by_rank_is_named(tmp_path):
    class Counter(Callback):
        count = 0

        def on_train_batch_end(self, batch, logs=None):
            self.count += 1 + self.trainer.strategy.extended.replica_id

        def state(self):
            return {"count": self.count}

        def restore(self, state):
            self.count = state["count"]

    def on_rank():
        used = [callbacks.EarlyStopping("loss"), callbacks.LearningRateScheduler(lambda epoch: 0.5), Counter()]
        Scripted([2.0, 1.0]).fit(callbacks.ModelCheckpoint(tmp_path, "loss"), *used, verbose=0)

    with pytest.warns(RuntimeWarning, match="rank 0: 'training/callbacks/Counter/count' on ranks 1, 2. A") as told:
        run_ranks(3, on_rank)
    assert len(told) == 1


class EndInTheMiddle(Callback):
    """Ends the training by a vote after the first step of an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        self.trainer.stop_training |= self.trainer.epoch == self.epoch


def test_an_epoch_that_is_left_in_its_middle_is_judged_once(tmp_path):
    """As by a limit of time: its logs come twice, of the first part and of the whole."""

    def on_rank(*more):
        used = [
            callbacks.ModelCheckpoint(tmp_path, "loss", resume=True),
            callbacks.EarlyStopping("loss", patience=3),
            callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2),
        ]
        history = Scripted([1.0] * 6).fit(*used, *more, verbose=0)
        return history.epoch, history.history["learning_rate"]

    assert on_two_ranks(on_rank, EndInTheMiddle(1)) == ([0, 1], [0.5, 0.5])
    # epoch 0 is the best: the rate is halved after two more, and the training ends after three more
    assert on_two_ranks(on_rank) == ([1, 2, 3], [0.5, 0.5, 0.25])


def test_an_epoch_that_is_left_in_its_middle_is_judged_at_the_end_of_the_training():
    def on_rank():
        script = Scripted([3.0, 1.0, 2.0])
        used = callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)
        script.fit(used, EndInTheMiddle(1), verbose=0)
        return used.best, used.best_epoch, script.variable.numpy()[0]

    assert on_two_ranks(on_rank) == (1.0, 1, -1.5)


def test_what_callbacks_remember_is_restored(tmp_path):
    def on_rank(losses, epochs):
        script = Scripted(losses)
        used = [
            callbacks.ModelCheckpoint(tmp_path, resume=True),
            callbacks.EarlyStopping("loss", patience=2),
            callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=3),
        ]
        return script.fit(*used, epochs=epochs).history

    losses = [1.0, 2.0, 2.0, 2.0, 2.0]
    assert len(on_two_ranks(on_rank, losses, 2)["loss"]) == 2
    assert len(on_two_ranks(on_rank, losses, 5)["loss"]) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda monitor, mode: callbacks.EarlyStopping(monitor, patience=1, restore_best_weights=True, mode=mode),
        lambda monitor, mode: callbacks.ReduceLROnPlateau(monitor, patience=1, mode=mode),
    ],
)
@pytest.mark.parametrize("other", [("score", "max"), ("loss", "max")])
def test_what_was_remembered_of_another_log_is_not_taken_over(tmp_path, make, other):
    def on_rank(monitor, mode, epochs):
        script = Scripted([0.5, 0.5, 0.5])
        score = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(score=0.25 * epoch))
        used = make(monitor, mode)
        script.fit(score, used, callbacks.ModelCheckpoint(tmp_path, resume=True), epochs=epochs)
        return used.best

    (best,) = run_ranks(1, on_rank, "loss", "min", 1)
    assert best == 0.5
    with pytest.warns(RuntimeWarning, match=f"of 'loss', which is to fall; it begins anew with '{other[0]}'"):
        (best,) = run_ranks(1, on_rank, *other, 2)
    assert best == (0.25 if other[0] == "score" else 0.5)


def test_the_best_of_a_growing_log_is_saved_where_earlier_ones_were_not_compared(tmp_path):
    def on_rank(epochs, best_only):
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(1))
            metric = mpidist.metrics.Mean("hits")
        metric.grows = True
        trainer = mpidist.Trainer(
            lambda w, x, y: ((1.0, x), numpy.ones(1)), variable, mpidist.optimizers.SGD(0.1), metrics=[metric]
        )
        saves = callbacks.ModelCheckpoint(tmp_path, "hits", save_best_only=best_only, resume=True)
        trainer.fit(numpy.ones(2), numpy.ones(2), epochs=epochs, callbacks=[saves], verbose=0)
        return [path.name for path in saves.manager.checkpoints]

    run_ranks(1, on_rank, 1, False)
    with pytest.warns(RuntimeWarning, match="remembered of 'hits', which is to fall; it begins anew with 'hits'"):
        assert run_ranks(1, on_rank, 2, True) == [["checkpoint-1.h5", "checkpoint-2.h5"]]


class Stopped(Scripted):
    """A trainer with a variable of each kind, that goes back to the best; its loss is as written for each epoch."""

    def __init__(self, losses):
        super().__init__(losses)
        with self.variable.strategy.scope():
            self.seen = mpidist.Variable(numpy.zeros(1), synchronization="ON_READ", aggregation="SUM")
        variables = [self.variable, self.seen]
        self.trainer = mpidist.Trainer(self.value_and_grad, variables, mpidist.optimizers.SGD(0.5))

    def value_and_grad(self, parameters, x):
        self.seen.assign_add([1.0])
        return self.losses[self.trainer.epoch], [numpy.ones(1), None]

    def values(self):
        with self.variable.strategy.scope():
            return float(self.variable.value[0]), float(self.seen.value[0])


def stopped(directory, losses, epochs, goes_back=True):
    """Train, resume in a new trainer after each number of epochs; return the variables and the best epoch."""
    for end in epochs:
        stopping = callbacks.EarlyStopping("loss", patience=2, restore_best_weights=goes_back)
        script = Stopped(losses)
        script.fit(stopping, callbacks.ModelCheckpoint(directory, resume=True), epochs=end)
    return (*script.values(), stopping.best_epoch, stopping.stopped_epoch)


@pytest.mark.parametrize("epochs", [[5], [3, 5], [2, 3, 5], [1, 5]])
def test_a_resumed_training_goes_back_to_the_best_variables_of_all_epochs(tmp_path, epochs):
    # two steps an epoch, each by 0.5, on two ranks; the best is the second epoch
    assert on_two_ranks(stopped, tmp_path, [3.0, 1.0, 2.0, 2.0, 2.0], epochs) == (-2.0, 8.0, 1, 3)


def test_the_best_variables_are_restored_on_another_number_of_ranks(tmp_path):
    losses = [3.0, 1.0, 2.0, 2.0, 2.0]
    on_two_ranks(stopped, tmp_path, losses, [3])
    assert run_ranks(1, stopped, tmp_path, losses, [5]) == [(-2.0, 8.0, 1, 3)]


@pytest.mark.parametrize("ends", [[4], [2, 4]])
def test_a_resumed_training_goes_back_to_the_first_variables_where_no_loss_was_a_number(tmp_path, ends):
    def on_rank():
        for end in ends:
            script = Scripted([math.nan] * 4)
            stopping = callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True)
            script.fit(stopping, callbacks.ModelCheckpoint(tmp_path, resume=True), epochs=end)
        return float(script.variable.value[0]), stopping.best_epoch

    assert on_two_ranks(on_rank) == (-1.0, 0)  # of the first epoch, as Keras does


def test_ranks_with_other_logs_do_not_go_back_to_other_variables():
    def on_rank():
        script = Scripted([1.0] * 4)

        def add(epoch, logs):
            if script.trainer.is_chief:
                logs["val_auc"] = [0.5, 0.9, 0.8, 0.7][epoch]

        stopping = callbacks.EarlyStopping("val_auc", patience=9, restore_best_weights=True)
        with pytest.raises(CollectiveMismatchError, match="best epoch: None on rank 1, 1 on rank 0"):
            script.fit(LambdaCallback(on_epoch_end=add), stopping)

    with pytest.warns(UserWarning, match="EarlyStopping monitors 'val_auc', which the logs do not have"):
        run_ranks(2, on_rank)


def test_a_checkpoint_without_the_best_variables_is_warned_of(tmp_path):
    losses = [1.0, 2.0, 3.0, 4.0]
    run_ranks(1, stopped, tmp_path, losses, [2], False)
    with pytest.warns(RuntimeWarning, match="does not have the variables of epoch 0, the best so far"):
        (found,) = run_ranks(1, stopped, tmp_path, losses, [4])
    assert found[0] == -3.0  # the third epoch is the best from then on
    assert found[2] == 2


def test_the_best_is_saved_and_known_after_a_restart(tmp_path):
    def on_rank(losses, epochs):
        script = Scripted(losses)
        best = callbacks.ModelCheckpoint(tmp_path, "loss", save_best_only=True, max_to_keep=None, resume=True)
        script.fit(best, epochs=epochs)
        return sorted(path.name for path in tmp_path.glob("checkpoint-*"))

    saved = on_two_ranks(on_rank, [3.0, 2.0], 2)
    assert saved == ["checkpoint-2.h5", "checkpoint-4.h5"]
    # the third epoch is no better than the second, the fourth is
    assert on_two_ranks(on_rank, [3.0, 2.0, 2.5, 1.0], 4) == [*saved, "checkpoint-8.h5"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("save_freq", ["epoch", 1])
def test_a_training_goes_on_from_the_last_one_and_not_from_a_longer_one_before_it(tmp_path, ranks, save_freq):
    """Two steps an epoch, each by 0.5; what a training begins with tells it from the others."""

    def on_rank(begins_with, epochs, resume):
        script = Scripted([1.0] * epochs)
        script.variable.assign([begins_with])
        saving = callbacks.ModelCheckpoint(tmp_path, "loss", save_freq=save_freq, resume=resume)
        script.fit(saving, epochs=epochs, verbose=0)
        return float(script.variable.value[0]), script.trainer.steps_made

    assert run_ranks(ranks, on_rank, 100.0, 10, False) == [(100.0 - 10, 20)] * ranks
    assert run_ranks(ranks, on_rank, 200.0, 2, False) == [(200.0 - 2, 4)] * ranks  # anew
    assert run_ranks(ranks, on_rank, 300.0, 3, True) == [(200.0 - 3, 6)] * ranks
    assert run_ranks(ranks, on_rank, 300.0, 9, True) == [(200.0 - 9, 18)] * ranks


def test_a_backup_is_removed_at_the_end(tmp_path):
    def on_rank():
        Scripted([1.0]).fit(callbacks.BackupAndRestore(tmp_path / "backup"))

    run_ranks(2, on_rank)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("where", ["backup", "."])
def test_a_backup_removes_its_own_files_only(tmp_path, monkeypatch, where):
    monkeypatch.chdir(tmp_path)
    mine = ["notes.txt", ".mine.partial", "backup.h5", "backup-1.h5.bak", "folder/backup-1.h5"]
    for name in mine:
        (tmp_path / where / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / where / name).write_text("mine")

    def on_rank(save_freq, interrupt):
        with contextlib.suppress(Interrupted):
            Scripted([1.0]).fit(callbacks.BackupAndRestore(where, save_freq), Interrupt(interrupt))

    run_ranks(2, on_rank, 1, 2)
    assert {"backup-1.h5"} < {path.name for path in (tmp_path / where).iterdir()}
    run_ranks(2, on_rank, 100, 0)  # saves nothing itself: what it restored is of the same training
    found = sorted(str(path.relative_to(tmp_path / where)) for path in (tmp_path / where).rglob("*"))
    assert found == sorted([*mine, "folder"])


def test_a_backup_leaves_the_checkpoints_of_another_callback_in_its_directory(tmp_path):
    def on_rank(interrupt):
        kept, backup = callbacks.ModelCheckpoint(tmp_path, max_to_keep=None), callbacks.BackupAndRestore(tmp_path)
        with contextlib.suppress(Interrupted):
            Scripted([3.0, 2.0, 1.0]).fit(kept, backup, Interrupt(interrupt))

    run_ranks(2, on_rank, 5)
    run_ranks(2, on_rank, 0)  # a run that knows of the others' files by their names only
    saved = sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".h5")
    assert len(saved) >= 3 and all(name.startswith("checkpoint-") for name in saved)


# -- progress ---------------------------------------------------------------------------------------------------------


def printed(capsys, **options):
    """Return the lines that two ranks print in a training, with `s` for the seconds."""
    run_ranks(2, lambda: Scripted([2.0, 1.0]).fit(**options))
    return lines_of(capsys)


def lines_of(capsys):
    return [re.sub(r"\d+\.\d s", "s", line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("options", [{}, {"verbose": 1}, {"verbose": 2}, {"verbose": "auto"}])
def test_the_chief_prints_a_line_an_epoch_where_there_is_no_terminal(capsys, options):
    assert printed(capsys, **options) == ["epoch 1/2  s  loss 2", "epoch 2/2  s  loss 1"]


def test_nothing_is_printed_if_not_asked(capsys):
    assert printed(capsys, verbose=0) == []


def test_a_bar_of_the_users_is_the_only_one(capsys):
    x, y = net.rows(4)
    for verbose in (2, 0):
        net.trainer().fit(x, y, epochs=3, callbacks=[callbacks.ProgressBar(verbose)])
        assert len(lines_of(capsys)) == (3 if verbose else 0)


def test_a_bar_shows_evaluations_after_a_training_that_failed_and_in_one(capsys):
    x, y = net.rows(4)
    trainer, bar = net.trainer(), callbacks.ProgressBar()

    def fail(epoch, logs):
        trainer.evaluate(x, y)
        raise KeyError

    with pytest.raises(KeyError):
        trainer.fit(x, y, callbacks=[callbacks.LambdaCallback(on_epoch_begin=fail), bar])
    trainer.evaluate(x, y, callbacks=[bar], verbose=0)
    assert [line.split()[0] for line in lines_of(capsys)] == ["evaluate", "evaluate"]


def everything(**options):
    x, y = net.rows(12)
    trainer = net.trainer(metrics=["mae"])
    trainer.fit(x, y, epochs=2, validation_data=(x, y), validation_freq=2, **options)
    logs = trainer.evaluate(x, y, return_dict=True, **options)
    trainer.predict(x, **options)
    return logs


@pytest.mark.parametrize("on_terminal", [False, True])
def test_evaluations_and_predictions_have_lines_and_validations_are_in_those_of_epochs(
    capsys, monkeypatch, on_terminal
):
    monkeypatch.setattr(progress_bar, "on_terminal", lambda: on_terminal)
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    logs, _ = run_ranks(2, everything)
    shown = [line.split("  ") for line in lines_of(capsys)]
    assert [line[:2] for line in shown] == [["epoch 1/2", "s"], ["epoch 2/2", "s"], ["evaluate", "s"], ["predict", "s"]]
    names = [[pair.split()[0] for pair in line[2:]] for line in shown]
    metrics = ["loss", "mae"]
    assert names == [metrics, [*metrics, *(f"val_{name}" for name in metrics)], metrics, []]
    assert shown[2][2:] == [f"{name} {value:.4g}" for name, value in logs.items()]


def test_evaluations_and_predictions_are_silent_if_not_asked(capsys):
    run_ranks(2, lambda: everything(verbose=0))
    assert lines_of(capsys) == []


class Bars:
    """Stands for `rich.progress`, and notes what the bars do."""

    def __init__(self):
        self.done, self.texts = [], []

    def BarColumn(self):  # noqa: N802
        return "bar"

    MofNCompleteColumn = BarColumn

    def Progress(self, *columns, transient):  # noqa: N802
        return self

    def add_task(self, title, total, text):
        self.done.append((title, total))

    def start(self):
        self.done.append("start")

    def update(self, task, completed, text):
        self.done.append(completed)
        self.texts.append(text)

    def stop(self):
        self.done.append("stop")


def test_bars_move_on_a_terminal(capsys, monkeypatch):
    bars = Bars()
    monkeypatch.setattr(progress_bar, "on_terminal", lambda: True)
    monkeypatch.setattr(progress_bar, "_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(progress_bar, "_rich", lambda: bars)
    run_ranks(2, lambda: everything(batch_size=4))
    titles = ["epoch 1/2", "epoch 2/2", "evaluate", "predict"]
    assert bars.done == [turn for title in titles for turn in ((title, 3), "start", 1, 2, 3, "stop")]
    assert len(lines_of(capsys)) == 4


def test_a_bar_has_the_time_left_rows_a_second_loss_and_the_slow_replica(monkeypatch):
    """A clock that moves by one second a step: 2 epochs of 3 steps of 4 rows."""
    bars, now = Bars(), [0.0]
    monkeypatch.setattr(progress_bar, "on_terminal", lambda: True)
    monkeypatch.setattr(progress_bar, "_rich", lambda: bars)
    monkeypatch.setattr(progress_bar.time, "perf_counter", lambda: now[0])
    x, y = net.rows(12)
    trainer = net.trainer()

    def move(step, logs):
        now[0] += 1.0

    def be_slow(epoch, logs):
        trainer.slow_replica = SlowReplica(3, 1.5)

    clock = callbacks.LambdaCallback(on_train_batch_begin=move, on_epoch_end=be_slow)
    trainer.fit(x, y, batch_size=4, epochs=2, callbacks=[clock])
    shown = [text.split("  ") for text in bars.texts]
    assert [text[:2] for text in shown] == [[f"0:00:0{left} left", "4 rows/s"] for left in (5, 4, 3, 2, 1, 0)]
    assert all(text[2].startswith("loss ") for text in shown)
    assert [text[3:] for text in shown] == [[]] * 3 + [["replica 3 is slow: 1.5 times the others"]] * 3
    trainer.evaluate(x, y, batch_size=4, callbacks=[callbacks.LambdaCallback(on_test_batch_begin=move)])
    assert bars.texts[6:] == [f"0:00:0{left} left" for left in (2, 1, 0)]


@pytest.mark.parametrize("slow", [0, 2])
def test_the_slow_replica_of_an_epoch_is_known_on_all_ranks(slow):
    def on_rank():
        seconds = [0.0]

        def value_and_grad(w, x):
            seconds[0] += 3.0 if mpidist.rank() == slow else 1.0
            return 0.0, numpy.zeros(1)

        with mpidist.MultiWorkerMirroredStrategy().scope():
            trainer = mpidist.Trainer(value_and_grad, mpidist.Variable(numpy.zeros(1)), mpidist.optimizers.SGD(0.1))

        def see(step, logs):
            seconds[0] += 9.0 * mpidist.rank()  # no reading, and no gradients

        trainer._step.own_time = OwnTime(lambda: seconds[0])
        hook = LambdaCallback(on_train_batch_end=see)
        trainer.fit(numpy.zeros(6), batch_size=3, verbose=0, callbacks=[hook])
        return trainer.slow_replica

    assert run_ranks(3, on_rank) == [SlowReplica(slow, 3.0)] * 3


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([2.0], None),
        ([1.0, 1.05], None),
        ([0.0, 0.0, 1.0], None),  # others did nothing
        ([1.0, 2.0], SlowReplica(1, 2.0)),
        ([6.0, 1.0, 2.0, 3.0], SlowReplica(0, 3.0)),
    ],
)
def test_a_replica_is_slow_against_the_median_of_the_others(seconds, expected):
    assert SlowReplica.of(seconds) == expected


@pytest.mark.parametrize("verbose", [0, 2])
def test_no_bar_is_shown_if_not_asked(capsys, monkeypatch, verbose):
    monkeypatch.setattr(progress_bar, "on_terminal", lambda: True)
    assert len(printed(capsys, verbose=verbose)) == verbose


def test_verbose_must_make_sense():
    with pytest.raises(ValueError, match="verbose must be 0, 1, 2 or 'auto', got 3"):
        callbacks.ProgressBar(3)


def test_a_pipe_is_no_terminal():
    assert not progress_bar.on_terminal()
