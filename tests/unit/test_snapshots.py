"""Values of variables where a library is imported that reads arrays later: snapshots, which nothing writes again.

The library is a name in `sys.modules`; that JAX and PyTorch get right numbers is tested in `tests/frameworks`.
"""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import types

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.collectives.reductions import update
from mpidist.testing import run_ranks
from mpidist.variables import snapshots
from tests.unit.parameter_server.jobs import job, one_worker

SHAPE = (6, 2)


@pytest.fixture
def late_reader(monkeypatch):
    """Import a library that reads arrays later, as JAX."""
    monkeypatch.setitem(snapshots.LATE_READERS, "reads_late", False)
    monkeypatch.setitem(sys.modules, "reads_late", types.ModuleType("reads_late"))


@pytest.fixture
def late_writer(monkeypatch):
    """Import a library that also wants memory which it may write, as PyTorch."""
    monkeypatch.setitem(snapshots.LATE_READERS, "writes_late", True)
    monkeypatch.setitem(sys.modules, "writes_late", types.ModuleType("writes_late"))


# -- the rule, over random sequences of reads and writes ---------------------------------------------------------------

#: What writes do to a variable, and to a model of it.  Small whole numbers: all sums are exact.
ROWS = mpidist.IndexedSlices(numpy.full((2, 2), 3, "f4"), numpy.array([1, 4]))


def _sgd(variable, optimizer):
    strategy = variable.strategy
    gradient = numpy.ones(SHAPE, "f4") / strategy.num_replicas_in_sync
    strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))


def _restore(variable, _):
    if variable.strategy.num_replicas_in_sync > 1:  # as a checkpoint: when all have come
        variable.strategy.reduce("SUM", 0.0, axis=None)
    variable.restore(numpy.full(SHAPE, 8, "f4"))


WRITES = {
    "assign": (lambda v, o: v.assign(numpy.full(SHAPE, 5, "f4")), lambda model: model.fill(5)),
    "assign_add": (lambda v, o: v.assign_add(numpy.ones(SHAPE, "f4")), lambda model: model.__iadd__(1)),
    "assign_sub": (lambda v, o: v.assign_sub(numpy.ones(SHAPE, "f4")), lambda model: model.__isub__(1)),
    "scatter_add": (lambda v, o: v.scatter_add(ROWS), lambda model: model.__setitem__([1, 4], model[[1, 4]] + 3)),
    "scatter_update": (lambda v, o: v.scatter_update(ROWS), lambda model: model.__setitem__([1, 4], 3)),
    "restore": (_restore, lambda model: model.fill(8)),
    "optimizer": (_sgd, lambda model: model.__isub__(1)),
}

HOLDS = {
    "whole": lambda value: value,
    "rows": lambda value: value[1:3],
    "every other": lambda value: value.T[:, ::2],
    "flat": lambda value: value.reshape(-1)[3:],
    "buffer": lambda value: numpy.frombuffer(memoryview(value).cast("B"), "f4"),
    "array": numpy.asarray,
}

ACTIONS = st.lists(st.sampled_from([*WRITES, *WRITES, *HOLDS, "read", "let go", "let all go"]), min_size=5, max_size=25)


def check(strategy, actions):
    """Do the actions; what was held once never changes, and what is read is what was written."""
    with strategy.scope():
        variable, optimizer = mpidist.Variable(numpy.zeros(SHAPE, "f4")), mpidist.optimizers.SGD(1.0)
    model, held, before = numpy.zeros(SHAPE, "f4"), [], None
    for action in actions:
        if action in WRITES:
            write, write_model = WRITES[action]
            write(variable, optimizer)
            write_model(model)
            before = None
        elif action in HOLDS:
            part = HOLDS[action](variable.value)
            held.append((part, part.copy(), HOLDS[action](model.copy()).copy()))
        elif action == "let go":
            held = held[1:]
        elif action == "let all go":
            held = []
        else:
            value = variable.value
            assert (before is None or value is before) and not value.flags.writeable
            before = value
        for part, then, expected in held:
            assert (part == then).all() and (then == expected).all()
        assert (variable.value == model).all(), action
    return True


RULE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@RULE
@given(ACTIONS)
def test_alone(late_reader, actions):
    assert check(mpidist.OneDeviceStrategy("/cpu:0"), actions)


@settings(RULE, max_examples=10)
@given(ACTIONS)
@pytest.mark.parametrize("kind", [mpidist.MirroredStrategy, mpidist.experimental.CentralStorageStrategy])
@pytest.mark.parametrize("least_bytes", [1, 1 << 20], ids=["updated while summed", "updated after"])
def test_on_ranks(late_reader, monkeypatch, kind, least_bytes, actions):
    monkeypatch.setattr(update, "LEAST_BYTES", least_bytes)
    assert run_ranks(2, lambda: check(kind(), actions)) == [True, True]


@settings(RULE, max_examples=10)
@given(ACTIONS)
@pytest.mark.parametrize("shards", [1, 2])
def test_variables_without_servers(late_reader, shards, actions):
    partitioner = mpidist.experimental.partitioners.FixedShardsPartitioner(shards)
    assert run_ranks(1, lambda: check(mpidist.ParameterServerStrategy(variable_partitioner=partitioner), actions))


@settings(RULE, max_examples=10)
@given(ACTIONS)
@pytest.mark.parametrize("shards", [1, 2])
def test_variables_on_servers(late_reader, shards, actions):
    partitioner = mpidist.experimental.partitioners.FixedShardsPartitioner(shards)
    assert one_worker(lambda strategy: check(strategy, actions), variable_partitioner=partitioner)


def test_variables_of_several_ranks_on_servers(late_reader):
    def fn(strategy):
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(SHAPE, "f4"), aggregation="ONLY_FIRST_REPLICA")
        held = []
        for number in range(4):
            held.append((variable.value, number))
            assert variable.value is held[-1][0]
            variable.assign_add(numpy.ones(SHAPE, "f4"))
        variable.sparse_read([0])  # it is kept apart from now on
        for number in range(4, 8):
            held.append((variable.value[:3], number))
            variable.scatter_add(mpidist.IndexedSlices(numpy.ones(SHAPE, "f4"), numpy.arange(6)))
        return all((value == number).all() for value, number in held)

    assert job(fn, 3, ranks_per_worker=2) == [True, True]


def test_one_copy_that_another_rank_writes(late_reader):
    """The only element is updated by one of the ranks."""

    def fn():
        strategy = mpidist.experimental.CentralStorageStrategy()
        with strategy.scope():
            variable, optimizer = mpidist.Variable(numpy.float32(0)), mpidist.optimizers.SGD(1.0)
        held = [variable.value]
        for _ in range(3):
            strategy.run(lambda: optimizer.apply_gradients([(numpy.float32(-0.5), variable)]))
            held.append(variable.value)
        return [float(value) for value in held]

    assert run_ranks(2, fn) == [[0.0, 1.0, 2.0, 3.0]] * 2


# -- reading in the middle of a write: what another thread may do ------------------------------------------------------


class _ReadsWhileItWrites(mpidist.optimizers.SGD):
    """A rule in whose middle somebody reads a variable."""

    read = None

    def update_slice(self, *args):
        self.read()
        super().update_slice(*args)


@pytest.mark.parametrize("kind", [mpidist.MirroredStrategy, mpidist.experimental.CentralStorageStrategy])
@pytest.mark.parametrize("least_bytes", [1, 1 << 20], ids=["updated while summed", "updated after"])
@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_read_in_the_middle_of_an_update_does_not_last(late_reader, monkeypatch, kind, least_bytes, sparse):
    monkeypatch.setattr(update, "LEAST_BYTES", least_bytes)

    def fn():
        strategy = kind()
        with strategy.scope():
            variable, optimizer = mpidist.Variable(numpy.zeros(SHAPE, "f4")), _ReadsWhileItWrites(1.0)
        optimizer.read = lambda: variable.value
        gradient = numpy.full(SHAPE, -1 / strategy.num_replicas_in_sync, "f4")
        rows = mpidist.IndexedSlices(gradient, numpy.arange(len(gradient)), SHAPE) if sparse else gradient
        strategy.run(lambda: optimizer.apply_gradients([(rows, variable)]))
        return bool((variable.value == 1).all())

    assert run_ranks(2, fn) == [True, True]


@pytest.mark.parametrize("kind", [mpidist.MirroredStrategy, mpidist.experimental.CentralStorageStrategy])
def test_what_is_read_in_the_middle_of_an_assignment_does_not_last(late_reader, kind):
    def fn():
        strategy = kind()
        with strategy.scope():
            variable = mpidist.Variable(numpy.zeros(SHAPE, "f4"))

        def change(storage):
            variable._snapshot.of(variable.live, variable._changes)
            storage[...] = 1

        variable._change("assign", change)
        return bool((variable.value == 1).all())

    assert run_ranks(2, fn) == [True, True]


def test_threads_read_while_one_writes(late_reader, monkeypatch):
    variable, written, seen = mpidist.Variable(numpy.zeros(100_000)), threading.Event(), []

    def read():
        while not written.is_set():
            seen.append(variable.value is not None)

    readers = [threading.Thread(target=read) for _ in range(2)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for reader in readers:
            reader.start()
        for number in range(200):
            variable.assign(numpy.full(100_000, number))
            assert (variable.value == number).all()
    finally:
        written.set()
        for reader in readers:
            reader.join()
        sys.setswitchinterval(before)
    assert all(seen)


def test_a_shallow_copy_is_the_same_variable(late_reader):
    variable = mpidist.Variable(numpy.zeros(3))
    again, before = copy.copy(variable), variable.value
    again.assign(numpy.ones(3))
    assert before.tolist() == [0, 0, 0] and variable.value.tolist() == again.value.tolist() == [1, 1, 1]


# -- when, and at what cost --------------------------------------------------------------------------------------------


def test_without_such_a_library_it_is_a_live_view():
    variable = mpidist.Variable(numpy.zeros(3))
    value = variable.value
    variable.assign(numpy.ones(3))
    assert value.tolist() == [1, 1, 1] and variable.value is value and not value.flags.writeable


def test_a_library_that_is_imported_later_counts(monkeypatch):
    variable = mpidist.Variable(numpy.zeros(3))
    live = variable.value
    monkeypatch.setitem(sys.modules, next(iter(snapshots.LATE_READERS)), types.ModuleType("late"))
    value = variable.value
    variable.assign(numpy.ones(3))
    assert (live.tolist(), value.tolist(), variable.value.tolist()) == ([1, 1, 1], [0, 0, 0], [1, 1, 1])


@pytest.mark.parametrize(("setting", "seen"), [("0", 1), ("1", 0), ("auto", 0)])
def test_the_setting_decides(late_reader, monkeypatch, setting, seen):
    monkeypatch.setenv("MPIDIST_SNAPSHOTS", setting)
    snapshots._asked.cache_clear()
    monkeypatch.setattr(snapshots, "LATE_READERS", {} if setting == "1" else snapshots.LATE_READERS)
    try:
        variable = mpidist.Variable(numpy.zeros(()))
        value = variable.value
        variable.assign(1.0)
        assert value == seen
    finally:
        snapshots._asked.cache_clear()


def test_memory_is_used_again_when_nobody_holds_it(late_reader):
    variable = mpidist.Variable(numpy.zeros(4000))
    places = set()
    for number in range(20):
        variable.assign(numpy.full(4000, number))
        part = variable.value[10:20]  # held until the next one is taken
        places.add(variable.value.ctypes.data)
        assert part[0] == number
    assert len(places) <= 2 and not any(place % 64 for place in places)


def test_reading_inside_the_library_is_no_write(late_reader):
    """What only looks at the array leaves the snapshot as it is."""

    def fn():
        strategy = mpidist.MirroredStrategy()
        with strategy.scope():
            variable = mpidist.Variable(numpy.ones(SHAPE), synchronization="ON_READ", aggregation="SUM")
        return strategy.run(lambda: variable.value), variable, strategy

    for value, variable, strategy in run_ranks(2, lambda: _after_looking(*fn())):
        assert strategy.run(lambda variable=variable: variable.value) is value


def _after_looking(value, variable, strategy):
    assert (variable.value == 2).all()  # across replicas: the sum of the copies, of the caller's own
    strategy.extended.gradient_buffers([variable])
    mpidist.optimizers.SGD(1.0).updates_in_reduction([variable])
    return value, variable, strategy


def test_a_pickled_variable_has_no_memory_of_others(late_reader):
    variable = mpidist.Variable(numpy.arange(3.0))
    held = variable.value
    again = pickle.loads(pickle.dumps(variable))
    copied = copy.copy(variable._snapshot)
    assert again.value.tolist() == held.tolist() and again.value is not held
    assert copied.of(numpy.zeros(3), 0) is not held


@pytest.mark.parametrize("value", [1.5, numpy.zeros((0, 3)), numpy.array(True), numpy.arange(3, dtype="int8")])
def test_any_shape_and_dtype(late_reader, value):
    variable = mpidist.Variable(value)
    before = variable.value
    variable.assign(numpy.zeros_like(before))
    assert before.dtype == variable.dtype and before.shape == variable.shape and (before == value).all()
