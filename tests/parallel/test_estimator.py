"""`Estimator` under an mpirun: what one process does on the global batch, also after a training was broken off."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist import estimator
from mpidist.world import world_communicator
from tests.unit.training import estimator_net as net
from tests.unit.training import softplus_net as softplus

pytestmark = pytest.mark.mpi

STRATEGIES = ["MirroredStrategy", "MultiWorkerMirroredStrategy", "CentralStorageStrategy", "TPUStrategy"]


@pytest.fixture
def directory(tmp_path) -> Path:
    """Rank 0's directory, on every rank."""
    return Path(world_communicator().exchange(str(tmp_path).encode())[0].decode())


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    """Every synchronous strategy that the guides name."""
    return getattr(mpidist, request.param)()


class BreakOff(estimator.SessionRunHook):
    """Ends a training after a step, on all ranks, as a kill does."""

    def __init__(self, step):
        self.step = step

    def after_run(self, run_context, run_values):
        if run_context.session.global_step == self.step:
            raise InterruptedError


@pytest.mark.parametrize("batch_size", [1, 3])
def test_ranks_equal_one_process_on_the_global_batch(strategy, directory, batch_size):
    ranks = strategy.num_replicas_in_sync
    found = net.of(directory, strategy)
    found.train(net.input_fn_of(batch_size))
    expected = net.by_hand(net.cut(batch_size * ranks))
    net.assert_same(net.values(found), expected)
    results = found.evaluate(net.input_fn_of(batch_size))
    numpy.testing.assert_allclose(results["loss"], softplus.loss(expected, net.X, net.Y), rtol=1e-12)
    predicted = list(found.predict(net.input_fn_of(4)))
    numpy.testing.assert_allclose(predicted, softplus.predict(expected, net.X), rtol=1e-12)
    own = numpy.array([results["loss"], results["accuracy"], *numpy.ravel(predicted)]).view("uint64")
    assert len(set(world_communicator().exchange(own.tobytes()))) == 1


def test_a_training_that_was_broken_off_goes_on(strategy, directory):
    ranks = strategy.num_replicas_in_sync
    found = net.of(directory, strategy, save_checkpoints_steps=2)
    with pytest.raises(InterruptedError):
        found.train(net.input_fn_of(1, repeats=True), hooks=[BreakOff(3)], max_steps=6)
    again = net.of(directory, strategy)
    again.train(net.input_fn_of(1, repeats=True), max_steps=6)
    rows = numpy.arange(6 * ranks) % net.ROWS
    net.assert_same(net.values(again), net.by_hand([rows[ranks * step : ranks * (step + 1)] for step in range(6)]))


def test_the_last_rank_ends_the_training_of_all(strategy, directory):
    is_last = world_communicator().rank == world_communicator().size - 1
    found = net.of(directory, strategy)
    hooks = [estimator.StopAtStepHook(num_steps=2)] if is_last else []
    found.train(net.input_fn_of(1, repeats=True), hooks=hooks, steps=9)
    assert found.get_variable_value("global_step") == 2


def test_train_and_evaluate(strategy, directory):
    found = net.of(directory, strategy, save_checkpoints_secs=1e-9)
    results, _ = estimator.train_and_evaluate(
        found,
        estimator.TrainSpec(net.input_fn_of(1, repeats=True), max_steps=3),
        estimator.EvalSpec(net.input_fn_of(2), steps=None, throttle_secs=0),
    )
    ranks = strategy.num_replicas_in_sync
    rows = numpy.arange(3 * ranks) % net.ROWS
    expected = net.by_hand([rows[ranks * step : ranks * (step + 1)] for step in range(3)])
    numpy.testing.assert_allclose(results["loss"], softplus.loss(expected, net.X, net.Y), rtol=1e-12)
    assert results["global_step"] == 3
