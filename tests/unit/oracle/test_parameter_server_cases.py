"""TensorFlow's observed cases of ParameterServerStrategy and ClusterCoordinator.

Those with servers run on ranks that are threads; the coordinator is alone in its process, and its own worker.
"""

from __future__ import annotations

import re

import numpy
import pytest

import mpidist
from mpidist.cluster_resolver import SimpleClusterResolver
from mpidist.experimental.partitioners import MinSizePartitioner
from mpidist.testing import run_ranks
from tests.oracle.cases import EXCEPTIONS, cases
from tests.oracle.deviations import DEVIATIONS

CASES = cases("parameter_server")
REFUSED = ["ps_no_ps", "ps_empty", "ps_two_evaluators"]


def expected(name):
    return CASES[name]["expected"]


def on_worker(fn, servers, **arguments):
    """Return what a function of the strategy returns on the one worker of a job with servers."""

    def main():
        return fn(mpidist.ParameterServerStrategy(num_ps=servers, **arguments))

    return run_ranks(1 + servers, main)[0]


@pytest.fixture
def strategy():
    return mpidist.ParameterServerStrategy()


@pytest.fixture
def coordinator(strategy):
    return mpidist.coordinator.ClusterCoordinator(strategy)


@pytest.mark.parametrize("name", REFUSED)
def test_clusters_that_cannot_train(name):
    jobs = {job: [f"h:{index}" for index in range(count)] for job, count in CASES[name]["input"]["cluster"].items()}
    with pytest.raises(EXCEPTIONS[expected(name)["raises"]], match=re.escape(expected(name)["message"])):
        mpidist.ParameterServerStrategy(SimpleClusterResolver(mpidist.ClusterSpec(jobs)))


def test_ps_props():
    def main():
        strategy = mpidist.ParameterServerStrategy(num_ps=3)
        first = mpidist.coordinator.ClusterCoordinator(strategy)
        found = [strategy.num_replicas_in_sync, first is mpidist.coordinator.ClusterCoordinator(strategy)]
        first._end()  # as at the end of a program
        return found

    assert run_ranks(6, main)[0] == expected("ps_props")


def test_ps_shard_2x1():
    def values(strategy):
        with strategy.scope():
            [mpidist.Variable(0.0) for _ in range(5)]
            v = mpidist.Variable(numpy.array([[0.0], [1.0]], "float32"), name="v")
        shards = getattr(v, "variables", [v])
        return {
            "shape": list(v.shape),
            "shards": [list(each.shape) for each in shards],
            "devices": [each.device for each in shards],
            "values": [each.value.tolist() for each in shards],
        }

    found = on_worker(values, 3, variable_partitioner=MinSizePartitioner(16, 3))
    assert found == {name: expected("ps_shard_2x1")[name] for name in found}


def test_ps_colocate():
    def places(strategy):
        with strategy.scope():
            a = mpidist.Variable(0.0)
            b = mpidist.Variable(0.0)
            with strategy.extended.colocate_vars_with(a):
                d = mpidist.Variable(numpy.zeros((8, 2), "float32"))
        return [d.device == a.device, b.device == a.device, hasattr(d, "variables")]

    same, other, is_sharded = on_worker(places, 2, variable_partitioner=MinSizePartitioner(16, 2))
    assert [same, other] == expected("ps_colocate")[:2]
    assert not is_sharded


def test_ps_sharded_variable_ops():
    def values(strategy):
        with strategy.scope():
            v = mpidist.Variable(numpy.arange(20, dtype="float32").reshape(10, 2))
        assert v.num_shards == 3
        found = {
            "full": numpy.asarray(v),
            "slice_2_8": v[2:8],
            "row3": v[3],
            "step3": v[::3],
            "neg": v[-1],
            "col1": v[:, 1],
            "lookup_9_0_4": v.sparse_read([9, 0, 4]),
        }
        v.assign(numpy.ones((10, 2), "float32"))
        found["after_assign"] = v[5]
        rows = mpidist.IndexedSlices(numpy.array([[5.0, 5.0], [7.0, 7.0]], "float32"), [0, 9])
        v.scatter_add(rows)
        found["after_scatter_add"] = v.sparse_read([0, 9])
        return {name: value.tolist() for name, value in found.items()}

    assert on_worker(values, 3, variable_partitioner=MinSizePartitioner(16, 3)) == expected("ps_sharded_variable_ops")


def test_coord_schedule_join(strategy, coordinator):
    with strategy.scope():
        v = mpidist.Variable(0.0)

    def add():
        return float(v.assign_add(1.0).value)

    values = [coordinator.schedule(add) for _ in range(6)]
    coordinator.join()
    found = {
        "final": float(v.read_value()),
        "done": coordinator.done(),
        "set_of_fetched_is_monotone_up_to_6": max(coordinator.fetch(values)),
    }
    assert found == expected("coord_schedule_join")


def test_coord_remote_value_as_input(coordinator):
    value = coordinator.schedule(lambda: 1)
    with pytest.raises(EXCEPTIONS[expected("coord_remote_value_as_input")["raises"]]) as raised:
        coordinator.schedule(lambda x: x, args=(value,))
    assert "used as an input to scheduled function" in str(raised.value)


class InvalidArgumentError(Exception):
    pass


def fail():
    raise InvalidArgumentError("this function fails")


def test_coord_error_raised_by_schedule(coordinator):
    coordinator.schedule(fail)
    with pytest.raises(InvalidArgumentError) as raised:
        for _ in range(1000):
            coordinator.schedule(int)
    assert type(raised.value).__name__ == expected("coord_error_raised_by_schedule")
    coordinator.join()


def test_coord_cancelled_status(coordinator):
    values = [coordinator.schedule(int)]
    coordinator.join()
    with pytest.raises(InvalidArgumentError):
        for fn in [fail, *[int] * 1000]:
            values.append(coordinator.schedule(fn))
        coordinator.join()
    outcomes = set(map(outcome, values))
    # how many had begun when the error came, if any, depends on the moment
    assert {"ok", "InvalidArgumentError"} <= outcomes
    assert outcomes <= set(expected("coord_cancelled_status")["fetch_outcomes"])


def outcome(value):
    try:
        value.fetch()
    except (mpidist.errors.CancelledError, InvalidArgumentError) as error:
        return type(error).__name__
    return "ok"


def test_coord_worker_index_outside(coordinator):
    case = expected("coord_worker_index_outside")
    with pytest.raises(EXCEPTIONS[case["raises"]], match="Cannot retrieve the worker index"):
        mpidist.coordinator.experimental_get_current_worker_index()


def test_ps_run_on_coordinator(strategy, coordinator):
    assert [strategy.run(lambda: 2)] == expected("ps_run_on_coordinator")


def test_ps_distribute_dataset_iter_on_coordinator(strategy, coordinator):
    case = expected("ps_distribute_dataset_iter_on_coordinator")
    dataset = mpidist.data.Dataset.from_arrays(numpy.arange(8.0)).batch(2)
    with pytest.raises(EXCEPTIONS[case["raises"]], match=re.escape(case["message"])):
        iter(strategy.experimental_distribute_dataset(dataset))


def test_coord_wrong_strategy():
    case = expected("coord_wrong_strategy")
    with pytest.raises(AttributeError, match=re.escape(case["message"])):
        mpidist.coordinator.ClusterCoordinator(mpidist.MirroredStrategy())


def test_every_case_is_tested_or_listed():
    tested = {name.removeprefix("test_") for name in globals()} | {*REFUSED}
    assert set(CASES) == (tested & set(CASES)) | (DEVIATIONS.keys() & set(CASES))
