"""A checkpoint that is restored while workers train: steps from before it change nothing that it has set."""

from __future__ import annotations

import threading
import time

import numpy
import pytest

import mpidist
from mpidist.errors import TransportTimeoutError
from mpidist.optimizers import SGD
from mpidist.parameter_server.consistency import BackupWorkers, StaleSynchronous
from mpidist.parameter_server.server.store import Store
from tests.unit.parameter_server.jobs import job

POLICIES = pytest.mark.parametrize(
    "consistency", [None, StaleSynchronous(0), StaleSynchronous(10), BackupWorkers(2)], ids=str
)


@POLICIES
@pytest.mark.parametrize("servers", [1, 2])
def test_workers_steps_from_before_are_not_made_on_what_was_restored(servers, consistency, tmp_path):
    path = tmp_path / "checkpoint.h5"
    has_begun = threading.Event()

    def on_worker(strategy):
        number = strategy.extended.number
        with strategy.scope():
            variables = [mpidist.Variable(numpy.zeros(2)) for _ in range(2)]
            optimizer = SGD(1.0)
        checkpoint = mpidist.Checkpoint(a=variables[0], b=variables[1], optimizer=optimizer)
        if number == 0:
            checkpoint.save(path)
        else:
            has_begun.set()
            time.sleep(0.2)  # the first would have restored by now
        has_begun.wait(10)
        for _ in range(3 * number):
            strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(2), each) for each in variables]))
        checkpoint.restore(path)
        return [each.value.tolist() for each in variables], optimizer.iterations

    found = job(on_worker, 2 + servers, num_ps=servers, consistency=consistency)
    assert found == [([[0.0, 0.0]] * 2, 0)] * 2


@POLICIES
@pytest.mark.parametrize("ranks_per_worker", [1, 2])
def test_all_workers_see_what_was_restored(ranks_per_worker, consistency, tmp_path):
    """Before, workers other than the first went on to see the snapshot from before."""
    path = tmp_path / "checkpoint.h5"

    def on_worker(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.ones(2))
        checkpoint = mpidist.Checkpoint(w=w)
        checkpoint.save(path)
        strategy.extended._client.meet(100)
        if strategy.extended.number == 0:
            w.assign(numpy.zeros(2))
        strategy.extended._client.meet(101)
        assert w.value.tolist() == [0.0, 0.0]
        checkpoint.restore(path)
        return w.value.tolist()

    trainers = 2 * ranks_per_worker
    found = job(on_worker, trainers + 1, ranks_per_worker=ranks_per_worker, consistency=consistency)
    assert found == [[1.0, 1.0]] * trainers


@pytest.mark.parametrize("lost_by", ["accumulation", "rounding"])
def test_nothing_of_gradients_from_before_is_part_of_later_steps(lost_by, tmp_path):
    path = tmp_path / "checkpoint.h5"
    is_accumulated = lost_by == "accumulation"
    odd = 1 + 2.0**-12  # float16 loses the last part

    def on_worker(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(1, "float32"))
            optimizer = SGD(1.0, gradient_accumulation_steps=2 if is_accumulated else 1)
        checkpoint = mpidist.Checkpoint(w=w, optimizer=optimizer)
        checkpoint.save(path)
        strategy.extended._client.meet(99)  # the checkpoint has nothing of what is pushed below

        def push(value):
            optimizer.apply_gradients([(numpy.full(1, value, "float32"), w)])

        if strategy.extended.number:
            strategy.run(push, args=(100.0 if is_accumulated else odd,))
        checkpoint.restore(path)
        if strategy.extended.number:
            for _ in range(2 if is_accumulated else 1):
                strategy.run(push, args=(0.125,))  # to which float16 could add what was lost
        strategy.extended._client.meet(100)
        return float(w.read_value()[0])

    assert job(on_worker, 3, push_dtype=None if is_accumulated else "float16") == [-0.125] * 2


def test_the_last_step_of_backup_workers_before_has_all_its_gradients(tmp_path):
    def on_worker(strategy):
        number = strategy.extended.number
        with strategy.scope():
            w, optimizer = mpidist.Variable(numpy.zeros(1)), SGD(1.0)
        time.sleep(0.05 * number)
        strategy.run(lambda: optimizer.apply_gradients([(numpy.full(1, 3.0**number), w)]))
        manager = mpidist.CheckpointManager(mpidist.Checkpoint(w=w), tmp_path, 1)
        assert manager.restore_or_initialize() is None
        return w.read_value().tolist()

    assert job(on_worker, 4, consistency=BackupWorkers(3)) == [[-(1.0 + 3.0 + 9.0) / 3]] * 3


def test_a_worker_that_does_not_restore_is_named(tmp_path):
    is_over = threading.Event()

    def on_worker(strategy):
        with strategy.scope():
            checkpoint = mpidist.Checkpoint(w=mpidist.Variable(numpy.zeros(2)))
        checkpoint.save(tmp_path / "checkpoint.h5")
        if strategy.extended.number == 1:
            assert is_over.wait(60)
            return
        try:
            checkpoint.restore(tmp_path / "checkpoint.h5")
        finally:
            is_over.set()

    missing = r"rank \d waits for rank 1 \(localhost\) to make a call that all workers make, as of restore"
    with pytest.raises(TransportTimeoutError, match=f"{missing}: nothing came in"):
        job(on_worker, 4, timeout_seconds=4)


def test_a_worker_that_has_ended_is_not_waited_for(tmp_path):
    def on_worker(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2))
        checkpoint = mpidist.Checkpoint(w=w)
        if strategy.extended.number == 2:
            strategy._client.leave()
            return None
        checkpoint.save(tmp_path / "checkpoint.h5")
        checkpoint.restore(tmp_path / "checkpoint.h5")
        return w.value.tolist()

    assert job(on_worker, 4) == [[0.0, 0.0]] * 2 + [None]


def test_a_chief_waits_for_the_functions_that_it_has_scheduled(tmp_path, monkeypatch):
    push = Store.push
    monkeypatch.setattr(Store, "push", lambda *arguments: (time.sleep(0.01), push(*arguments)))
    path = tmp_path / "checkpoint.h5"

    def on_rank(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2))
            optimizer = SGD(1.0)

        def step():
            time.sleep(0.02)
            optimizer.apply_gradients([(numpy.ones(2), w)])

        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        try:
            checkpoint = mpidist.Checkpoint(w=w, optimizer=optimizer)
            checkpoint.save(path)
            for _ in range(6):
                coordinator.schedule(step)
            checkpoint.restore(path)
            coordinator.join()
            return w.read_value().tolist(), optimizer.iterations
        finally:
            coordinator._end()

    assert job(on_rank, 4) == [([0.0, 0.0], 0)]


def test_a_worker_keeps_no_micro_batch_from_before_its_chief_has_restored(tmp_path):
    path = tmp_path / "checkpoint.h5"

    def on_rank(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(1))
            optimizer = SGD(1.0, gradient_accumulation_steps=2)

        def step(gradient):
            optimizer.apply_gradients([(numpy.full(1, gradient), w)])

        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        try:
            checkpoint = mpidist.Checkpoint(w=w, optimizer=optimizer)
            checkpoint.save(path)
            coordinator.schedule(step, args=(100.0,))
            checkpoint.restore(path)
            for _ in range(2):
                coordinator.schedule(step, args=(1.0,))
            coordinator.join()
            return w.read_value().tolist(), optimizer.iterations
        finally:
            coordinator._end()

    assert job(on_rank, 3) == [([-1.0], 1)]


def test_a_process_alone_goes_on_with_the_micro_batches_that_it_has_restored(tmp_path):
    strategy = mpidist.ParameterServerStrategy()
    with strategy.scope():
        w = mpidist.Variable(numpy.zeros(1))
        optimizer = SGD(1.0, gradient_accumulation_steps=2)

    def step(gradient):
        optimizer.apply_gradients([(numpy.full(1, gradient), w)])

    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    checkpoint = mpidist.Checkpoint(w=w, optimizer=optimizer)
    coordinator.schedule(step, args=(3.0,))
    checkpoint.save(tmp_path / "checkpoint.h5")
    checkpoint.restore(tmp_path / "checkpoint.h5")
    coordinator.schedule(step, args=(1.0,))
    coordinator.join()
    coordinator._end()
    assert w.value.tolist() == [-2.0]


@pytest.mark.parametrize("verb", ["save", "restore"])
def test_a_scheduled_function_saves_and_restores_nothing(verb, tmp_path):
    """Before, a save in one did nothing without a word, and a restore waited for the chief's for ever."""

    def on_rank(strategy):
        with strategy.scope():
            w = mpidist.Variable(numpy.zeros(2))
        checkpoint = mpidist.Checkpoint(w=w)
        path = tmp_path / "checkpoint.h5"

        def act():
            getattr(checkpoint, verb)(path)

        coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
        try:
            checkpoint.save(path)
            coordinator.schedule(act)
            with pytest.raises(RuntimeError, match="let the program of the chief do it"):
                coordinator.join()
            return True
        finally:
            coordinator._end()

    assert job(on_rank, 3) == [True]
