"""The all-reduce over several nodes: values for all placements, bits, memory used again, failures in the middle."""

import itertools
import tracemalloc

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.ways.lanes import Lanes
from mpidist.collectives.ways.two_level import TwoLevel
from mpidist.errors import TransportTimeoutError
from mpidist.schedules.table import algorithm
from mpidist.testing import run_ranks
from mpidist.transports import world
from mpidist.transports.loopback import Faults
from mpidist.world import world_communicator

#: Which rank is on which node: block, cyclic, uneven, alone on a node, out of order.
PLACEMENTS = ["ab", "aabb", "abab", "aaab", "abbb", "aab", "aaabbb", "abcabc", "abc", "aabbbc", "aaabbaab", "abcd"]

ACROSS = ("recursive_doubling", "ring", "rabenseifner", "binomial")


def _lanes(across="recursive_doubling"):
    here = world()
    return Lanes(here.segments, here.transport, here.topology, algorithm("all_reduce", across))


def _reduce(values_of, calls=1, across="recursive_doubling", dtype="f8", op="sum", transform=None, **options):
    """Reduce ``values_of(rank, call)`` over the nodes, `calls` times; return this rank's results."""
    rank, communicator, lanes = world().transport.rank, world_communicator(), _lanes(across)
    reduction, results = None, []
    for call in range(calls):
        values = numpy.asarray(values_of(rank, call), dtype)
        if reduction is None:
            reduction = TwoLevel(lanes, values.size, values.dtype, op, **options)
        watch = communicator.begin(communicator.call("test", [("", values.dtype, values.shape)]))
        bounds, out, taken = reduction.bounds, numpy.empty_like(values), numpy.zeros(values.size, int)

        def fill(index, place, bounds=bounds, values=values):
            place[...] = values[slice(*bounds[index])]

        def take(start, part, out=out, taken=taken):
            out[start : start + part.size] = part
            taken[start : start + part.size] += 1

        reduction.run(watch, fill, take, transform)
        assert (taken == 1).all()
        results.append(out)
    return results


@pytest.mark.parametrize("hosts", PLACEMENTS)
@pytest.mark.parametrize("across", ACROSS)
def test_sums_for_every_placement(hosts, across):
    size = len(hosts)
    for count in (1, 2, 5, 128, 131, 2000):
        expected = (numpy.arange(count) % 5) * size + size * (size - 1) // 2
        results = run_ranks(
            size, _reduce, lambda rank, call, n=count: numpy.arange(n) % 5 + rank, 1, across, hosts=hosts
        )
        for (result,) in results:
            numpy.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("hosts", ["aabb", "aaab"])
@pytest.mark.parametrize(("op", "expected"), [("sum", 10), ("min", 1), ("max", 4), ("prod", 24)])
@pytest.mark.parametrize("dtype", ["f4", "i2", "u8"])
def test_reductions_of_1_2_3_4(hosts, op, expected, dtype):
    def values(rank, call):
        return numpy.full(700, rank + 1)

    for (result,) in run_ranks(4, _reduce, values, 1, "ring", dtype, op, hosts=hosts):
        numpy.testing.assert_array_equal(result, numpy.full(700, expected))


@pytest.mark.parametrize("hosts", ["abab", "abb"])
def test_truth_values_and_complex_numbers(hosts):
    def truth(rank, call):
        return numpy.arange(100) % len(hosts) == rank

    for (result,) in run_ranks(len(hosts), _reduce, truth, 1, "ring", "?", "max", hosts=hosts):
        assert result.all()
    for (result,) in run_ranks(
        len(hosts), _reduce, lambda rank, call: numpy.full(300, 1j * rank), 1, "ring", "c16", hosts=hosts
    ):
        numpy.testing.assert_array_equal(result, 1j * sum(range(len(hosts))))


def test_a_mean_is_a_scaled_sum():
    def step():
        return _reduce(lambda rank, call: numpy.full(900, rank), scale=0.25)

    for (result,) in run_ranks(4, step, hosts="abab"):
        numpy.testing.assert_array_equal(result, numpy.full(900, 1.5))


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.sampled_from("abc"), min_size=2, max_size=5).filter(lambda hosts: len(set(hosts)) > 1),
    st.integers(1, 3000),
    st.integers(8, 5000),
    st.integers(1, 4),
)
def test_places_and_slots_may_be_used_again_for_many_calls(hosts, count, segment_bytes, calls):
    size = len(hosts)

    def step():
        return _reduce(
            lambda rank, call: (numpy.arange(count) % 7) * (call + 1) + rank, calls, segment_bytes=segment_bytes
        )

    for results in run_ranks(size, step, hosts=hosts):
        for call, result in enumerate(results):
            expected = size * (numpy.arange(count) % 7) * (call + 1) + size * (size - 1) // 2
            numpy.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(("hosts", "across"), [*itertools.product(["aabb", "abab", "aaab", "abcabc"], ACROSS[:2])])
def test_all_ranks_get_the_same_bits_whatever_the_timing(hosts, across):
    def values(rank, call):
        return numpy.random.default_rng(rank).normal(size=1500)

    exact = numpy.sum([values(rank, 0) for rank in range(len(hosts))], axis=0)
    seen = set()
    for delay in (0.0, lambda source, destination: 0.0003 * ((3 * source + destination) % 4)):
        results = run_ranks(len(hosts), _reduce, values, 1, across, hosts=hosts, faults=Faults(delay_seconds=delay))
        for (result,) in results:
            numpy.testing.assert_allclose(result, exact, rtol=0, atol=1e-13)
            seen.add(result.tobytes())
    assert len(seen) == 1


def test_bits_do_not_depend_on_segments_where_two_nodes_exchange_their_sums():
    def step(segment_bytes):
        values = numpy.random.default_rng(world().transport.rank).normal(size=1500)
        return _reduce(lambda rank, call: values, segment_bytes=segment_bytes)[0].tobytes()

    seen = set()
    for segment_bytes in (16, 200, 4096):
        seen |= set(run_ranks(5, step, segment_bytes, hosts="aabab"))
    assert len(seen) == 1


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abcab"])
def test_every_element_is_transformed_once_on_every_node_before_it_is_taken(hosts):
    def step():
        communicator, out, seen = world_communicator(), numpy.zeros(1000), []
        count = numpy.zeros(1000, int)
        reduction = TwoLevel(_lanes(), 1000, out.dtype, "sum", segment_bytes=200)
        watch = communicator.begin(communicator.call("test"))

        def fill(index, place):
            place[...] = 1

        def transform(start, values):
            seen.append((start, start + values.size))
            values += numpy.arange(start, start + values.size)
            count[start : start + values.size] += 1

        def take(start, values):
            out[start : start + values.size] = values

        reduction.run(watch, fill, take, transform)
        assert seen == [pair for pair in reduction.owned if pair[0] < pair[1]] == sorted(seen)
        return communicator.topology.node_of[communicator.rank], count, out

    outcomes = run_ranks(len(hosts), step, hosts=hosts)
    for _, _, result in outcomes:
        numpy.testing.assert_array_equal(result, len(hosts) + numpy.arange(1000))
    for node in range(len(set(hosts))):
        assert (sum(count for where, count, _ in outcomes if where == node) == 1).all()


def test_fill_sees_every_segment_once_in_order():
    def step():
        communicator, seen = world_communicator(), []
        reduction = TwoLevel(_lanes(), 5000, numpy.dtype("f4"), "sum", segment_bytes=100)
        watch = communicator.begin(communicator.call("test"))

        def fill(index, place):
            seen.append((index, place.size))
            place[...] = 0

        reduction.run(watch, fill, lambda start, values: None)
        assert seen == [(index, stop - start) for index, (start, stop) in enumerate(reduction.bounds)]
        ends = [bound for pair in reduction.bounds for bound in pair]
        assert ends[0] == 0 and ends[-1] == 5000 and ends[1:-1:2] == ends[2::2]

    run_ranks(3, step, hosts="aab")


def test_a_rank_that_fails_in_the_middle_ends_the_waits_of_all_others():
    def step():
        communicator = world_communicator()
        reduction = TwoLevel(_lanes(), 2000, numpy.dtype("f8"), "sum", segment_bytes=256)
        watch = communicator.begin(communicator.call("test"))

        def fill(index, place):
            if index == 5 and communicator.rank == 1:
                raise ValueError("boom")
            place[...] = 1.0

        reduction.run(watch, fill, lambda start, values: None)

    with pytest.raises(ValueError, match="boom"):
        run_ranks(4, step, hosts="aabb")


def test_a_lost_message_ends_in_the_deadline():
    with pytest.raises(TransportTimeoutError, match="test"):
        run_ranks(
            4,
            _reduce,
            lambda rank, call: numpy.ones(2560),
            hosts="abab",
            timeout_seconds=0.3,
            faults=Faults(drop=(0, 1, 2)),
        )


def test_nothing_is_allocated_after_the_first_call():
    def step():
        communicator, buffer = world_communicator(), numpy.ones(60_000, "f4")
        reduction = TwoLevel(_lanes(), buffer.size, buffer.dtype, "sum")
        bounds = reduction.bounds

        def fill(index, place):
            place[...] = buffer[slice(*bounds[index])]

        def once():
            watch = communicator.begin(communicator.call("test"))
            reduction.run(watch, fill, lambda start, values: None)

        once()
        communicator.barrier()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        once()
        communicator.barrier()
        return tracemalloc.get_traced_memory()[1] - before

    try:
        assert max(run_ranks(4, step, hosts="aabb")) < 60_000
    finally:
        tracemalloc.stop()
