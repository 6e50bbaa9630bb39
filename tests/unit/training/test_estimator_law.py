"""`Estimator`: N ranks equal one process on the global batch, also after a kill, and with other ranks."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist import estimator
from mpidist.testing import RankErrors, run_ranks
from tests.unit.training import estimator_net as net
from tests.unit.training.softplus_net import loss, predict

STRATEGIES = ["MirroredStrategy", "MultiWorkerMirroredStrategy", "CentralStorageStrategy", "TPUStrategy"]


def trained(folder, name, batch_size):
    """Train for one pass through the rows, on every rank; return variables, results and the bits of this rank."""
    strategy = getattr(mpidist, name)()
    found = net.of(folder, strategy)
    bits = Bits()
    found.train(net.input_fn_of(batch_size), hooks=[bits])
    results = found.evaluate(net.input_fn_of(batch_size))
    predicted = list(found.predict(net.input_fn_of(batch_size)))
    return net.values(found), results, predicted, bits.found


class Bits(estimator.SessionRunHook):
    """Keeps the loss of the last step, which all ranks are to have alike."""

    def before_run(self, run_context):
        return estimator.SessionRunArgs(("loss", "global_step"))

    def after_run(self, run_context, run_values):
        loss, step = run_values.results
        self.found = float(loss).hex(), step


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_ranks_equal_one_process_on_the_global_batch(tmp_path, name, ranks):
    batch_size = 2
    found = run_ranks(ranks, trained, tmp_path, name, batch_size)
    steps = net.cut(batch_size * ranks)
    expected = net.by_hand(steps)
    p = predict(expected, net.X)
    for values, results, predicted, bits in found:
        net.assert_same(values, expected)
        assert list(results) == ["accuracy", "global_step", "loss", "squared"]
        assert results["global_step"] == len(steps)
        numpy.testing.assert_allclose(results["loss"], loss(expected, net.X, net.Y), rtol=1e-12)
        numpy.testing.assert_allclose(results["squared"], ((p - net.Y) ** 2).mean(), rtol=1e-12)
        assert results["accuracy"] == ((p > 0.5) == net.Y).mean()
        assert bits == found[0][3]
        numpy.testing.assert_allclose(predicted, p[: len(predicted)], rtol=1e-12)
        assert len(predicted) == net.ROWS  # each rank has predicted all of them


class Killed(RuntimeError):
    """The end of a job in these tests."""


class KillAt(estimator.SessionRunHook):
    """Ends the job in the middle of a training."""

    def __init__(self, step):
        self.step = step

    def after_run(self, run_context, run_values):
        if run_context.session.global_step == self.step:
            raise Killed


def train(folder, name, batch_size, killed_at=None, save_steps=None):
    strategy = getattr(mpidist, name)()
    found = net.of(folder, strategy, **({"save_checkpoints_steps": save_steps} if save_steps else {}))
    found.train(net.input_fn_of(batch_size), hooks=[KillAt(killed_at)])
    return net.values(found), found.get_variable_value("global_step")


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (2, 2)), ((2, 2), (4, 1)), ((3, 2), (1, 6)), ((1, 4), (4, 1)), ((4, 1), (2, 4))]
)
def test_a_killed_training_goes_on_as_if_it_had_not_been_killed(tmp_path, name, before, after):
    """The global batch has 4 or 6 rows; the checkpoint is of step 2, and 3 steps were made."""
    ranks, batch_size = before
    with pytest.raises((Killed, RankErrors)):
        run_ranks(ranks, train, tmp_path, name, batch_size, 3, 2)
    read = 2 * ranks * batch_size
    others, other_size = after
    expected = net.by_hand([*net.cut(ranks * batch_size)[:2], *net.cut(others * other_size, read)])
    steps = 2 + len(net.cut(others * other_size, read))
    for values, step in run_ranks(others, train, tmp_path, name, other_size):
        assert step == steps
        net.assert_same(values, expected)


def test_a_training_that_came_to_its_end_begins_its_data_anew(tmp_path):
    for _ in range(2):
        ((values, step),) = run_ranks(1, train, tmp_path, "MirroredStrategy", 10, None, 1)
    assert step == 6
    net.assert_same(values, net.by_hand(net.cut(10) * 2))


def test_rows_that_come_again_are_told(tmp_path):
    with pytest.raises((Killed, RankErrors)):
        run_ranks(2, train, tmp_path, "MirroredStrategy", 3, 2, 1)
    # one step of 6 rows, which are not a whole number of batches of 4
    with pytest.warns(RuntimeWarning, match="goes on with rows that it has seen: 2 batches of 3 rows"):
        ((values, _),) = run_ranks(1, train, tmp_path, "MirroredStrategy", 4)
    net.assert_same(values, net.by_hand([*net.cut(6)[:1], *net.cut(4, 4)]))


def test_workers_whose_data_end_early_wait_for_the_others(tmp_path):
    def main():
        strategy = mpidist.MultiWorkerMirroredStrategy()
        found = net.of(tmp_path, strategy)
        first = 0 if strategy.extended.replica_id == 0 else 20

        def input_fn():
            stop = 20 if first == 0 else net.ROWS
            return mpidist.data.Dataset.from_arrays((net.X[first:stop], net.Y[first:stop])).batch(4)

        found.train(input_fn)
        return net.values(found)

    expected = net.by_hand([[*range(s, s + 4), *range(20 + s, min(24 + s, net.ROWS))] for s in range(0, 20, 4)])
    for values in run_ranks(2, main):
        net.assert_same(values, expected)


def test_batches_of_any_iterable_are_dealt_in_turn(tmp_path):
    def main():
        found = net.of(tmp_path, mpidist.MirroredStrategy())
        found.train(lambda: [(net.X[rows], net.Y[rows]) for rows in net.cut(7)])
        return net.values(found), found.get_variable_value("global_step")

    for values, step in run_ranks(2, main):
        assert step == 3
        net.assert_same(values, net.by_hand(net.cut(14)))


def test_data_sets_of_one_machine_that_differ_between_ranks_are_refused(tmp_path):
    def main():
        strategy = mpidist.MirroredStrategy()
        shift = strategy.extended.replica_id

        def input_fn():
            return mpidist.data.Dataset.from_arrays((net.X + shift, net.Y)).batch(4)

        with pytest.raises(mpidist.errors.CollectiveMismatchError, match="data set of input_fn"):
            net.of(tmp_path, strategy).train(input_fn)

    run_ranks(2, main)
