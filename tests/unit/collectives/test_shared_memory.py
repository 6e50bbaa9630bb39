"""Short buffers through shared memory: in one step, in shares, and between longer ones that use the same places."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.shared_memory import PlaceAllReduce, SegmentAllReduce, ShareAllReduce
from mpidist.testing import ranks, run_ranks
from mpidist.world import world_communicator

#: Bytes up to which a buffer goes through the segments of `run_ranks`, and through its places; and longer ones.
SEGMENT, PLACE = ranks._SEGMENT_BYTES, ranks._PLACE_BYTES
LENGTHS = [1, SEGMENT // 8, SEGMENT // 8 + 1, SEGMENT // 8 + 7, PLACE // 8 - 1, PLACE // 8, PLACE // 8 + 1, PLACE]


def _values(rank, call, length):
    return (numpy.arange(length) % 13 + 1.0) * (call + 1) + rank


@pytest.mark.parametrize(("size", "kind"), [(2, PlaceAllReduce), (3, ShareAllReduce), (8, ShareAllReduce)])
def test_what_is_too_long_for_a_segment_goes_through_a_place(size, kind):
    def run():
        communicator, dtype = world_communicator(), numpy.dtype("f8")
        return [type(communicator.small(length, dtype, "sum")) for length in (SEGMENT // 8, PLACE // 8, PLACE // 8 + 1)]

    assert run_ranks(size, run) == [[SegmentAllReduce, kind, type(None)]] * size


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([2, 3, 5]), st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=12))
def test_calls_of_any_length_in_any_order(size, lengths):
    def run():
        communicator, found = world_communicator(), []
        for call, length in enumerate(lengths):
            buffer = _values(communicator.rank, call, length)
            communicator.all_reduce(buffer, algorithm="shared_memory")
            found.append(buffer)
        return found

    for found in run_ranks(size, run):
        for call, (length, result) in enumerate(zip(lengths, found, strict=True)):
            expected = size * _values(0, call, length) + size * (size - 1) // 2
            numpy.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("op", ["sum", "prod", "max"])
def test_shares_are_added_in_the_order_of_ranks(op):
    length = PLACE // 8 - 3
    combine = {"sum": numpy.add, "prod": numpy.multiply, "max": numpy.maximum}[op]

    def values(rank):
        return numpy.random.default_rng(rank).normal(size=length)

    def run():
        communicator = world_communicator()
        buffer = values(communicator.rank)
        communicator.all_reduce(buffer, op, algorithm="shared_memory")
        return buffer

    expected = combine(combine(combine(values(0), values(1)), values(2)), values(3))
    for result in run_ranks(4, run):
        assert result.tobytes() == expected.tobytes()
