"""A checkpoint that does not fit in any part changes no part, on any rank; and names of parts are unique."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist import callbacks, metrics, optimizers
from mpidist.errors import CheckpointError
from mpidist.testing import run_ranks


class Run:
    """One of each thing that a checkpoint holds."""

    def __init__(self, values=0.0, optimizer=None, metric=None, generator=None, extra=None):
        self.strategy = mpidist.MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.v = mpidist.Variable(numpy.full(3, values), name="v")
            self.optimizer = optimizer or optimizers.Adam(0.1)
        self.metric = metric or metrics.Mean("mean")
        self.generator = numpy.random.default_rng(0) if generator is None else generator
        rows = mpidist.data.Dataset.from_arrays(numpy.zeros((4, 3))).batch(2)
        self.rows = self.strategy.experimental_distribute_dataset(rows)
        parts = {"v": self.v, "optimizer": self.optimizer, "metric": self.metric, "random": self.generator}
        self.checkpoint = mpidist.Checkpoint(**parts, rows=self.rows, **extra or {})

    def go(self):
        for part in self.rows:
            self.strategy.run(lambda: self.optimizer.apply_gradients([(numpy.ones(3), self.v)]))
            self.metric.update_state(part)
            self.generator.random()
            break
        return self

    def seen(self):
        """Return everything that a restore would change."""
        momentum = self.optimizer.slots(self.v)
        random = self.generator.bit_generator.state
        return str([self.v.value, momentum, self.optimizer.iterations, self.metric.sums, random, self.rows.state()])


class Kept:
    """An object of a user; may refuse what it is given, on some ranks."""

    def __init__(self, refusing_ranks=()):
        self.value, self.refusing_ranks = 0, refusing_ranks

    def state(self):
        return {"value": 7}

    def restore(self, state):
        if mpidist.MultiWorkerMirroredStrategy().extended.replica_id in self.refusing_ranks:
            raise LookupError("not mine")
        self.value = int(state["value"])


class Checked(Kept):
    def check(self, state):
        self.restore(state)


MISFITS = {
    "another optimizer": (lambda: {"optimizer": optimizers.RMSprop(0.1)}, "'optimizer': the state of Adam was saved"),
    "another metric": (lambda: {"metric": metrics.AUC()}, "'metric': metric .* was saved with nothing"),
    "another generator": (
        lambda: {"generator": numpy.random.Generator(numpy.random.MT19937(0))},
        "'random': a random state of PCG64 was saved, this generator is MT19937",
    ),
    "an object that raises": (lambda: {"extra": {"a": Kept((0, 1))}}, "on ranks .*LookupError: not mine"),
    "an object that raises on one rank": (
        lambda: {"extra": {"a": Kept((1,))}},
        r"on ranks 1;.*LookupError: not mine",
    ),
    "an object that can be checked": (
        lambda: {"extra": {"a": Checked((1,))}},
        r"ranks 1; rank 1: 'a': LookupError",
    ),
    "an object that was not there": (lambda: {"extra": {"a": Kept(), "b": Kept()}}, "it has nothing for 'b'"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_changes_nothing(misfit, tmp_path):
    options, message = MISFITS[misfit]
    run_ranks(1, lambda: Run(1.0, extra={"a": Kept()}).go().checkpoint.save(tmp_path / "c.h5"))

    def restore():
        run = Run(**{"extra": {"a": Kept()}, **options()})
        before = run.seen()
        with pytest.raises(CheckpointError, match=message) as raised:
            run.checkpoint.restore(tmp_path / "c.h5")
        assert raised.value.on_all_ranks
        return before == run.seen()

    assert run_ranks(2, restore) == [True, True]


def test_what_fits_changes_everything(tmp_path):
    run_ranks(1, lambda: Run(1.0, extra={"a": Kept()}).go().checkpoint.save(tmp_path / "c.h5"))

    def restore():
        kept = Kept()
        run = Run(extra={"a": kept})
        run.checkpoint.restore(tmp_path / "c.h5")
        return run.seen(), kept.value

    expected = run_ranks(1, lambda: Run(1.0).go().seen())[0]
    (seen, value), (_, other) = run_ranks(2, restore)
    assert (value, other) == (7, 7)
    assert seen == expected


class Remembers(callbacks.Callback):
    """Raises where it is to go on with what it remembered."""

    def state(self):
        return {"value": 1}

    def restore(self, state):
        raise LookupError("not mine")


def test_a_callback_that_cannot_go_on_leaves_the_training_as_it_was(tmp_path):
    def train(epochs):
        strategy = mpidist.MultiWorkerMirroredStrategy()
        with strategy.scope():
            v = mpidist.Variable(numpy.zeros(1), name="v")
        trainer = mpidist.Trainer(lambda v, x: (0.0, numpy.ones(1)), v, optimizers.SGD(1.0))
        used = [Remembers(), callbacks.ModelCheckpoint(tmp_path, resume=True)]
        try:
            trainer.fit(numpy.zeros(4), batch_size=4, epochs=epochs, callbacks=used, verbose=0)
        except CheckpointError as error:
            return str(error), float(v.value[0]), trainer.steps_made
        return "", float(v.value[0]), trainer.steps_made

    assert run_ranks(2, train, 1) == [("", -1.0, 1)] * 2
    for message, value, steps in run_ranks(2, train, 2):
        assert "LookupError: not mine" in message
        assert (value, steps) == (0.0, 0)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (lambda v, w: {"a": {"b": v}, "a/b": w}, "has a part 'a/b' already"),
        (lambda v, w: {"a": {0: v, "0": w}}, "has a part 'a/0' already"),
        (lambda v, w: {"a": v, "a/b": w}, "has parts 'a' and 'a/b', one inside the other"),
        (lambda v, w: {"a/iterations": v, "a": optimizers.SGD(0.1)}, "has parts 'a' and 'a/iterations', one inside"),
    ],
)
def test_two_under_one_name_are_refused_when_the_checkpoint_is_made(parts, message):
    def make():
        v, w = (mpidist.Variable(numpy.zeros(1)) for _ in range(2))
        with pytest.raises(ValueError, match=message):
            mpidist.Checkpoint(**parts(v, w))
        checkpoint = mpidist.Checkpoint(other=v)
        with pytest.raises(ValueError, match=message.replace("'a", "'x/a")):
            checkpoint.include("x", parts(v, w))
        return len(checkpoint.variables)

    assert run_ranks(2, make) == [1, 1]


def test_one_variable_may_have_two_places(tmp_path):
    v = mpidist.Variable(numpy.ones(2), name="tied")
    mpidist.Checkpoint(encoder=v, decoder=v).save(tmp_path / "c.h5")
    v.assign(numpy.zeros(2))
    mpidist.Checkpoint(encoder=v, decoder=v).restore(tmp_path / "c.h5")
    assert v.value.tolist() == [1, 1]
