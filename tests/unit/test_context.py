"""The stack of modes: threads, nesting and its errors."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy
import pytest

import mpidist
from mpidist import context
from mpidist.strategies import alone, default
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.testing import run_ranks


@pytest.fixture
def strategy():
    return OneDeviceStrategy("/cpu:0")


@pytest.fixture
def unset():
    yield
    context.experimental_set_strategy(None)


def test_outside_of_scopes_the_default_strategy_is_in_a_replica_context():
    assert not context.has_strategy()
    assert not context.in_cross_replica_context()
    assert context.get_replica_context().strategy is context.get_strategy() is default.STRATEGY


def test_a_scope_is_left_also_by_an_exception(strategy):
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError
    assert not context.has_strategy()


def test_scope_of_another_strategy_inside_a_scope(strategy):
    other = OneDeviceStrategy("/cpu:1")
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing different tf.distribute.Strategy objects"):
        other.scope().__enter__()


def test_run_of_another_strategy_inside_a_scope(strategy):
    with strategy.scope(), pytest.raises(RuntimeError, match="Mixing different"):
        OneDeviceStrategy("/cpu:1").run(lambda: None)


def test_scope_inside_run(strategy):
    def fn():
        with strategy.scope():
            raise AssertionError("the scope was entered")

    with pytest.raises(RuntimeError, match=r"use get_replica_context\(\).merge_call\(\)"):
        strategy.run(fn)


def test_reduce_inside_run(strategy):
    with pytest.raises(RuntimeError, match="Method requires being in cross-replica context"):
        strategy.run(lambda: strategy.reduce("SUM", 1.0, axis=None))


def test_a_merge_call_is_cross_replica(strategy):
    def merge_fn(merging, *args, **kwargs):
        assert merging is context.get_strategy() is strategy
        assert context.in_cross_replica_context() and context.get_replica_context() is None
        return args, kwargs

    def fn():
        merged = context.get_replica_context().merge_call(merge_fn, (1, 2), {"three": 3})
        assert not context.in_cross_replica_context()
        return merged

    assert strategy.run(fn) == ((1, 2), {"three": 3})


def test_a_replica_context_is_good_in_its_own_replica_only(strategy):
    replica = strategy.run(context.get_replica_context)
    with pytest.raises(RuntimeError, match="Mixing different"), OneDeviceStrategy("/cpu:1").scope():
        replica.all_reduce("SUM", numpy.ones(1))
    with pytest.raises(RuntimeError, match="in the replica context that it is called on"), strategy.scope():
        replica.merge_call(lambda strategy: None)
    with pytest.raises(RuntimeError, match="Need to be inside"):
        replica.all_gather(numpy.ones(1), axis=0)


def test_a_replica_context_that_was_kept_is_good_in_a_later_run(strategy):
    replica = strategy.run(context.get_replica_context)
    assert strategy.run(context.get_replica_context) is replica
    assert strategy.run(lambda: replica.all_reduce("SUM", numpy.ones(1))) == strategy.num_replicas_in_sync


def test_a_new_thread_starts_in_the_default_context(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(context.get_strategy()))
        thread.start()
        thread.join()
    assert seen == [default.STRATEGY]


def test_experimental_set_strategy(strategy, unset):
    context.experimental_set_strategy(strategy)
    assert context.get_strategy() is strategy and context.in_cross_replica_context()
    with strategy.scope():
        assert strategy.run(context.get_strategy) is strategy
    with pytest.raises(RuntimeError, match="Must not nest"), default.STRATEGY.scope():
        raise AssertionError("the scope was entered")
    context.experimental_set_strategy(default.STRATEGY)
    assert not context.has_strategy()


def test_scopes_must_be_left_in_order(strategy):
    first, second = strategy.scope(), strategy.scope()
    first.__enter__()
    second.__enter__()
    with pytest.raises(RuntimeError, match="in the opposite order"):
        first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    context._state.stack.clear()


def test_a_run_must_be_left_after_the_scopes_in_it(strategy):
    left_open = strategy.scope()

    def fn():
        context.get_replica_context().merge_call(lambda merging: left_open.__enter__())

    with pytest.raises(RuntimeError, match="in the opposite order"):
        strategy.run(fn)
    left_open.__exit__(None, None, None)
    context._state.stack.clear()


def test_collectives_of_the_default_strategy_warn_once_where_there_are_other_ranks(monkeypatch):
    monkeypatch.setattr(alone, "_warned", threading.Lock())

    def fn():
        for _ in range(2):
            assert mpidist.get_strategy().reduce("SUM", 2.0, axis=None) == 2.0
            assert context.get_replica_context().all_reduce("SUM", numpy.ones(2)).tolist() == [1.0, 1.0]

    with pytest.warns(RuntimeWarning, match="reduces nothing over the 3 ranks of this job") as warned:
        run_ranks(3, fn)
    assert len(warned) == 1


def test_training_on_one_device_warns_where_there_are_other_ranks(monkeypatch):
    monkeypatch.setattr(alone, "_warned", threading.Lock())

    def fn():
        strategy = OneDeviceStrategy("/cpu:0")
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(2))
        optimizer = mpidist.optimizers.SGD(1.0)
        for _ in range(2):
            strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(2), variable)]))
        return variable.value.tolist()

    with pytest.warns(RuntimeWarning, match="OneDeviceStrategy reduces nothing over the 3 ranks of this job") as warned:
        assert run_ranks(3, fn) == [[-2.0, -2.0]] * 3
    assert len(warned) == 1


def test_the_default_strategy_alone_does_not_warn(recwarn):
    assert mpidist.get_strategy().gather([1, 2], axis=0).tolist() == [1, 2]
    assert not recwarn.list


def test_every_rank_has_contexts_of_its_own():
    def fn():
        strategy = MirroredStrategy()
        return strategy.run(lambda: context.get_replica_context().replica_id_in_sync_group)

    assert run_ranks(3, fn) == [0, 1, 2]


def test_the_context_works_before_any_strategy_is_imported():
    code = "from mpidist import context; assert context.get_replica_context().num_replicas_in_sync == 1"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
