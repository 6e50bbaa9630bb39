"""The communicator on loopback ranks: every collective, every algorithm, every placement."""

from weakref import ref

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.ways import messages
from mpidist.errors import CollectiveMismatchError, UnsupportedDtypeError
from mpidist.schedules.table import names
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

ALGORITHMS = ("auto", *names("all_reduce"), "hierarchical")
PLACEMENTS = {
    "one node": ["a"] * 6,
    "block": list("aabbcc"),
    "cyclic": list("abcabc"),
    "uneven": list("aaabbc"),
    "each alone": list("abcdef"),
}


def _values(rank, count, dtype="f8"):
    return (numpy.arange(count) % 5 + rank).astype(dtype)


def _sum(size, count, dtype="f8"):
    return ((numpy.arange(count) % 5) * size + size * (size - 1) // 2).astype(dtype)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("hosts", PLACEMENTS.values(), ids=PLACEMENTS)
def test_all_reduce_on_every_placement(algorithm, hosts):
    def step():
        communicator = world_communicator()
        results = []
        for count in (0, 1, 5, 6, 7, 1000):
            buffer = _values(communicator.rank, count)
            communicator.all_reduce(buffer, algorithm=algorithm)
            results.append(buffer)
        return results

    for results in run_ranks(6, step, hosts=hosts):
        for result in results:
            numpy.testing.assert_array_equal(result, _sum(6, result.size))


@pytest.mark.parametrize("hosts", [list("abab"), list("abba"), list("aabb"), list("abbb")])
@pytest.mark.parametrize("op", ["sum", "min", "max"])
def test_all_ranks_get_the_same_bits_on_every_placement(hosts, op):
    def step(algorithm):
        communicator = world_communicator()
        buffer = numpy.random.default_rng(communicator.rank).normal(size=300)
        buffer[::7] = 0.0 if communicator.rank % 2 else -0.0
        communicator.all_reduce(buffer, op, algorithm=algorithm)
        return buffer.tobytes()

    for algorithm in ALGORITHMS:
        assert len(set(run_ranks(4, step, algorithm, hosts=hosts))) == 1, algorithm


@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "f8", "i1", "u2", "i4", "i8", "c8", ">f8", ">i4"])
@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_all_reduce_of_every_dtype(dtype, hosts):
    def step():
        communicator = world_communicator()
        buffer = _values(communicator.rank, 12, dtype).reshape(3, 4)
        communicator.all_reduce(buffer)
        return buffer

    for result in run_ranks(3, step, hosts=list(hosts)):
        assert result.dtype == numpy.dtype(dtype)
        numpy.testing.assert_array_equal(result, _sum(3, 12, dtype).reshape(3, 4))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_reduce_scatter_gives_each_rank_its_share(size):
    def step():
        communicator = world_communicator()
        buffer = _values(communicator.rank, 11)
        return communicator.reduce_scatter(buffer), buffer

    for rank, (share, buffer) in enumerate(run_ranks(size, step)):
        numpy.testing.assert_array_equal(share, _sum(size, 11)[rank * 11 // size : (rank + 1) * 11 // size])
        numpy.testing.assert_array_equal(buffer, _values(rank, 11))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 3), st.integers(0, 3))
def test_all_gather_joins_uneven_parts_in_rank_order(lengths, axis, first, second):
    def part(rank):
        shape = [first, second]
        shape.insert(axis, lengths[rank])
        return numpy.full(shape, rank, "i4")

    def step():
        communicator = world_communicator()
        return communicator.all_gather(part(communicator.rank), axis), communicator.all_gather(
            part(communicator.rank), axis - 3
        )

    expected = numpy.concatenate([part(rank) for rank in range(len(lengths))], axis=axis)
    for joined, from_the_end in run_ranks(len(lengths), step):
        numpy.testing.assert_array_equal(joined, expected)
        numpy.testing.assert_array_equal(from_the_end, expected)


def test_all_gather_refuses_scalars_and_axes_out_of_range_before_any_communication():
    communicator = world_communicator()
    calls = communicator.control.call
    with pytest.raises(ValueError, match="at least one dimension"):
        communicator.all_gather(numpy.array(1.0))
    with pytest.raises(ValueError, match="axis 2 is out of range for an array of 2 dimensions"):
        communicator.all_gather(numpy.ones((2, 2)), axis=2)
    assert communicator.control.call == calls


def test_all_gather_of_parts_that_differ_elsewhere_is_a_mismatch():
    def step():
        communicator = world_communicator()
        communicator.all_gather(numpy.ones((2, 3 + communicator.rank)))

    with pytest.raises(CollectiveMismatchError, match=r"all_gather\(axis=0\).*\(-1, 4\).*\(-1, 3\)"):
        run_ranks(2, step)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", ["f4", "f2", "i8", "?"])
def test_broadcast_from_every_root(size, dtype):
    def step():
        communicator = world_communicator()
        results = []
        for root in range(size):
            array = numpy.full((2, 3), communicator.rank + 1, dtype)
            communicator.broadcast(array, root)
            results.append(array)
        return results

    for results in run_ranks(size, step):
        for root, result in enumerate(results):
            numpy.testing.assert_array_equal(result, numpy.full((2, 3), root + 1, dtype))


def test_a_root_outside_the_world_is_an_error():
    with pytest.raises(ValueError, match="root 1 is no rank of a world of 1"):
        world_communicator().broadcast(numpy.ones(1), root=1)


def test_exchange_returns_what_each_rank_gave():
    def step():
        communicator = world_communicator()
        return communicator.exchange(b"x" * communicator.rank)

    assert run_ranks(4, step) == [[b"", b"x", b"xx", b"xxx"]] * 4


def test_an_unknown_algorithm_lists_the_known_ones():
    def step():
        world_communicator().all_reduce(numpy.ones(1), algorithm="rign")

    with pytest.raises(ValueError, match="'rign'.*auto, ring, recursive_doubling, rabenseifner, binomial"):
        run_ranks(2, step)


@pytest.mark.parametrize(("dtype", "op"), [("O", "sum"), ("U3", "max"), ("?", "sum"), ("c8", "max")])
def test_what_cannot_be_reduced_is_refused_before_any_communication(dtype, op):
    communicator = world_communicator()
    calls = communicator.control.call
    with pytest.raises(UnsupportedDtypeError):
        communicator.all_reduce(numpy.zeros(2, dtype), op)
    assert communicator.control.call == calls


def test_arrays_that_are_not_contiguous_are_refused_before_any_communication():
    communicator = world_communicator()
    calls = communicator.control.call
    for work in (communicator.all_reduce, communicator.broadcast):
        with pytest.raises(ValueError, match=r"C-contiguous arrays, got shape \(2, 2\) with strides \(32, 16\)"):
            work(numpy.ones((2, 4))[:, ::2])
    assert communicator.control.call == calls


def test_collectives_of_different_names_do_not_match():
    def step():
        communicator = world_communicator()
        communicator.barrier() if communicator.rank else communicator.all_reduce(numpy.ones(2))

    with pytest.raises(CollectiveMismatchError, match="rank 1 called barrier, rank 0 called all_reduce"):
        run_ranks(2, step)


def test_the_communicator_of_a_world_is_one():
    def step():
        return world_communicator() is world_communicator()

    assert run_ranks(2, step) == [True, True]


@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("algorithm", ["ring", "recursive_doubling", "hierarchical"])
def test_a_buffer_over_messages_is_bound_once_for_all_of_its_shape_and_not_kept(algorithm, dtype, monkeypatch):
    made = []
    executor = messages.Executor

    def noted(*args, **kwargs):
        made.append(kwargs)
        return executor(*args, **kwargs)

    monkeypatch.setattr(messages, "Executor", noted)

    def step():
        communicator = world_communicator()
        for count in (3000, 3000, 7, 3000):
            buffer = _values(communicator.rank, count, dtype)
            communicator.all_reduce(buffer, algorithm=algorithm)
            numpy.testing.assert_array_equal(buffer, _sum(3, count, dtype))
            last = ref(buffer)
            del buffer
            assert last() is None
        return True

    assert run_ranks(3, step, hosts="aab") == [True] * 3
    assert len(made) == 3 * 2
