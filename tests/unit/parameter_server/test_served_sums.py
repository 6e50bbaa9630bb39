"""Metrics under a `ClusterCoordinator`: workers add to sums that lie on a server, the chief reads and resets them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import mpidist
from mpidist import metrics
from tests.unit.parameter_server.jobs import job

METRICS: list[Callable[[], Any]] = [
    metrics.Accuracy,
    metrics.BinaryAccuracy,
    metrics.CategoricalAccuracy,
    metrics.SparseCategoricalAccuracy,
    metrics.TopKCategoricalAccuracy,
    metrics.SparseTopKCategoricalAccuracy,
    metrics.AUC,
    metrics.Precision,
    lambda: metrics.Recall(thresholds=[0.2, 0.7]),
    metrics.MeanSquaredError,
    metrics.MeanAbsoluteError,
    lambda: metrics.get("accuracy"),
    lambda: metrics.get(lambda y_true, y_pred: abs(y_true - y_pred)),
]


def batch(metric: Any, number: int) -> tuple[Any, Any]:
    """Return labels and predictions of a batch, of a size of its own, for a kind of metric."""
    generator = numpy.random.default_rng(number)
    scores, classes = generator.random((number % 5, 6)), generator.integers(0, 6, number % 5)
    if "categorical" in metric.name:
        return (classes if "sparse" in metric.name else numpy.eye(6)[classes]), scores
    return classes % 2, scores[:, 0]


def coordinated(program: Callable[[Any, Any], Any], workers: int = 2, **arguments: Any) -> Any:
    """Return what ``program(strategy, coordinate)`` returns on the chief."""

    def on_rank(strategy: Any) -> Any:
        made: list[Any] = []

        def coordinate() -> Any:
            made.append(mpidist.coordinator.ClusterCoordinator(strategy))
            return made[0]

        try:
            return program(strategy, coordinate)
        finally:
            for coordinator in made:
                coordinator._end()  # a rank that is a thread has no end of its program

    return job(on_rank, 1 + workers + arguments.get("num_ps", 1), **arguments)[0]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("make", METRICS)
def test_the_chief_reads_what_all_workers_have_counted(make, workers):
    expected = make()
    for number in range(40):
        expected.update_state(*batch(expected, number))

    def program(strategy, coordinate):
        with strategy.scope():
            metric = make()
        coordinator, results = coordinate(), []
        for _ in range(2):
            for number in range(40):
                coordinator.schedule(lambda m, n: m.update_state(*batch(m, n)), args=(metric, number))
            coordinator.join()
            results.append(metric.result())
            metric.reset_state()
        return [*results, metric.result()]

    *results, after = coordinated(program, workers)
    for result in results:
        numpy.testing.assert_allclose(result, expected.result(), rtol=1e-14)
    numpy.testing.assert_array_equal(after, make().result())


def test_workers_read_the_sums_of_all_and_keep_what_they_read_of_variables():
    def program(strategy, coordinate):
        with strategy.scope():
            mean, w = metrics.Mean(), mpidist.Variable(numpy.zeros(3))

        def count(value):
            before = w.value
            mean.update_state(value)
            found = mean.result()
            assert w.value is before  # reading a metric is no reading of variables
            return found

        coordinator = coordinate()
        mean.update_state(10.0)  # the chief's own
        found = coordinator.fetch([coordinator.schedule(count, args=(float(n),)) for n in (20, 30)])
        first = mean.result()
        return first, sorted(found), coordinator.schedule(mean.result).fetch()

    first, found, later = coordinated(program, workers=1)
    assert first == later == 20.0
    assert found == [20.0, 25.0]  # the chief's 10 is added when it reads


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize(
    ("roles", "arguments"), [("", {}), ("", {"num_ps": 2}), ("chief:1,worker:4,ps:1", {"ranks_per_worker": 2})]
)
def test_a_metric_may_be_made_before_or_after_the_coordinator(is_early, roles, arguments, monkeypatch):
    def program(strategy, coordinate):
        coordinator = None if is_early else coordinate()
        with strategy.scope():
            mpidist.Variable(numpy.zeros(3))
            mean, other = metrics.Mean("first"), metrics.Mean("second")
        mean.update_state([1.0, 2.0])  # the chief's count; of what others have counted before, nothing does
        coordinator = coordinator or coordinate()
        for number in range(12):
            coordinator.schedule(lambda n: (mean.update_state(float(n)), other.update_state(-float(n))), args=(number,))
        coordinator.join()
        return mean.result(), other.result(), mean.state()["count"].tolist()

    if roles:
        monkeypatch.setenv("MPIDIST_ROLES", roles)
    ranks = arguments.get("ranks_per_worker", 1)  # each of a worker counts
    found = coordinated(program, 2 * ranks, **arguments)
    assert found == ((3 + ranks * 66) / (2 + 12 * ranks), -5.5, 2 + 12 * ranks)


def test_what_a_function_has_counted_before_it_failed_counts():
    def program(strategy, coordinate):
        with strategy.scope():
            mean = metrics.Mean()

        def fail(value):
            mean.update_state(value)
            raise ValueError("no")

        coordinator = coordinate()
        coordinator.schedule(fail, args=(7.0,))
        with pytest.raises(ValueError, match="no"):
            coordinator.join()
        return mean.result()

    assert coordinated(program) == 7.0


def test_a_metric_that_a_function_makes_is_its_own():
    def of_some(values):
        mean = metrics.Mean()
        mean.update_state(values)
        return mean.result()

    def program(strategy, coordinate):
        with strategy.scope():
            mean = metrics.Mean()
        coordinator = coordinate()
        own = coordinator.fetch([coordinator.schedule(of_some, args=([n, n + 1.0],)) for n in range(3)])
        return own, mean.result()

    assert coordinated(program) == ([0.5, 1.5, 2.5], 0.0)


def test_sums_are_saved_and_restored(tmp_path):
    def program(strategy, coordinate):
        with strategy.scope():
            mean = metrics.Mean()
        coordinator = coordinate()
        checkpoint = mpidist.Checkpoint(mean=mean)
        results = []
        for value in (1.0, 3.0):
            coordinator.schedule(mean.update_state, args=(value,)).fetch()
            results.append(mean.result())
            if value == 1.0:
                checkpoint.save(tmp_path / "saved.h5")
        checkpoint.restore(tmp_path / "saved.h5")
        return [*results, mean.result(), copy.copy(mean) is mean]

    assert coordinated(program) == [1.0, 2.0, 1.0, True]


def test_sums_are_no_part_of_the_variables_that_workers_read():
    def program(strategy, coordinate):
        with strategy.scope():
            w, mean = mpidist.Variable(numpy.zeros(1000)), metrics.Mean()
        coordinator = coordinate()
        before = w.version
        for number in range(9):
            coordinator.schedule(mean.update_state, args=(float(number),))
        coordinator.join()
        strategy.extended.pull()
        return mean.result(), w.version - before, len(strategy._client.snapshot)

    result, versions, snapshot = coordinated(program)
    assert (result, versions) == (4.0, 0)
    assert snapshot <= 1


def test_without_a_coordinator_each_worker_has_its_own():
    def on_rank(strategy):
        with strategy.scope():
            mean = metrics.Mean()
        number = strategy.cluster_resolver.task_id + (0 if strategy.extended.is_chief else 1)
        mean.update_state(float(number))
        return mean.result(), len(strategy._client.specs)

    assert job(on_rank, 4) == [(0.0, 0), (1.0, 0), (2.0, 0)]


def test_one_process_alone_counts_for_itself():
    strategy = mpidist.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        mean = metrics.Mean()
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    for number in range(5):
        coordinator.schedule(mean.update_state, args=(float(number),))
    coordinator.join()
    assert mean.result() == 2.0
    mean.reset_state()
    assert mean.result() == 0.0
    coordinator._end()


def test_a_trainer_leaves_what_a_coordinators_functions_have_counted():
    strategy = mpidist.ParameterServerStrategy(num_ps=1)
    with strategy.scope():
        w, error = mpidist.Variable(numpy.zeros(1)), metrics.MeanSquaredError()
    trainer = mpidist.Trainer(
        lambda p, x, y: (0.0, [p[0]]), [w], mpidist.optimizers.SGD(0.1), metrics=[error], predict_fn=lambda p, x: x
    )
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    coordinator.schedule(error.update_state, args=(numpy.zeros(2), numpy.full(2, 2.0))).fetch()
    data = numpy.ones((4, 1))
    for call in (trainer.fit, trainer.evaluate):
        with pytest.raises(ValueError, match="a ClusterCoordinator has been made"):
            call(data, data)
    assert error.result() == 4.0
    coordinator._end()
