"""Variables on servers: what reading and writing them means, whole and in shards."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist.errors import MpidistError
from mpidist.experimental.partitioners import FixedShardsPartitioner
from mpidist.parameter_server.client.served_variable import ServedVariable, ShardedVariable
from tests.unit.parameter_server.jobs import job, one_worker


def numbers(rows, columns=2):
    return numpy.arange(rows * columns, dtype="float32").reshape(rows, columns)


def alone(value, shards=1):
    """Return a variable in the scope of a strategy of one process."""
    strategy = mpidist.ParameterServerStrategy(variable_partitioner=FixedShardsPartitioner(shards))
    with strategy.scope():
        return mpidist.Variable(value, name="v")


# -- reading and writing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_writing_and_reading(shards):
    def on_worker(strategy):
        with strategy.scope():
            v = mpidist.Variable(numbers(5))
        found = [v.value.copy()]
        v.assign(numpy.ones((5, 2), "float32"))
        found.append(v.value.copy())
        v.assign_add(numbers(5))
        v.assign_sub(numpy.full((5, 2), 0.5))
        found.append(v.read_value())
        assert v.value.tolist() == found[-1].tolist() == v.numpy().tolist()
        assert not v.value.flags.writeable
        return found, (v + 1).tolist(), type(v)

    found, sums, kind = one_worker(on_worker, 3, variable_partitioner=FixedShardsPartitioner(shards))
    assert [each.tolist() for each in found[:2]] == [numbers(5).tolist(), [[1.0, 1.0]] * 5]
    assert found[2].tolist() == (numbers(5) + 0.5).tolist()
    assert sums == (numbers(5) + 1.5).tolist()
    assert kind is (ShardedVariable if shards > 1 else ServedVariable)


def test_what_all_workers_add_adds_up():
    met = threading.Barrier(3)

    def on_worker(strategy):
        with strategy.scope():
            v = mpidist.Variable(0, aggregation="ONLY_FIRST_REPLICA")
            w = mpidist.Variable(0.0)
        for _ in range(5):
            strategy.run(lambda: v.assign_add(1))
            w.assign_add(2.0)
        met.wait(20)
        return int(v.read_value()), float(w.read_value())

    assert job(on_worker, 4) == [(15, 30.0)] * 3


def test_the_chief_gives_the_initial_value():
    def on_worker(strategy):
        with strategy.scope():
            return float(mpidist.Variable(lambda: 7.0 + strategy._rank).read_value())

    assert job(on_worker, 4) == [7.0, 7.0, 7.0]


def test_a_value_stays_as_it_is_in_a_step():
    other_may_write, written = threading.Barrier(2), threading.Barrier(2)

    def on_worker(strategy):
        with strategy.scope():
            v = mpidist.Variable(numpy.zeros(3, "float32"))

        def step():
            before = v.value
            other_may_write.wait(20)
            if not strategy.extended.is_chief:
                v.assign_add(numpy.ones(3, "float32"))
            written.wait(20)
            return before.tolist(), v.value.tolist()

        return [strategy.run(step), strategy.run(lambda: v.value.tolist())]

    chief, other = job(on_worker, 3)
    assert chief == [([0.0] * 3, [0.0] * 3), [1.0] * 3]
    assert other == [([0.0] * 3, [1.0] * 3), [1.0] * 3]


def test_there_is_no_storage_here():
    with pytest.raises(RuntimeError, match="variable 'v' is held by ps 0, not by this process"):
        _ = alone(numbers(2)).storage


@pytest.mark.parametrize("shards", [1, 2])
def test_versions_count_changes(shards):
    v = alone(numbers(4), shards)
    before = v.version
    v.assign_add(numbers(4))
    v.assign(numbers(4))
    assert v.version == before + 2


@pytest.mark.parametrize(
    "write, error, message",
    [
        (lambda v: v.assign(numbers(3)), ValueError, r"'v' has shape \(4, 2\), got a value of shape \(3, 2\)"),
        (lambda v: v.assign(numbers(4) * 1j), TypeError, "'v' is float32"),
        (lambda v: v.sparse_read([4]), IndexError, "from 4 to 4 are outside of variable 'v' of 4 rows"),
        (lambda v: v.sparse_read([-1]), IndexError, "outside of variable 'v'"),
        (lambda v: v.sparse_read([0.5]), TypeError, "integers, got float64"),
        (lambda v: v.scatter_add(numbers(4)), TypeError, "not IndexedSlices"),
        (lambda v: v.scatter_add(mpidist.IndexedSlices(numbers(1), [9])), ValueError, "outside of an array"),
        (lambda v: v[4], IndexError, "4"),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_wrong_use(write, error, message, shards):
    v = alone(numbers(4), shards)
    with pytest.raises(error, match=message):
        write(v)
    assert v.numpy().tolist() == numbers(4).tolist()


# -- shards -----------------------------------------------------------------------------------------------------------


@given(st.data())
def test_slices_of_shards_are_those_of_the_whole(data):
    rows = data.draw(st.integers(1, 12))
    whole = numbers(rows, 3)
    v = alone(whole, data.draw(st.integers(1, rows)))
    ends = st.none() | st.integers(-rows - 2, rows + 2)
    first = data.draw(
        st.integers(-rows, rows - 1)
        | st.builds(slice, ends, ends, st.none() | st.sampled_from([1, 2, 3, 5, -1, -2]))
        | st.just(Ellipsis)
        | st.lists(st.integers(0, rows - 1), min_size=1, max_size=4)
    )
    key = data.draw(st.sampled_from([first, (first, slice(1, None)), (first, 1)]))
    if first is Ellipsis:
        key = first
    assert numpy.array_equal(v[key], whole[key])
    assert v[key].shape == whole[key].shape and v[key].dtype == whole.dtype


@given(st.data())
def test_rows_are_read_and_changed_as_those_of_an_array(data):
    rows = data.draw(st.integers(1, 10))
    shards = data.draw(st.integers(1, rows))
    whole = numbers(rows)
    v = alone(whole, shards)
    indices = data.draw(st.lists(st.integers(0, rows - 1), max_size=8))
    values = numpy.arange(1, 2 * len(indices) + 1, dtype="float32").reshape(-1, 2)
    verb, ufunc = data.draw(
        st.sampled_from([("add", numpy.add), ("sub", numpy.subtract), ("mul", numpy.multiply), ("max", numpy.maximum)])
    )
    getattr(v, f"scatter_{verb}")(mpidist.IndexedSlices(values, indices))
    ufunc.at(whole, numpy.array(indices, int), values)
    assert v.value.tolist() == v.read_value().tolist() == whole.tolist()
    asked = numpy.array(data.draw(st.lists(st.integers(0, rows - 1), min_size=2, max_size=6)))
    assert v.sparse_read(asked[: len(asked) // 2 * 2].reshape(2, -1)).tolist() == (
        whole[asked[: len(asked) // 2 * 2].reshape(2, -1)].tolist()
    )


def test_shards_have_names_and_servers_of_their_own():
    def on_worker(strategy):
        with strategy.scope():
            first = mpidist.Variable(0.0, name="first")
            v = mpidist.Variable(numbers(7), name="v")
            last = mpidist.Variable(0.0, name="last")
        assert [each.name for each in v.variables] == ["v/part_0", "v/part_1", "v/part_2"]
        assert [len(each) for each in v.variables] == [3, 2, 2]
        return [each.servers for each in (first, v, last)]

    # scalars are never cut, and every shard takes its turn
    assert one_worker(on_worker, 3, variable_partitioner=FixedShardsPartitioner(3)) == [(0,), (1, 2, 0), (1,)]


def test_by_bytes_servers_hold_as_much_as_each_other():
    def on_worker(strategy):
        with strategy.scope():
            sizes = [1000, 10, 990, 500, 480, 20]
            return [(mpidist.Variable(numpy.zeros(size)).servers[0], size) for size in sizes]

    held = [0, 0]
    for server, size in one_worker(on_worker, 2, placement="bytes"):
        held[server] += size
    assert held == [1500, 1500]


def test_a_partitioner_that_cuts_other_axes_is_refused():
    strategy = mpidist.ParameterServerStrategy(variable_partitioner=lambda shape, dtype: [1, 2])
    with strategy.scope(), pytest.raises(ValueError, match="along their first axis only"):
        mpidist.Variable(numbers(4))


# -- references -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_a_variable_is_pickled_as_a_reference(shards):
    v = alone(numbers(4), shards)
    assert pickle.loads(pickle.dumps(v)) is v
    assert len(pickle.dumps(v)) < 1000


@pytest.mark.parametrize("shards", [1, 3])
def test_a_deep_copy_is_another_variable_on_the_servers(shards):
    def on_worker(strategy):
        with strategy.scope():
            v = mpidist.Variable(numbers(5), name="v")
        v.assign_add(numpy.ones((5, 2), "float32"))
        new = copy.deepcopy(v)
        v.assign_add(numpy.ones((5, 2), "float32"))
        return new.value - numbers(5), v.value - numbers(5), new.name, type(new) is type(v)

    found = one_worker(on_worker, servers=2, variable_partitioner=FixedShardsPartitioner(shards))
    assert (found[0] == 1).all() and (found[1] == 2).all() and found[2:] == ("v_1", True)


def test_a_variable_made_by_the_chief_alone_reaches_the_others():
    sent = []
    there, read = threading.Event(), threading.Event()

    def on_worker(strategy):
        with strategy.scope():
            if strategy.extended.is_chief:
                v = mpidist.Variable(numbers(5), name="late", trainable=False)
                sent.append(pickle.dumps(v))
                there.set()
                assert read.wait(20)
                return v.read_value().tolist()
        assert there.wait(20)
        v = pickle.loads(sent[0])
        v.assign_add(numpy.ones((5, 2), "float32"))
        read.set()
        assert pickle.loads(sent[0]) is v
        return v.name, v.shape, v.trainable, type(v).__name__

    chief, other = job(on_worker, 4, num_ps=2, variable_partitioner=FixedShardsPartitioner(2))
    assert chief == (numbers(5) + 1).tolist()
    assert other == ("late", (5, 2), False, "ShardedVariable")


def test_a_variable_that_the_chief_has_not_made_at_its_end_is_not_waited_for():
    def on_worker(strategy):
        if strategy.extended.number == 0:
            strategy._client.leave()
            return True
        with strategy.scope(), pytest.raises(ValueError, match="creates variable 'w' .* the chief, .* has ended"):
            mpidist.Variable(numpy.zeros(2), name="w")
        return True

    assert job(on_worker, 3) == [True] * 2


def test_different_variables_are_named():
    def on_worker(strategy):
        with strategy.scope():
            mpidist.Variable(numpy.zeros(3 + strategy.extended.number, "float32"), name="w")

    with pytest.raises((ValueError, MpidistError), match="'w'.*shape"):
        job(on_worker, 3)
