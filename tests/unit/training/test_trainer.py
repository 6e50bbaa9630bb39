"""`Trainer`: N ranks do what one rank does on the global batch, whatever the batches, data and moment of the end."""

from __future__ import annotations

import importlib.util
import itertools
from collections import namedtuple
from pathlib import Path
from unittest import mock

import hypothesis.strategies as st
import numpy
import pytest
from hypothesis import given, settings

import mpidist
from mpidist import nest
from mpidist.collectives.reductions import update
from mpidist.errors import CollectiveMismatchError, InputError, RemoteReplicaError
from mpidist.input import Dataset
from mpidist.testing import run_ranks
from mpidist.training.callbacks import Callback, LambdaCallback, ModelCheckpoint

_spec = importlib.util.spec_from_file_location("softplus_net", Path(__file__).with_name("softplus_net.py"))
net = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(net)

OPTIMIZERS = {
    "sgd": lambda: mpidist.optimizers.SGD(0.5),
    "nesterov": lambda: mpidist.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: mpidist.optimizers.Adam(0.01),
    "clipped": lambda: mpidist.optimizers.SGD(0.5, global_clipnorm=0.05),
    "accumulated": lambda: mpidist.optimizers.SGD(0.5, gradient_accumulation_steps=2),
}


def alone(fn, *args):
    return run_ranks(1, fn, *args)[0]


# -- the law ----------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    size=st.sampled_from([2, 3, 4, 8]),
    count=st.integers(1, 20),
    batch=st.integers(1, 12),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    least_bytes=st.sampled_from([1, update.LEAST_BYTES]),
)
def test_n_ranks_train_to_what_one_rank_trains_to(size, count, batch, optimizer, least_bytes):
    x, y = net.rows(count)

    def on_rank():
        trainer = net.trainer(optimizer=OPTIMIZERS[optimizer]())
        history = trainer.fit(x, y, batch_size=batch, epochs=2, validation_data=(x[:3], y[:3]))
        return net.values(trainer), history.history

    expected, logs = alone(on_rank)
    with mock.patch.object(update, "LEAST_BYTES", least_bytes):
        results = run_ranks(size, on_rank)
    for found, history in results:
        assert (found == results[0][0]).all()  # to the bit among the ranks
        numpy.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
        for name in logs:
            numpy.testing.assert_allclose(history[name], logs[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("set", {"validation_batch_size": 2}, "validation_batch_size cannot be given with a Dataset, which gives"),
        ("batches", {"validation_batch_size": 2}, "validation_batch_size cannot be given with a list, which gives"),
        ("four", {}, r"validation_data is a tuple \(x,\), \(x, y\) or \(x, y, sample_weight\), got one of 4"),
        ("none", {}, "validation_data is a tuple .*, got one of 0"),
    ],
)
def test_what_a_validation_would_leave_out_is_refused(kind, options, message):
    x, y = net.rows(4)
    weights = numpy.ones(4)
    data = {
        "set": mpidist.data.Dataset.from_arrays((x, y)).batch(4),
        "batches": [(x, y), (x, y)],
        "four": (x, y, weights, weights),
        "none": (),
    }[kind]
    with pytest.raises(ValueError, match=message):
        net.trainer().fit(x, y, validation_data=data, verbose=0, **options)


def test_a_validation_of_batches_does_not_take_the_batch_size_of_arrays():
    x, y = net.rows(4)
    data = mpidist.data.Dataset.from_arrays((x, y)).batch(3)
    assert "val_loss" in net.trainer().fit(x, y, batch_size=2, validation_data=data, verbose=0).history


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_short_floats_train_to_rounding(dtype):
    x, y = (each.astype(dtype) for each in net.rows(13))

    def on_rank():
        strategy = mpidist.MirroredStrategy()
        trainer = mpidist.Trainer(net.value_and_grad, net.variables(strategy, dtype), mpidist.optimizers.SGD(0.1))
        trainer.fit(x, y, batch_size=5, epochs=2)
        return net.values(trainer)

    tolerance = 1e-6 if dtype == "float32" else 5e-3
    for found in run_ranks(3, on_rank):
        numpy.testing.assert_allclose(found, alone(on_rank), rtol=tolerance, atol=tolerance)


def test_fit_does_what_a_loop_by_hand_does():
    x, y = net.rows(10)

    def by_hand():
        strategy = mpidist.MirroredStrategy()
        variables, optimizer = net.variables(strategy), mpidist.optimizers.Adam(0.01)

        def step(batch):
            parameters = {name: variable.value for name, variable in variables.items()}
            _, gradients = net.value_and_grad(parameters, *batch)
            optimizer.apply_gradients([(gradients[name], variables[name]) for name in sorted(variables)])

        for _ in range(3):
            for start in range(0, 10, 4):
                strategy.run(step, args=((x[start : start + 4], y[start : start + 4]),))
        return numpy.concatenate([variables[name].numpy().reshape(-1) for name in sorted(variables)])

    def by_fit():
        trainer = net.trainer(optimizer=mpidist.optimizers.Adam(0.01))
        trainer.fit(x, y, batch_size=4, epochs=3, shuffle=False)
        return net.values(trainer)

    numpy.testing.assert_array_equal(alone(by_fit), alone(by_hand))
    numpy.testing.assert_allclose(run_ranks(4, by_fit)[0], alone(by_hand), rtol=1e-12)


def test_the_default_strategy_trains():
    trainer = net.trainer(mpidist.get_strategy())
    history = trainer.fit(*net.rows(12), batch_size=4, epochs=2)
    assert history.epoch == [0, 1] and history.history["loss"][1] < history.history["loss"][0]


# -- one collective a step --------------------------------------------------------------------------------------------


def calls_of_fit(**options):
    strategy = mpidist.MirroredStrategy()
    trainer, data = net.trainer(strategy), mpidist.data.Dataset.from_arrays(net.rows(8)).repeat().batch(4)
    trainer.fit(data, steps_per_epoch=1)  # the first step makes plans
    control = strategy.extended.communicator.control
    before = control.call
    trainer.fit(strategy.experimental_distribute_dataset(data), verbose=0, **options)
    return control.call - before


def test_a_step_is_one_collective():
    few, many = run_ranks(2, calls_of_fit_both)[0]
    assert many - few == 90


def test_where_gradients_are_long_their_counts_go_ahead_and_they_are_applied_while_they_are_summed(monkeypatch):
    monkeypatch.setattr(update, "LEAST_BYTES", 1)
    few, many = run_ranks(2, calls_of_fit_both)[0]
    assert many - few == 2 * 90

    def on_rank():
        trainer = net.trainer(optimizer=mpidist.optimizers.Adam(0.05))
        trainer.fit(*net.rows(10), batch_size=4, verbose=0)
        return [each.is_active for each in trainer.optimizer._updates._sharded._active]

    assert run_ranks(3, on_rank) == [[True]] * 3


def test_gradients_in_shared_buffers_may_be_of_uneven_parts(monkeypatch):
    """Whether they are summed where they lie is decided by all ranks: one of these has just the mean number of rows."""
    monkeypatch.setattr(update, "LEAST_BYTES", 1)
    x, y = net.rows(6)

    def on_rank():
        trainer = net.trainer()
        buffers = trainer.strategy.extended.gradient_buffers(trainer.variables)

        def in_buffers(parameters, *batch):
            loss, gradients = net.value_and_grad(parameters, *batch)
            for buffer, name in zip(buffers, sorted(gradients), strict=True):  # the order of the trainer's variables
                buffer[...] = gradients[name]
            return loss, dict(zip(sorted(gradients), buffers, strict=True))

        def part(context):
            mine = [slice(0, 3), slice(3, 5), slice(5, 6)][context.input_pipeline_id]
            return mpidist.data.Dataset.from_arrays((x[mine], y[mine])).batch(3)

        again = mpidist.Trainer(in_buffers, trainer._model.structure, trainer.optimizer, metrics=["accuracy"])
        for _ in range(4):
            again.fit(trainer.strategy.distribute_datasets_from_function(part), verbose=0)
            again.fit(x, y, batch_size=6, shuffle=False, verbose=0)  # even parts, summed where they lie
        return net.values(trainer)

    def alone_on_all():
        trainer = net.trainer()
        trainer.fit(x, y, batch_size=6, epochs=8, shuffle=False, verbose=0)
        return net.values(trainer)

    expected = alone(alone_on_all)
    for found in run_ranks(3, on_rank):
        numpy.testing.assert_allclose(found, expected, rtol=1e-12)


def calls_of_fit_both():
    return calls_of_fit(steps_per_epoch=10), calls_of_fit(steps_per_epoch=100)


def test_callbacks_and_metrics_add_no_collective_to_a_step():
    class Watching(Callback):
        def on_train_batch_end(self, batch, logs=None):
            assert logs["loss"] > 0

    def on_rank():
        few = calls_of_fit(steps_per_epoch=10, callbacks=[Watching(), mpidist.callbacks.TerminateOnNaN()])
        many = calls_of_fit(steps_per_epoch=30, callbacks=[Watching(), mpidist.callbacks.TerminateOnNaN()])
        return many - few

    assert set(run_ranks(3, on_rank)) == {20}


# -- data -------------------------------------------------------------------------------------------------------------


def global_batches(x, y, size):
    for start in range(0, len(x), size):
        yield x[start : start + size], y[start : start + size]


FEEDS = {
    "arrays": lambda x, y: ((x, y), {"batch_size": 4, "shuffle": False}),
    "tuple of arrays": lambda x, y: (((x, y),), {"batch_size": 4, "shuffle": False}),
    "data set": lambda x, y: ((mpidist.data.Dataset.from_arrays((x, y)).batch(4),), {}),
    "repeated data set": lambda x, y: (
        (mpidist.data.Dataset.from_arrays((x, y)).repeat(2).batch(4),),
        {"steps_per_epoch": 5},
    ),
    "list of batches": lambda x, y: ((Batched(x, y),), {}),
    "generator": lambda x, y: ((global_batches(x, y, 4),), {}),
}


class Batched:
    """Batches that can be gone through again, as a loader of another library gives them."""

    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return global_batches(self.x, self.y, 4)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("feed", sorted(FEEDS))
def test_every_kind_of_data_trains_alike(feed, size):
    x, y = net.rows(10)

    def on_rank(feed):
        trainer = net.trainer()
        args, options = FEEDS[feed](x, y)
        epochs = 1 if "generator" in feed or "repeated" in feed else 2
        trainer.fit(*args, epochs=epochs, **options)
        if feed == "generator":
            trainer.fit(global_batches(x, y, 4))
        return net.values(trainer)

    expected = alone(on_rank, "arrays")
    if feed == "repeated data set":  # batches straddle the passes there
        x, y = numpy.tile(x, (2, 1)), numpy.tile(y, (2, 1))
        expected = alone(lambda: _one_epoch(x, y))
        x, y = x[:10], y[:10]
    for found in run_ranks(size, on_rank, feed):
        numpy.testing.assert_allclose(found, expected, rtol=1e-12)


def _one_epoch(x, y):
    trainer = net.trainer()
    trainer.fit(x, y, batch_size=4, shuffle=False)
    return net.values(trainer)


def test_each_rank_may_have_data_of_its_own():
    x, y = net.rows(12)

    def on_rank():
        strategy = mpidist.MirroredStrategy()
        trainer = net.trainer(strategy)

        def own(context):
            first = 0 if context.input_pipeline_id == 0 else 4  # 4 rows here and 8 there, by 2
            mine = slice(first, 4 + 2 * first)
            return mpidist.data.Dataset.from_arrays((x[mine], y[mine])).batch(2)

        trainer.fit(strategy.distribute_datasets_from_function(own))
        return net.values(trainer)

    def by_batches():
        trainer = net.trainer()
        order = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9], [10, 11]]
        for rows in order:
            trainer.fit(x[rows], y[rows], batch_size=4, shuffle=False)
        return net.values(trainer)

    for found in run_ranks(2, on_rank):
        numpy.testing.assert_allclose(found, alone(by_batches), rtol=1e-12)


def test_a_generator_may_last_for_several_epochs():
    x, y = net.rows(16)

    def on_rank():
        trainer = net.trainer()
        with pytest.warns(UserWarning, match="ended after 1 of 3 steps"):
            history = trainer.fit(global_batches(x, y, 4), steps_per_epoch=3, epochs=2)
        return history.epoch, trainer.steps_made

    assert alone(on_rank) == ([0, 1], 4)


def test_data_without_a_batch_are_an_error():
    for size in (1, 2):
        with pytest.raises(InputError, match="batch for step 0 of epoch 1: a generator can be walked through once"):
            run_ranks(size, lambda: net.trainer().fit(global_batches(*net.rows(4), 4), epochs=2))
    for empty in ([], Dataset.from_arrays(net.rows(4)).take(0).batch(2)):
        with pytest.raises(ValueError, match="no batch in epoch 0; an iterator can be gone through once only"):
            net.trainer(mpidist.get_strategy()).fit(empty)


@pytest.mark.parametrize("options", [{"y": numpy.zeros(4)}, {"batch_size": 2}])
def test_what_belongs_to_arrays_is_refused_with_data_sets(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} cannot be given with a Dataset"):
        alone(lambda: net.trainer().fit(mpidist.data.Dataset.from_arrays(net.rows(4)).batch(2), **options))


def test_an_initial_epoch_goes_on_where_the_epochs_before_ended():
    x, y = net.rows(11)

    def at_once():
        trainer = net.trainer()
        trainer.fit(x, y, batch_size=4, epochs=5)
        return net.values(trainer)

    def in_parts():
        trainer = net.trainer()
        trainer.fit(x, y, batch_size=4, epochs=2)
        history = trainer.fit(x, y, batch_size=4, epochs=5, initial_epoch=2)
        assert history.epoch == [2, 3, 4]
        return net.values(trainer)

    numpy.testing.assert_array_equal(alone(in_parts), alone(at_once))


def test_an_initial_epoch_of_repeated_data_skips_what_was_seen():
    data = mpidist.data.Dataset.from_arrays(net.rows(10)).shuffle(seed=3).repeat().batch(4)

    def at_once():
        trainer = net.trainer()
        trainer.fit(data, epochs=4, steps_per_epoch=2)
        return net.values(trainer)

    def in_parts():
        trainer = net.trainer()
        trainer.fit(data, epochs=3, steps_per_epoch=2)
        trainer.fit(data, epochs=4, steps_per_epoch=2, initial_epoch=3)
        return net.values(trainer)

    numpy.testing.assert_array_equal(alone(in_parts), alone(at_once))


class Rows:
    """A trainer of one variable that keeps the rows of this rank in order, epoch by epoch."""

    def __init__(self):
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(1), name="w")
        self.epochs = []
        self.trainer = mpidist.Trainer(
            self.value_and_grad, variable, mpidist.optimizers.SGD(0.1), loss_fn=lambda w, x: float(x.mean())
        )

    def value_and_grad(self, w, x):
        self.epochs[-1] += x.tolist()
        return float(x.mean()), numpy.ones(1)

    def fit(self, x, *callbacks, **options):
        begin = LambdaCallback(on_epoch_begin=lambda epoch, logs: self.epochs.append([]))
        self.trainer.fit(x, callbacks=[begin, *callbacks], verbose=0, **options)
        return self.epochs


@pytest.mark.filterwarnings("ignore:the data ended after")
@pytest.mark.parametrize(("rows", "steps"), [(5, 3), (5, 7), (6, 3), (4, 4)])
def test_an_initial_epoch_begins_where_it_does_in_a_whole_training(rows, steps):
    def on_rank(initial_epoch):
        options = {"epochs": 5, "steps_per_epoch": steps, "initial_epoch": initial_epoch}
        return Rows().fit(numpy.arange(rows) * 1.0, batch_size=1, **options)

    whole = alone(on_rank, 0)
    assert [alone(on_rank, epoch) for epoch in range(1, 5)] == [whole[epoch:] for epoch in range(1, 5)]


class Back(mpidist.callbacks.Callback):
    """Saves the training after its first epoch, and goes back to that once."""

    def __init__(self, path, turn="on_epoch_end"):
        self.path, self.is_done = path, False
        setattr(self, turn, self.go_back)

    def go_back(self, number, logs):
        epoch = self.trainer.epoch
        if epoch == 1 and not self.path.exists():
            self.checkpoint = mpidist.Checkpoint(**self.trainer.checkpoint_objects())
            self.checkpoint.save(self.path)
        elif epoch == 2 and not self.is_done:
            self.is_done = True
            self.checkpoint.restore(self.path)


@pytest.mark.parametrize("steps", [None, 3])
def test_a_training_that_goes_back_to_a_checkpoint_goes_back_in_its_data(tmp_path, steps):
    def on_rank():
        data = mpidist.data.Dataset.range(9).map(float)
        data = data.batch(3) if steps is None else data.repeat().batch(1)
        return Rows().fit(data, Back(tmp_path / "a.h5"), epochs=3, steps_per_epoch=steps)

    whole = [[*map(float, range(9))]] * 4
    by_steps = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    assert alone(on_rank) == (whole if steps is None else by_steps)


@pytest.mark.parametrize("steps", [None, 6])
def test_a_checkpoint_of_the_present_place_leaves_the_data_as_they_are(tmp_path, steps):
    def on_rank():
        def there_and_back(batch, logs):
            if rows.trainer.steps_made in (3, 12):
                checkpoint = mpidist.Checkpoint(**rows.trainer.checkpoint_objects())
                checkpoint.save(tmp_path / "a.h5")
                checkpoint.restore(tmp_path / "a.h5")

        rows = Rows()
        data = mpidist.data.Dataset.range(6).map(float).batch(1)
        return rows.fit(data, LambdaCallback(on_train_batch_end=there_and_back), epochs=3, steps_per_epoch=steps)

    assert alone(on_rank) == [[*map(float, range(6))]] * 3


@pytest.mark.parametrize("steps", [None, 5])
def test_a_checkpoint_of_the_present_place_is_refused_where_its_batch_is_taken_already(tmp_path, steps):
    def on_rank():
        def save(batch, logs):
            mpidist.Checkpoint(**rows.trainer.checkpoint_objects()).save(tmp_path / "a.h5")

        def restore(batch, logs):
            if batch == 2:
                mpidist.Checkpoint(**rows.trainer.checkpoint_objects()).restore(tmp_path / "a.h5")

        rows = Rows()
        turns = LambdaCallback(on_train_batch_begin=restore, on_train_batch_end=save)
        rows.fit(numpy.arange(5.0), turns, batch_size=1, steps_per_epoch=steps)

    with pytest.raises(RuntimeError, match="a checkpoint of step 2 of epoch 0 before step 2 of epoch 0, where the dat"):
        alone(on_rank)


@pytest.mark.parametrize("turn", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_begin"])
def test_a_training_does_not_go_back_where_its_data_cannot(tmp_path, turn):
    with pytest.raises(RuntimeError, match="a callback has restored a checkpoint of step . of epoch 1 .*on_epoch_end"):
        alone(lambda: Rows().fit(numpy.arange(4.0), Back(tmp_path / "a.h5", turn), batch_size=2, epochs=3))


@pytest.mark.parametrize("steps", [None, 4])
@pytest.mark.parametrize("stop", [5, 8, 9])
@pytest.mark.parametrize("is_validated", [False, True])
def test_an_evaluation_of_the_training_data_leaves_them_where_they_are(tmp_path, steps, stop, is_validated):
    def on_rank(folder, most=100):
        rows = Rows()
        trainer = rows.trainer

        def after(batch, logs):
            if not is_validated:
                trainer.evaluate(data, verbose=0)
            if trainer.steps_made == most:
                trainer.stop_now()

        data = trainer.strategy.experimental_distribute_dataset(mpidist.data.Dataset.range(8).map(float).batch(1))
        saves = mpidist.callbacks.ModelCheckpoint(folder, save_freq=1, resume=True)
        options = {"validation_data": data, "validation_steps": 3} if is_validated else {}
        rows.fit(data, LambdaCallback(on_train_batch_end=after), saves, epochs=4, steps_per_epoch=steps, **options)
        return sum(rows.epochs, [])

    whole = alone(on_rank, tmp_path / "whole")
    assert alone(on_rank, tmp_path / "parts", stop) + alone(on_rank, tmp_path / "parts") == whole


@pytest.mark.parametrize("is_validated", [False, True])
def test_an_evaluation_of_the_training_data_takes_all_rows_where_the_training_goes_on_in_an_epoch(is_validated):
    def on_rank():
        rows, losses = Rows(), []

        def begin(epoch, logs):
            if not is_validated:
                losses.append(rows.trainer.evaluate(data, verbose=0, return_dict=True)["loss"])

        def end(epoch, logs):
            losses.append(logs.get("val_loss"))

        data = rows.trainer.strategy.experimental_distribute_dataset(mpidist.data.Dataset.range(8).map(float).batch(1))
        data.begin(0, 5)
        options = {"validation_data": data} if is_validated else {}
        trained = rows.fit(data, LambdaCallback(on_epoch_begin=begin, on_epoch_end=end), epochs=1, **options)
        return trained, losses[-1 if is_validated else 0]

    assert alone(on_rank) == ([[5.0, 6.0, 7.0]], 3.5)


@pytest.mark.parametrize("method", ["evaluate", "predict", "fit"])
def test_an_evaluation_that_would_not_end_is_refused(method):
    def on_rank():
        x, y = net.rows(4)
        data = mpidist.data.Dataset.from_arrays((x, y)).batch(2).repeat()
        given = ((x, y), {"validation_data": data}) if method == "fit" else ((data,), {})
        getattr(net.trainer(), method)(*given[0], verbose=0, **given[1])

    with pytest.raises(ValueError, match="the data set repeats forever; give validation_steps, or steps"):
        alone(on_rank)


@pytest.mark.parametrize("freq", [0, -1, [1, 2]])
def test_epochs_between_validations_are_a_whole_number(freq):
    with pytest.raises(ValueError, match="validation_freq must be a whole number of epochs, 1 or more, got "):
        alone(lambda: net.trainer().fit(*net.rows(4), validation_data=net.rows(2), validation_freq=freq))


# -- ends that ranks vote for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("voter", [0, -1])
def test_one_rank_ends_the_training_of_all_after_the_step_behind_its_vote(size, voter):
    def on_rank():
        trainer = net.trainer()
        rank = trainer.strategy.extended.replica_id

        def vote(batch, logs):
            trainer.stop_training = rank == voter % size and batch >= 2

        history = trainer.fit(
            *net.rows(40), batch_size=4, epochs=3, callbacks=[LambdaCallback(on_train_batch_end=vote)]
        )
        return trainer.steps_made, history.epoch

    assert set(map(str, run_ranks(size, on_rank))) == {"(4, [0])"}


@pytest.mark.parametrize("size", [1, 3])
def test_one_rank_ends_the_training_of_all_at_the_end_of_an_epoch(size):
    def on_rank():
        trainer = net.trainer()

        def vote(epoch, logs):
            trainer.stop_training = trainer.strategy.extended.replica_id == size - 1 and epoch == 1

        return trainer.fit(*net.rows(9), epochs=5, callbacks=[LambdaCallback(on_epoch_end=vote)]).epoch

    assert run_ranks(size, on_rank) == [[0, 1]] * size


@pytest.mark.parametrize("stop", [2, 3])  # in the middle of an epoch, and at its last batch
@pytest.mark.parametrize("sizes", [(1, 1), (2, 3)])
def test_a_checkpoint_saved_where_a_training_was_ended_goes_on_there(stop, sizes, tmp_path):
    x, y = net.rows(11)

    def on_rank(folder, step=None):
        trainer = net.trainer()

        def end(batch, logs):
            if trainer.steps_made == step:
                trainer.stop_now()

        callbacks = [ModelCheckpoint(folder, resume=True), LambdaCallback(on_train_batch_end=end)]
        history = trainer.fit(x, y, batch_size=4, epochs=2, callbacks=callbacks, verbose=0)
        return net.values(trainer), history.epoch, history.history["loss"], trainer.steps_made

    expected, _, losses, _ = alone(on_rank, tmp_path / "whole")
    run_ranks(sizes[0], on_rank, tmp_path / "ended", stop)
    for found, epochs, those, steps in run_ranks(sizes[1], on_rank, tmp_path / "ended"):
        assert (epochs, steps) == ([0, 1], 6)
        numpy.testing.assert_allclose(found, expected, rtol=1e-12)
        numpy.testing.assert_allclose(those, losses, rtol=1e-12)


# -- evaluate and predict ---------------------------------------------------------------------------------------------


@settings(max_examples=30)
@given(size=st.integers(1, 8), count=st.integers(1, 20), batch=st.integers(1, 12))
def test_predictions_are_in_input_order_one_for_each_row(size, count, batch):
    x = numpy.arange(count, dtype="float64")[:, None] * [[1.0, 0.0, 0.0]]

    def on_rank():
        def predict(parameters, part):
            return {"row": part[:, 0].astype("int32"), "pair": (part * 2, [part[:, :1] > 3])}

        return net.trainer(predict_fn=predict).predict(x, batch_size=batch)

    for found in run_ranks(size, on_rank):
        assert found["row"].dtype == "int32"
        numpy.testing.assert_array_equal(found["row"], numpy.arange(count))
        numpy.testing.assert_array_equal(found["pair"][0], x * 2)
        numpy.testing.assert_array_equal(found["pair"][1][0], x[:, :1] > 3)


Scores = namedtuple("Scores", ["value", "pair"])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_predictions_are_named_tuples_on_ranks_without_rows_too(count):
    Here = namedtuple("Here", ["first", "second"])  # which no process finds by its name
    x = numpy.arange(count * 3.0).reshape(count, 3)

    def on_rank():
        trainer = net.trainer(predict_fn=lambda parameters, part: Scores(2 * part, Here(part[:, 0], [part[:, 1]])))
        return trainer.predict(x, batch_size=2)

    for found in run_ranks(3, on_rank):
        assert type(found) is Scores and type(found.pair).__name__ == "Here"
        numpy.testing.assert_array_equal(found.value, 2 * x)
        numpy.testing.assert_array_equal(found.pair.first, x[:, 0])
        numpy.testing.assert_array_equal(found.pair.second[0], x[:, 1])


def test_predictions_of_pairs_are_those_of_the_inputs():
    x, y = net.rows(7)

    def on_rank():
        trainer = net.trainer()
        return trainer.predict(mpidist.data.Dataset.from_arrays((x, y)).batch(3)), trainer.predict(x)

    for of_pairs, of_inputs in run_ranks(2, on_rank):
        numpy.testing.assert_array_equal(of_pairs, of_inputs)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_evaluate_weighs_by_rows(size):
    x, y = net.rows(13)

    def on_rank():
        trainer = net.trainer(loss_fn=net.loss, metrics=["binary_accuracy"])
        return trainer.evaluate(x, y, batch_size=5), trainer.evaluate(x, y, batch_size=5, return_dict=True)

    parameters = {name: variable.numpy() for name, variable in net.variables(mpidist.get_strategy()).items()}
    accuracy = ((net.predict(parameters, x) > 0.5) == y).mean()
    for as_list, as_dict in run_ranks(size, on_rank):
        numpy.testing.assert_allclose(as_list, [net.loss(parameters, x, y), accuracy], rtol=1e-12)
        assert as_dict == {"loss": as_list[0], "binary_accuracy": as_list[1]}


def test_evaluate_without_metrics_is_the_loss():
    def on_rank():
        return net.trainer(metrics=()).evaluate(*net.rows(5))

    assert isinstance(alone(on_rank), float)


def test_an_evaluation_in_the_middle_of_an_epoch_changes_nothing():
    x, y = net.rows(12)

    def on_rank(evaluates):
        trainer = net.trainer()

        def evaluate(batch, logs):
            trainer.evaluate(x, y)

        callbacks = [LambdaCallback(on_train_batch_end=evaluate)] if evaluates else []
        return trainer.fit(x, y, batch_size=4, callbacks=callbacks).history

    assert alone(on_rank, True) == alone(on_rank, False)


def test_validation_is_made_every_so_many_epochs_and_steps():
    def on_rank():
        trainer = net.trainer()
        data = mpidist.data.Dataset.from_arrays(net.rows(8)).batch(2)
        seen = []
        callbacks = [LambdaCallback(on_test_batch_end=lambda batch, logs: seen.append(batch))]
        options = {"validation_freq": 2, "validation_steps": 3, "callbacks": callbacks}
        history = trainer.fit(data, epochs=4, validation_data=data, **options)
        return len(history.history["val_loss"]), seen

    assert run_ranks(2, on_rank) == [(2, [0, 1, 2] * 2)] * 2


# -- what functions may return ----------------------------------------------------------------------------------------


def fit_with(value_and_grad, **options):
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        bad = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1

        def fn(parameters, x, y):
            return value_and_grad(parameters, x, y) if bad else net.value_and_grad(parameters, x, y)

        trainer = mpidist.Trainer(fn, net.variables(strategy), mpidist.optimizers.SGD(0.1), **options)
        trainer.fit(*net.rows(8), batch_size=4)

    return on_rank


def changed(**gradients):
    def value_and_grad(parameters, x, y):
        value, found = net.value_and_grad(parameters, x, y)
        return value, {**found, **gradients}

    return value_and_grad


BAD = {
    "no pair": (lambda *args: 1.0, TypeError, r"value_and_grad_fn must return \(loss, gradients\), got a float"),
    "three": (lambda *args: (1.0, 2.0, 3.0), TypeError, r"got a tuple of 3"),
    "loss of rows": (lambda p, x, y: (numpy.zeros(2), {}), ValueError, r"a number; got an array of shape \(2,\)"),
    "loss of None": (lambda p, x, y: (None, {}), TypeError, "a loss that is a number, got a NoneType"),
    "too few": (lambda p, x, y: (0.0, [x]), ValueError, "a gradient for each of the 3 variables, got 1 of them"),
    "shape": (changed(b1=numpy.zeros(3)), ValueError, r"gradient of shape \(3,\) for variable 'Variable_1', expected"),
    "None": (changed(w1=None), ValueError, "returned None as the gradient for variable 'Variable'"),
    "text": (changed(b1=numpy.array(["a"] * net.HIDDEN)), TypeError, "dtype <U1 for variable 'Variable_1'"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_functions_may_not_return_is_said_with_the_rank(name):
    value_and_grad, kind, message = BAD[name]
    with pytest.raises(kind, match=f"rank 1 of 2: .*{message}"):
        run_ranks(2, fit_with(value_and_grad))


def test_gradients_that_might_go_to_one_anothers_variables_are_refused():
    """Dicts are walked in the order of their keys, and lists in their own."""

    def in_a_list(parameters, x, y):
        value, found = net.value_and_grad(parameters, x, y)
        return value, [found["w1"], found["b1"], found["w2"]]

    def by_other_keys(parameters, x, y):
        value, found = net.value_and_grad(parameters, x, y)
        return value, {"w1": found["w1"], "b1": found["b1"], "last": found["w2"]}

    expected = "in the dicts of the variables, by 'b1', 'w1', 'w2'; got them by"
    for function, got in [(in_a_list, "no key, no key, no key"), (by_other_keys, "'b1', 'last', 'w1'")]:
        with pytest.raises(ValueError, match=f"rank 1 of 2: .*{expected} {got}"):
            run_ranks(2, fit_with(function))

    w = [mpidist.Variable(numpy.zeros(2)) for _ in range(2)]
    trainer = mpidist.Trainer(lambda p, x: (0.0, {"a": p[0], "b": p[1]}), w, mpidist.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="by no key, no key; got them by 'a', 'b'"):
        trainer.fit(numpy.zeros(4), verbose=0)


@pytest.mark.parametrize("as_dict", [dict, lambda pairs: {"in": dict(pairs)}], ids=["flat", "nested"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_by_other_keys_in_a_later_step_are_refused(size, as_dict):
    """Before, only those of the first step were looked at, and the others went to one another's variables."""

    def on_rank():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            variables = as_dict([(name, mpidist.Variable(numpy.zeros(2), name=name)) for name in "ab"])
        steps = itertools.count()
        is_last = strategy.extended.replica_id == size - 1

        def value_and_grad(parameters, x):
            names = "bc" if next(steps) == 2 and is_last else "ba"
            return 0.0, as_dict([(name, numpy.full(2, 1.0 + "abc".index(name))) for name in names])

        trainer = mpidist.Trainer(value_and_grad, variables, mpidist.optimizers.SGD(1.0))
        with pytest.raises(
            ValueError if is_last else RemoteReplicaError, match="got them by .*b', '.*c': they might go"
        ):
            trainer.fit(numpy.zeros(4 * size), batch_size=size, verbose=0)
        return [each.numpy().tolist() for each in nest.flatten(variables)]

    assert run_ranks(size, on_rank) == [[[-2.0, -2.0], [-4.0, -4.0]]] * size  # of two steps


def test_functions_are_not_called_without_rows():
    def on_rank():
        trainer = net.trainer()
        rows = []
        fn = trainer._model._value_and_grad_fn
        trainer._model._value_and_grad_fn = lambda parameters, x, y: rows.append(len(x)) or fn(parameters, x, y)
        trainer.fit(*net.rows(5), batch_size=4)
        return rows

    assert run_ranks(4, on_rank) == [[1, 1], [1], [1], [1]]


def test_variables_that_are_not_trainable_are_read_and_left_alone():
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            frozen = mpidist.Variable(numpy.array([2.0]), trainable=False)
            scale = mpidist.Variable(numpy.array([1.0]))

        def value_and_grad(parameters, x):
            frozen, scale = parameters
            return float((frozen * scale * x).mean()), [None, numpy.array([float(frozen[0] * x.mean())])]

        trainer = mpidist.Trainer(value_and_grad, [frozen, scale], mpidist.optimizers.SGD(1.0))
        trainer.fit(numpy.arange(5.0), batch_size=5)
        return frozen.numpy()[0], scale.numpy()[0]

    numpy.testing.assert_allclose(run_ranks(2, on_rank), [[2.0, -3.0]] * 2)  # 1 - 2 * mean(0 .. 4)


def test_rows_of_a_gradient_are_a_gradient():
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            table = mpidist.Variable(numpy.zeros((6, 2)))

        def value_and_grad(parameters, words):
            return 0.0, mpidist.IndexedSlices(numpy.ones((len(words), 2)) / len(words), words)

        mpidist.Trainer(value_and_grad, table, mpidist.optimizers.SGD(1.0)).fit(numpy.array([1, 1, 4]), batch_size=3)
        return table.numpy()[:, 0]

    for found in run_ranks(2, on_rank):
        numpy.testing.assert_allclose(found, [0, -2 / 3, 0, 0, -1 / 3, 0], rtol=1e-12)


# -- what makes no sense ----------------------------------------------------------------------------------------------


def test_metrics_need_labels_and_predictions():
    with pytest.raises(ValueError, match=r"metrics need batches \(x, y\) with labels, got a ndarray"):
        alone(lambda: net.trainer(loss_fn=lambda parameters, x: 0.0).evaluate(net.rows(4)[0]))
    with pytest.raises(ValueError, match="give the trainer a predict_fn"):
        alone(lambda: net.trainer(predict_fn=None).predict(net.rows(4)[0]))


def test_predictions_of_several_shapes_are_refused():
    def on_rank():
        w, sgd = mpidist.Variable(numpy.zeros(1)), mpidist.optimizers.SGD(0.1)
        trainer = mpidist.Trainer(
            lambda w, x: (0.0, w), w, sgd, predict_fn=lambda w, x: numpy.zeros((len(x), int(x[0])))
        )
        trainer.predict(numpy.arange(1.0, 3.0), batch_size=1)

    with pytest.raises(ValueError, match=r"rank 0: predict_fn returned .* shapes for a row: \[\(1,\), \(2,\)\]"):
        alone(on_rank)


def test_predictions_must_be_one_for_each_row():
    with pytest.raises(ValueError, match=r"rank [01]: predict_fn returned an array of shape \(1,\) for 2 rows"):
        run_ranks(2, lambda: net.trainer(predict_fn=lambda parameters, x: x[:1, 0]).predict(net.rows(4)[0]))


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"metrics": ["accuracy", "accuracy"]}, ValueError, "these come twice: ..accuracy"),
        ({"optimizer": "sgd"}, TypeError, "optimizer must be a mpidist.optimizers.Optimizer, got str"),
    ],
)
def test_a_trainer_of_what_makes_no_sense(options, kind, message):
    with pytest.raises(kind, match=message):
        net.trainer(mpidist.get_strategy(), **options)


def test_a_trainer_needs_variables_of_one_strategy():
    def of_two():
        own, default = net.variables(mpidist.MirroredStrategy()), net.variables(mpidist.get_strategy())
        mpidist.Trainer(net.value_and_grad, [own, default], mpidist.optimizers.SGD(0.1))

    with pytest.raises(ValueError, match="belong to several strategies"):
        alone(of_two)
    with pytest.raises(TypeError, match="variables must be made by `mpidist.Variable`; number 0 is a ndarray"):
        mpidist.Trainer(net.value_and_grad, [numpy.zeros(2)], mpidist.optimizers.SGD(0.1))


def test_a_trainer_trains_a_variable_once():
    w, fixed = mpidist.Variable(numpy.ones(1), name="w"), mpidist.Variable(numpy.zeros(1), trainable=False)
    x, y = numpy.ones((4, 1)), numpy.zeros(4)

    def value_and_grad(parameters, x, y):
        return 0.0, [numpy.ones(1), *parameters[1:]]

    begun = []
    tied = mpidist.Trainer(
        value_and_grad, [w, fixed, [w]], mpidist.optimizers.SGD(0.1), predict_fn=lambda p, x: x @ (p[0] + p[2][0])
    )
    told = mpidist.callbacks.LambdaCallback(on_train_begin=begun.append)
    with pytest.raises(ValueError, match=r"variable 'w\w*' comes twice among the variables to train"):
        tied.fit(x, y, batch_size=2, verbose=0, callbacks=[told])
    assert not begun and tied.predict(x, batch_size=2, verbose=0).tolist() == [2.0] * 4
    of_once = mpidist.Trainer(value_and_grad, [w, fixed, fixed], mpidist.optimizers.SGD(0.1))
    of_once.fit(x, y, batch_size=2, verbose=0, callbacks=[told])
    assert begun and w.value.tolist() == [1 - 2 * 0.1]


def test_a_metric_of_another_strategy_is_refused():
    def on_rank():
        with mpidist.OneDeviceStrategy("/cpu:0").scope():
            mean = mpidist.metrics.Mean()
        net.trainer(metrics=[mean])

    with pytest.raises(ValueError, match="metric 'mean' belongs to"):
        alone(on_rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("at", ["batch", "epoch"])
def test_on_a_mesh_one_rank_ends_the_training_of_all_and_one_is_the_chief(size, at):
    def on_rank():
        topology = mpidist.tpu.experimental.initialize_tpu_system()
        assignment = mpidist.tpu.experimental.DeviceAssignment.build(topology, [1, 1, 1, 2])
        trainer = net.trainer(mpidist.TPUStrategy(experimental_device_assignment=assignment))

        def vote(number, logs):
            trainer.stop_training = trainer.strategy.extended.whole.rank == 1 and number == 1

        hook = {f"on_{'train_batch' if at == 'batch' else 'epoch'}_end": vote}
        trainer.fit(*net.rows(12), batch_size=4, epochs=4, verbose=0, callbacks=[LambdaCallback(**hook)])
        return trainer.steps_made, trainer.from_chief(trainer.strategy.extended.whole.rank), trainer.is_chief

    steps = 3 if at == "batch" else 6
    assert run_ranks(size, on_rank) == [(steps, 0.0, rank == 0) for rank in range(size)]


def test_a_step_that_is_left_out_is_a_step_but_no_update():
    def on_rank():
        given = iter([1.0, numpy.inf, 1.0])
        trainer = net.trainer(optimizer=mpidist.optimizers.SGD(0.1, skip_nonfinite=True))

        def flawed(parameters, x, y):
            factor = next(given)
            loss, gradients = net.value_and_grad(parameters, x, y)
            return loss, {name: gradient * factor for name, gradient in gradients.items()}

        again = mpidist.Trainer(flawed, trainer._model.structure, trainer.optimizer)
        again.fit(*net.rows(12), batch_size=4, verbose=0)
        return again.steps_made, again.optimizer.iterations, again.optimizer.skipped_steps

    assert run_ranks(2, on_rank) == [(3, 2, 1)] * 2


ROWS = numpy.arange(16, dtype="float32").reshape(8, 2) / 10


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([ROWS[:4], ROWS[4:]], [0.625, 0.7]),  # w becomes (w + mean of a batch) / 2: of (.3, .4), then of (1.1, 1.2)
        ([(ROWS[:4],), (ROWS[4:],)], [0.625, 0.7]),
        ([[ROWS[:4]], [ROWS[4:]]], [0.625, 0.7]),
        ([ROWS[:4], ROWS[4:6]], [0.525, 0.6]),  # of (.9, 1)
    ],
    ids=["arrays", "tuples", "lists", "a shorter one"],
)
def test_a_list_of_arrays_is_batches(batches, expected, size):
    def on_rank():
        with mpidist.MirroredStrategy().scope():
            variable = mpidist.Variable(numpy.zeros(2, "float32"))

        def loss(w, x):
            return 0.0, 2 * (w - x.mean(axis=0))

        trainer = mpidist.Trainer(loss, variable, mpidist.optimizers.SGD(0.25))
        trainer.fit(batches, verbose=0)
        return trainer.steps_made, variable.value.tolist()

    for steps, found in run_ranks(size, on_rank):
        assert steps == 2 and found == pytest.approx(expected)


def test_a_list_of_arrays_with_labels_is_one_array():
    seen = []

    def loss(w, x, y):
        seen.append((x.shape, y.shape))
        return 0.0, numpy.zeros(1)

    trainer = mpidist.Trainer(loss, mpidist.Variable(numpy.zeros(1)), mpidist.optimizers.SGD(0.1))
    trainer.fit(list(ROWS), numpy.ones(8), verbose=0)
    trainer.fit([[1.0, 2.0], [3.0, 4.0]], [1.0, 2.0], verbose=0)
    assert seen == [((8, 2), (8,)), ((2, 2), (2,))]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("given", [list, lambda rows: [*rows.reshape(2, 4, 2)]], ids=["rows", "pairs of rows"])
def test_predict_takes_a_list_of_arrays_as_one_array(given, size):
    def on_rank():
        with mpidist.MirroredStrategy().scope():
            variable = mpidist.Variable(numpy.zeros(1))
        predictions = mpidist.Trainer(print, variable, mpidist.optimizers.SGD(0.1), predict_fn=lambda w, x: 2 * x)
        x = given(ROWS)
        return predictions.predict(x, batch_size=3).tolist(), numpy.stack(x).tolist()

    for found, x in run_ranks(size, on_rank):
        assert found == (2 * numpy.array(x, "float32")).tolist()


@pytest.mark.parametrize("method", ["fit", "evaluate", "validation"])
def test_a_list_of_arrays_that_may_be_rows_or_batches_is_refused(method):
    trainer = mpidist.Trainer(
        lambda w, x: (0.0, numpy.zeros(1)), mpidist.Variable(numpy.zeros(1)), mpidist.optimizers.SGD(0.1)
    )
    with pytest.raises(
        ValueError, match=r"a list of 8 arrays of shape \(2,\) may be rows, or batches of numbers; give"
    ):
        if method == "validation":
            trainer.fit(ROWS, validation_data=list(ROWS), verbose=0)
        else:
            getattr(trainer, method)(list(ROWS), verbose=0)
    trainer.fit([(row,) for row in ROWS], verbose=0)
    assert trainer.steps_made == 8
    trainer.fit([ROWS[0], ROWS[1, :1]], verbose=0)  # which cannot be rows of one array
    assert trainer.steps_made == 10


def test_a_list_of_batches_is_an_iterable_of_batches():
    def on_rank():
        with mpidist.MirroredStrategy().scope():
            variable = mpidist.Variable(numpy.zeros(1))
        seen = []

        def loss(parameter, x, y):
            seen.append((x.tolist(), y.tolist()))
            return 0.0, numpy.zeros(1)

        batches = [
            (numpy.array([1.0, 2.0]), numpy.array([3.0, 4.0])),
            (numpy.array([5.0, 6.0]), numpy.array([7.0, 8.0])),
        ]
        trainer = mpidist.Trainer(loss, variable, mpidist.optimizers.SGD(0.1))
        trainer.fit(batches, epochs=1, verbose=0)
        with pytest.raises(ValueError, match="batch_size cannot be given with a list"):
            trainer.fit(batches, batch_size=2)
        trainer.fit([(9.0, 9.5)], [1.0], verbose=0)  # rows of numbers are an array
        return seen

    assert run_ranks(2, on_rank) == [
        [([1.0], [3.0]), ([5.0], [7.0]), ([[9.0, 9.5]], [1.0])],
        [([2.0], [4.0]), ([6.0], [8.0])],
    ]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("is_validation", [True, False])
def test_of_no_rows_there_is_no_loss(size, is_validation):
    def on_rank():
        with mpidist.MirroredStrategy().scope():
            variable = mpidist.Variable(numpy.zeros(1))
        trainer = mpidist.Trainer(lambda p, x: (1.0, numpy.zeros(1)), variable, mpidist.optimizers.SGD(0.1))
        none = mpidist.data.Dataset.range(9).filter(lambda x: False).batch(3)
        with pytest.raises(ValueError, match="there is nothing to evaluate: the data have no rows"):
            if is_validation:
                trainer.fit(numpy.zeros(4), validation_data=none, verbose=0)
            else:
                trainer.evaluate(none, verbose=0)
        return trainer.evaluate(numpy.zeros(4), verbose=0)

    assert run_ranks(size, on_rank) == [1.0] * size


def learning_rate_of_chief_only(trainer):
    def change(epoch, logs):
        if trainer.is_chief:
            trainer.optimizer.learning_rate = 0.25

    return mpidist.callbacks.LambdaCallback(on_epoch_end=change)


@pytest.mark.parametrize(
    ("differing", "message"),
    [
        (lambda first: {"optimizer": mpidist.optimizers.SGD(0.5 if first else 0.25)}, "learning rate: 0.25 on rank 1"),
        (
            lambda first: {"optimizer": (mpidist.optimizers.SGD if first else mpidist.optimizers.Adagrad)(0.5)},
            "Adagrad",
        ),
        (lambda first: {"optimizer": mpidist.optimizers.Adam(0.5, beta_1=0.9 if first else 0.8)}, "beta_1=0.8"),
        (lambda first: {"metrics": ["mse" if first else "mae"]}, r"metrics: mae \(MeanAbsoluteError\) on rank 1"),
        (lambda first: {"epochs": 2 if first else 3}, "epochs: 3 on rank 1, 2 on rank 0"),
        (lambda first: {"callback": learning_rate_of_chief_only}, "learning rate: 0.5 on rank 1, 0.25 on rank 0"),
    ],
)
def test_ranks_that_would_drift_apart_are_told_so(differing, message):
    def on_rank():
        strategy = mpidist.MirroredStrategy()
        given = {"optimizer": None, "metrics": [], "epochs": 2, "callback": None}
        with strategy.scope():
            given |= differing(strategy.extended.is_chief)
            variable = mpidist.Variable(numpy.zeros(1))
            trainer = mpidist.Trainer(
                lambda p, x, y: ((1.0, x), numpy.ones(1)),
                variable,
                given["optimizer"] or mpidist.optimizers.SGD(0.5),
                metrics=given["metrics"],
            )
        used = [] if given["callback"] is None else [given["callback"](trainer)]
        trainer.fit(numpy.zeros(4), numpy.zeros(4), epochs=given["epochs"], callbacks=used, verbose=0)

    with pytest.raises(mpidist.errors.CollectiveMismatchError, match=message) as raised:
        run_ranks(2, on_rank)
    assert set(raised.value.rank_errors) == {0, 1}
    assert "Every rank must make the same trainer" in str(raised.value)


@pytest.mark.parametrize("option", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_clipping_that_differs_is_found_before_the_first_step(option):
    def on_rank():
        with mpidist.MultiWorkerMirroredStrategy().scope():
            optimizer = mpidist.optimizers.SGD(0.1, **{option: 1.0 + mpidist.rank()})
            trainer = mpidist.Trainer(lambda w, x: (0.0, numpy.zeros(1)), mpidist.Variable(numpy.zeros(1)), optimizer)
        with pytest.raises(CollectiveMismatchError, match=f"clipping.*{option}=2.0"):
            trainer.fit(numpy.zeros(6), batch_size=3, verbose=0)

    run_ranks(2, on_rank)


def test_weights_without_labels_are_refused():
    """They would be taken for labels."""
    trainer = mpidist.Trainer(
        lambda w, x: (0.0, numpy.zeros(1)), mpidist.Variable(numpy.zeros(1)), mpidist.optimizers.SGD(0.1)
    )
    with pytest.raises(ValueError, match="sample_weight needs y"):
        trainer.fit(numpy.zeros(6), sample_weight=numpy.ones(6), verbose=0)
