"""An optimizer of servers is one for all workers: the same rule, and the steps that any of them has left out."""

from __future__ import annotations

import threading

import numpy
import pytest

import mpidist
from mpidist.optimizers import SGD, Adam, LossScaleOptimizer
from mpidist.parameter_server.consistency import BackupWorkers
from mpidist.testing import run_ranks
from tests.unit.parameter_server.jobs import job

FIRST = "optimizer number 0 is SGD(0.1, momentum=0.9, nesterov=False) at this server, and client 1 has "


def rate(steps):
    return 0.1


class Foreign(SGD):
    """A rule of somebody else."""


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (lambda: Adam(0.1), "Adam(0.1, beta_1=0.9, beta_2=0.999, epsilon=1e-07)"),
        (lambda: SGD(0.1, momentum=0.5), "SGD(0.1, momentum=0.5, nesterov=False)"),
        (lambda: SGD(0.1, momentum=0.9, weight_decay=0.1), "SGD(0.1, momentum=0.9, nesterov=False, weight_decay=0.1)"),
        (lambda: SGD(0.2, momentum=0.9), "SGD(0.2, momentum=0.9, nesterov=False)"),
        (lambda: SGD(rate, momentum=0.9), "SGD(rate, momentum=0.9, nesterov=False)"),
        (lambda: Foreign(0.3, momentum=0.9), "Foreign(0.3)"),
    ],
)
def test_optimizers_that_workers_make_in_another_order_are_named(other, told):
    has_pushed = threading.Event()

    def main():
        strategy = mpidist.ParameterServerStrategy(num_ps=1)
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2))
            makes = [lambda: SGD(0.1, momentum=0.9), other]
            first, _ = [make() for make in makes[:: -1 if strategy.extended.number else 1]]
        if strategy.extended.number:
            assert has_pushed.wait(10)
        strategy.run(lambda: first.apply_gradients([(numpy.ones(2), w)]))
        has_pushed.set()
        strategy.extended.pull()

    with pytest.raises(ValueError) as caught:
        run_ranks(3, main, timeout_seconds=10)
    assert FIRST + told in str(caught.value)


def test_workers_may_have_learning_rates_of_their_own():
    def on_worker(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2))
            optimizer = SGD(0.5)
        if strategy.extended.number:
            optimizer.learning_rate = 0.25
        strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(2), w)]))
        return True

    assert job(on_worker, 3) == [True] * 2


@pytest.mark.parametrize("kind", [numpy.float64, numpy.array])
def test_settings_may_be_numbers_of_numpy(kind):
    def on_worker(strategy):
        momentum = 0.5 if strategy.extended.number else kind(0.5)
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2))
            optimizer = SGD(0.5, momentum=momentum, weight_decay=numpy.float32(0.0))
        strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(2), w)]))
        strategy.extended._client.meet(100)
        return w.read_value().tolist()

    assert job(on_worker, 3) == [[-1.25, -1.25]] * 2


@pytest.mark.parametrize("arguments", [(3, {}), (5, {"ranks_per_worker": 2}), (3, {"consistency": BackupWorkers(1)})])
def test_steps_that_any_worker_has_left_out_count_for_all(arguments, tmp_path):
    ranks, options = arguments
    path = tmp_path / "checkpoint.h5"

    def on_worker(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2))
            optimizer = LossScaleOptimizer(SGD(1.0), initial_scale=4.0)
        skips = 2 if strategy.extended.number else 1
        for _ in range(skips):  # the first one before the servers have met the optimizer
            strategy.run(lambda: optimizer.apply_gradients([(numpy.array([1.0, numpy.inf]), w)]))
        assert optimizer.skipped_steps >= skips
        checkpoint = mpidist.Checkpoint(w=w, optimizer=optimizer)
        strategy.extended._client.meet(100)
        counted = optimizer.skipped_steps
        checkpoint.save(path)
        strategy.extended._client.meet(101)
        strategy.run(lambda: optimizer.apply_gradients([(numpy.array([1.0, numpy.nan]), w)]))
        checkpoint.restore(path)
        return counted, optimizer.skipped_steps, w.value.tolist()

    assert job(on_worker, ranks, **options) == [(3, 3, [0.0, 0.0])] * (ranks - 1)


def test_the_chief_knows_what_its_functions_have_left_out():
    def on_rank(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2))
            optimizer = SGD(1.0, skip_nonfinite=True)

        def step(gradient):
            optimizer.apply_gradients([(numpy.full(2, gradient), w)])

        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        try:
            for gradient in [1.0, numpy.nan, 1.0, numpy.inf, numpy.nan]:
                coordinator.schedule(step, args=(gradient,))
            coordinator.join()
            return optimizer.skipped_steps, optimizer.iterations, w.value.tolist()
        finally:
            coordinator._end()

    assert job(on_rank, 4) == [(3, 2, [-2.0, -2.0])]
