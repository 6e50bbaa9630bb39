"""A training that goes on in the middle of an epoch with another batch size, on other ranks, or with other data."""

from __future__ import annotations

import re

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.errors import MpidistError
from mpidist.testing import run_ranks
from mpidist.training.callbacks import Callback, ModelCheckpoint

Dataset = mpidist.data.Dataset


class Notes(Callback):
    """The numbers of the batches, of all epochs; stops the training after so many steps."""

    def __init__(self, most=10**6):
        self.batches, self.most = [], most

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append((self.trainer.epoch, batch))
        if self.trainer.steps_made == self.most:
            self.trainer.stop_now()


def trained(folder, make, most=10**6, save_freq=1, **options):
    """Return (rows of this rank in order, batches, losses of the epochs, steps made)."""
    strategy = mpidist.MirroredStrategy()
    with strategy.scope():
        w = mpidist.Variable(numpy.zeros(1), name="w")
    seen, notes = [], Notes(most)

    def value_and_grad(_, rows):
        seen.append(rows.tolist())
        return float(rows.mean()), numpy.ones(1)

    trainer = mpidist.Trainer(value_and_grad, w, mpidist.optimizers.SGD(0.1))
    saves = ModelCheckpoint(folder, save_freq=save_freq, resume=True)
    data = make()
    given = data if isinstance(data, tuple) else (data,)
    losses = trainer.fit(*given, callbacks=[saves, notes], verbose=0, **options).history.get("loss", [])
    return sum(seen, []), notes.batches, losses, trainer.steps_made


@settings(max_examples=20)
@given(
    rows=st.integers(1, 30),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    steps=st.integers(1, 9),
)
def test_an_epoch_has_each_row_once_whatever_the_batch_sizes(tmp_path_factory, rows, sizes, ranks, steps):
    folder = tmp_path_factory.mktemp("run")
    x = numpy.arange(rows) * 1.0
    first = run_ranks(ranks[0], lambda: trained(folder, lambda: x, steps, batch_size=sizes[0], epochs=2, seed=3))
    rest = run_ranks(ranks[1], lambda: trained(folder, lambda: x, batch_size=sizes[1], epochs=2, seed=3))
    seen = [row for each in (*first, *rest) for row in each[0]]
    assert sorted(seen) == sorted([*x, *x])
    for _, batches, losses, made in rest:
        assert losses == pytest.approx([rows / 2 - 0.5] * len(losses))  # of the whole epoch, what came before included
        assert made == first[0][3] + len(batches)
        assert all(batch < -(-rows // sizes[1]) for _, batch in batches)
        assert len(set(batches)) == len(batches)


@pytest.mark.parametrize("drop", [False, True])
def test_steps_of_an_epoch_are_counted_in_the_present_batches(tmp_path, drop):
    def data(size):
        return lambda: Dataset.range(40).map(float).shuffle(seed=1).batch(size, drop_remainder=drop).repeat()

    (first,) = run_ranks(1, trained, tmp_path, data(4), 6)  # 24 rows of 10 * 4, that is 3 steps of 8
    assert [batch for _, batch in first[1]] == list(range(6))
    rest = run_ranks(2, lambda: trained(tmp_path, data(8), epochs=2, steps_per_epoch=5))
    assert rest[0][1] == [(0, 3), (0, 4), *((1, step) for step in range(5))]
    assert rest[0][3] == 6 + 7
    seen = [*first[0], *(row for rows, *_ in rest for row in rows)]
    assert sorted(seen) == sorted([*range(40), *range(40)])


@pytest.mark.parametrize("save_freq", [1, "epoch"])
@pytest.mark.parametrize("steps", [5, 10])
def test_an_epoch_that_ended_with_the_data_is_followed_by_the_next_one(tmp_path, save_freq, steps):
    def on_rank(epochs, data=lambda: Dataset.range(40).map(float).shuffle(seed=1).batch(4)):
        return trained(tmp_path, data, save_freq=save_freq, epochs=epochs, steps_per_epoch=steps)

    run_ranks(1, on_rank, 10 // steps)
    rest = run_ranks(2, on_rank, 20 // steps)
    assert sorted(row for each in rest for row in each[0]) == list(range(40))
    assert len(rest[0][1]) == 10
    assert rest[0][3] == 20


def test_an_epoch_that_is_longer_than_the_data_ends_with_them_after_a_restore_too(tmp_path):
    def on_rank(most, epochs):
        return trained(tmp_path, lambda: Dataset.range(8).map(float).batch(4), most, epochs=epochs, steps_per_epoch=3)

    run_ranks(1, on_rank, 2, 1)  # the data have ended, but not the epoch
    with pytest.warns(UserWarning, match="the data ended after 2 of 3 steps"):
        rest = run_ranks(1, on_rank, 99, 2)
    assert rest[0][1] == [(1, 0), (1, 1)]


@pytest.mark.parametrize(("changed", "message"), [
    ({"seed": 4}, r"shuffle\(seed=3\) when saved, shuffle\(seed=4\) now"),
    ({"shuffle": False}, r"shuffle\(seed=3\) when saved, "),
    ({"rows": 50}, r"40 rows of float64\[\] when saved, 50 rows of float64\[\] now"),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
def test_other_data_are_refused_in_mid_epoch_and_taken_at_its_end(tmp_path, changed, message, ranks):
    def on_rank(folder, most, epochs, save_freq, rows=40, **options):
        x = numpy.arange(rows) * 1.0
        return trained(folder, lambda: x, most, save_freq, batch_size=4, epochs=epochs, **{"seed": 3, **options})

    def refused():
        with pytest.raises(MpidistError) as raised:
            on_rank(tmp_path / "mid", 99, 2, 1, **changed)
        return str(raised.value)

    run_ranks(1, on_rank, tmp_path / "mid", 6, 2, 1)
    for text in run_ranks(ranks, refused):
        assert re.search(message, text)
    run_ranks(1, on_rank, tmp_path / "end", 99, 1, "epoch")
    rows = changed.get("rows", 40)
    rest = run_ranks(ranks, lambda: on_rank(tmp_path / "end", 99, 2, "epoch", **changed))
    assert sorted(row for each in rest for row in each[0]) == list(range(rows))


# -- the same data on any number of ranks -----------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_rows_that_are_not_batched_are_refused_on_one_rank_too(ranks):
    def on_rank():
        if ranks:
            with mpidist.MirroredStrategy().scope():
                w = mpidist.Variable(numpy.zeros(2))
        else:
            w = mpidist.Variable(numpy.zeros(2))
        trainer = mpidist.Trainer(lambda _, x: (float(x.mean()), numpy.ones(2)), w, mpidist.optimizers.SGD(0.1))
        for call in (trainer.fit, trainer.evaluate):
            with pytest.raises(ValueError, match="Call the `batch` method on the input Dataset"):
                call(Dataset.from_arrays(numpy.ones((4, 2))))

    run_ranks(ranks or 1, on_rank)


@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_lists_that_a_loader_gives_are_several_arguments_and_have_a_position(ranks, tmp_path):
    class Loader:
        def __iter__(self):
            return iter([[numpy.arange(4.0) + 4 * number, numpy.ones(4)] for number in range(3)])

    def on_rank(most):
        if ranks:
            with mpidist.MirroredStrategy().scope():
                w = mpidist.Variable(numpy.zeros(1))
        else:
            w = mpidist.Variable(numpy.zeros(1))
        seen = []
        trainer = mpidist.Trainer(
            lambda _, x, y: (seen.extend(x.tolist()), (1.0, numpy.ones(1)))[1], w, mpidist.optimizers.SGD(0.1)
        )
        saves = ModelCheckpoint(tmp_path, save_freq=1, resume=True)
        trainer.fit(Loader(), epochs=1, callbacks=[saves, Notes(most)], verbose=0)
        return seen

    first = run_ranks(ranks or 1, on_rank, 2)
    rest = run_ranks(ranks or 1, on_rank, 99)
    assert sorted(sum(first, [])) == list(range(8))
    assert sorted(sum(rest, [])) == list(range(8, 12))
