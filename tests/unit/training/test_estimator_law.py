"""`Estimator`: N ranks equal one process on the global batch, also after a kill, and with other ranks."""

from __future__ import annotations

import re

import numpy
import pytest

import mpidist
from mpidist import estimator
from mpidist.cluster.topology import Topology as ClusterTopology
from mpidist.testing import RankErrors, run_ranks
from mpidist.tpu.experimental import DeviceAssignment, Topology
from mpidist.world import world_communicator
from tests.unit.training import estimator_net as net
from tests.unit.training.softplus_net import loss, predict
from tests.unit.training.softplus_net import value_and_grad as value_and_grad_of_net

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


@pytest.mark.parametrize("devices", [2, 4])
def test_replicas_of_several_ranks_equal_one_process(tmp_path, devices):
    def main():
        topology = Topology.of(ClusterTopology("aaaa"))
        assignment = DeviceAssignment.build(topology, [1, 1, 1, devices])
        strategy = mpidist.TPUStrategy(experimental_device_assignment=assignment)
        found = net.of(tmp_path, strategy, save_checkpoints_secs=1e-9)
        last = world_communicator().rank == 3
        hooks = [estimator.StopAtStepHook(num_steps=3)] if last else []
        found.train(net.input_fn_of(2), hooks=hooks)
        return net.values(found), found.evaluate(net.input_fn_of(2))["loss"]

    expected = net.by_hand(net.cut(2 * 4 // devices)[:3])
    for values, found in run_ranks(4, main):
        net.assert_same(values, expected)
        numpy.testing.assert_allclose(found, loss(expected, net.X, net.Y), rtol=1e-12)


@pytest.mark.parametrize("where", ["input_fn", "hook", "model_fn", "loss"])
def test_an_exception_on_one_rank_is_told_to_the_others(tmp_path, where):
    def main():
        strategy = mpidist.MirroredStrategy()
        is_bad = strategy.extended.replica_id == 1

        def fail(at):
            if is_bad and at == where:
                raise Killed(f"in {where}")

        class Hook(estimator.SessionRunHook):
            def after_run(self, run_context, run_values):
                fail("hook")

        def input_fn():
            fail("input_fn")
            return mpidist.data.Dataset.from_arrays((net.X, net.Y)).batch(4)

        def value_and_grad(parameters, x, y):
            fail("loss")
            return value_and_grad_of_net(parameters, x, y)

        def model_fn(features, labels, mode):
            fail("model_fn")
            found = net.model_fn(features, labels, mode)
            found.train_op = found.train_op._replace(value_and_grad_fn=value_and_grad)
            return found

        config = estimator.RunConfig(train_distribute=strategy)
        estimator.Estimator(model_fn, tmp_path, config).train(input_fn, hooks=[Hook()])

    with pytest.raises(Killed) as raised:
        run_ranks(3, main, timeout_seconds=30)
    told = "\n".join(raised.value.__notes__)
    for rank in (0, 2):
        assert re.search(f"also rank {rank} of 3: .*rank 1", told), told


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
