"""`Trainer` on the ranks of an mpirun: what one rank does on the global batch, checkpoints and the end included."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist.collectives.reductions import update
from mpidist.training import callbacks
from mpidist.training.callbacks import Callback, LambdaCallback
from mpidist.world import world_communicator

pytestmark = pytest.mark.mpi

_spec = importlib.util.spec_from_file_location(
    "softplus_net", Path(__file__).parents[1] / "unit" / "training" / "softplus_net.py"
)
net = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(net)

X, Y = net.rows(29)


@pytest.fixture(params=[1, 1 << 40], ids=["applied while summed", "applied when summed"])
def least_bytes(request, monkeypatch):
    """Gradients as those of large models are applied, and as those of small ones."""
    monkeypatch.setattr(update, "LEAST_BYTES", request.param)


@pytest.fixture(params=["MultiWorkerMirroredStrategy", "CentralStorageStrategy"])
def strategy(request):
    """A copy of the variables on each rank, or one for all."""
    return getattr(mpidist, request.param)()


def alone():
    return mpidist.OneDeviceStrategy("/cpu:0")


@pytest.mark.filterwarnings("ignore:OneDeviceStrategy reduces nothing")
@pytest.mark.parametrize("batch_size", [12, 5, 2])
@pytest.mark.parametrize("make", [lambda: mpidist.optimizers.Adam(0.02), lambda: mpidist.optimizers.SGD(0.5, 0.9)])
def test_fit_evaluate_and_predict_equal_those_of_one_rank(strategy, batch_size, make, least_bytes):
    found = {}
    for name, used in (("together", strategy), ("alone", alone())):
        trainer = net.trainer(used, make())
        history = trainer.fit(X, Y, batch_size=batch_size, epochs=3, validation_data=(X[:7], Y[:7])).history
        evaluated, predicted = trainer.evaluate(X, Y, batch_size=4), trainer.predict(X, batch_size=batch_size)
        found[name] = [net.values(trainer), *history.values(), evaluated, predicted]
    for ours, expected in zip(found["together"], found["alone"], strict=True):
        numpy.testing.assert_allclose(ours, expected, rtol=1e-11, atol=1e-13)


def test_all_ranks_hold_the_same_bits():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    trainer = net.trainer(strategy)
    history = trainer.fit(X, Y, batch_size=7, epochs=2).history
    own = numpy.concatenate([net.values(trainer), *history.values()]).view("uint64")
    copies = strategy.gather(own[None], axis=0)
    assert (copies == copies[0]).all()


def test_the_last_rank_ends_the_training_of_all():
    strategy = mpidist.MultiWorkerMirroredStrategy()
    trainer = net.trainer(strategy)
    is_last = strategy.extended.replica_id == strategy.num_replicas_in_sync - 1

    def vote(batch, logs):
        trainer.stop_training = is_last and batch == 3

    trainer.fit(X, Y, batch_size=2, epochs=2, callbacks=[LambdaCallback(on_train_batch_end=vote)])
    assert strategy.gather(numpy.array([trainer.steps_made]), axis=0).tolist() == [5] * strategy.num_replicas_in_sync


@pytest.fixture
def directory(tmp_path) -> Path:
    """Rank 0's directory, on every rank."""
    return Path(world_communicator().exchange(str(tmp_path).encode())[0].decode())


class Interrupted(Exception):
    pass


class Interrupt(Callback):
    def on_train_batch_end(self, batch, logs=None):
        if self.trainer.steps_made == 11:
            raise Interrupted


def test_a_training_goes_on_where_it_was_interrupted(strategy, directory, least_bytes):
    def train(path, *more):
        trainer = net.trainer(strategy)
        backup = callbacks.BackupAndRestore(path, save_freq=3, delete_checkpoint=False)
        trainer.fit(X, Y, batch_size=4, epochs=3, callbacks=[backup, *more])
        return net.values(trainer)

    whole = train(directory / "whole")
    with pytest.raises(Interrupted):
        train(directory / "run", Interrupt())
    numpy.testing.assert_array_equal(train(directory / "run"), whole)
