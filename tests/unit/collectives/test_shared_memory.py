"""Short buffers through shared memory: in one step, in shares, and between longer ones that use the same places."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpidist.arrays import wire_dtype
from mpidist.collectives.ways.shared_memory import PlaceAllReduce, SegmentAllReduce, ShareAllReduce, rank_order
from mpidist.testing import ranks, run_ranks
from mpidist.world import world_communicator
from tests.helpers import reference
from tests.helpers.grid import grid

#: Bytes up to which a buffer goes through the segments of `run_ranks`, and through its places; and longer ones.
SEGMENT, PLACE = ranks._SEGMENT_BYTES, ranks._PLACE_BYTES
LENGTHS = [1, SEGMENT // 8, SEGMENT // 8 + 1, SEGMENT // 8 + 7, PLACE // 8 - 1, PLACE // 8, PLACE // 8 + 1, PLACE]


def _values(rank, call, length):
    return (numpy.arange(length) % 13 + 1.0) * (call + 1) + rank


@pytest.mark.parametrize(("size", "kind"), [(2, PlaceAllReduce), (3, ShareAllReduce), (8, ShareAllReduce)])
def test_what_is_too_long_for_a_segment_goes_through_a_place(size, kind):
    def run():
        communicator, dtype = world_communicator(), numpy.dtype("f8")
        return [
            type(communicator.small((length,), dtype, "sum")) for length in (SEGMENT // 8, PLACE // 8, PLACE // 8 + 1)
        ]

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


# -- in one call, in the order of ranks -----------------------------------------------------------------------------


class Gathered:
    """The collectives of a rank, as far as the reference needs them: all ranks' values are here."""

    def __init__(self, values):
        self._values = values

    def all_gather(self, _):
        return self._values


def in_order(values, op):
    """Return what the reference makes of ``values[rank]``."""
    found = numpy.array(values[0], values.dtype)
    reference.all_reduce(Gathered(values), found, op)
    return found


def reduced(values, op):
    """Return what `rank_order` makes of them, from slots that lie as far apart as those of a segment."""
    dtype = wire_dtype(values.dtype)
    slots = numpy.zeros((len(values), 1 << 17), numpy.uint8)[:, : values[0].size * dtype.itemsize].view(dtype)
    slots = slots.reshape(values.shape)
    slots[...] = values
    out = numpy.full(values.shape[1:], 77, dtype)
    rank_order(op, slots)(out)
    return out.astype(values.dtype)


def alike(found, expected):
    """Return whether two arrays have the same bits, where all values that are none count as one."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    if found.dtype.kind == "f":
        nan = numpy.isnan(expected)
        assert (numpy.isnan(found) == nan).all()
        found, expected = numpy.where(nan, 0, found), numpy.where(nan, 0, expected)
    return found.tobytes() == expected.tobytes()


DTYPES = ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">f4", ">f8"]
CASES = [(dtype, op) for dtype in DTYPES for op in ("sum", "prod", "min", "max")]
CASES += [("c8", "sum"), ("c16", "sum"), ("?", "min"), ("?", "max")]

#: NumPy adds up in blocks of 8 and in halves: numbers of ranks around them.
SIZES = grid([*range(2, 19), 31, 32, 33, 48, 63, 64], [*range(19, 31), *range(34, 48), *range(49, 63)])


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_slots_of_all_ranks_are_reduced_as_by_the_reference_bit_for_bit(dtype, op):
    """With values whose sums and products depend on the order.

    Not products of complex numbers: how numpy rounds one depends on whether its result takes the place of a factor.
    """
    random = numpy.random.default_rng(0)
    for size in SIZES:
        long = [(5000,)] if size in (4, 64) else []
        for shape in [(), (1, 1), *[(length,) for length in range(1, 10)], (2, 3), (300,), *long]:
            values = random.normal(size=(size, *shape))
            kind = numpy.dtype(dtype).kind
            values = values * (1.1 - 0.7j) if kind == "c" else values if kind == "f" else (values * 50).astype("i1")
            values = values.astype(dtype)
            assert alike(reduced(values, op), in_order(values, op)), (size, shape)


@pytest.mark.parametrize("dtype", ["f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("shape", [(2,), (9,), (300,)])
def test_a_sum_of_negative_zeros_is_negative(dtype, shape):
    values = numpy.full((16, *shape), complex(-0.0, -0.0) if dtype[0] == "c" else -0.0, dtype)
    found = reduced(values, "sum").view(f"f{numpy.dtype(dtype).itemsize // (2 if dtype[0] == 'c' else 1)}")
    assert numpy.signbit(found).all()


def test_the_order_matters_for_one_element_of_eight_ranks():
    """Else the test above would show nothing: numpy's own sum of one element is not in the order of ranks."""
    values = numpy.random.default_rng(0).normal(size=(64, 1)).astype("f4")
    assert numpy.add.reduce(values, 0).tobytes() != in_order(values, "sum").tobytes()


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(["sum", "prod", "min", "max"]), st.sampled_from(["f2", "f4", "f8", "i4", "u1"]))
def test_any_values_are_reduced_as_by_the_reference(data, op, dtype):
    shape = (data.draw(st.integers(2, 20)), data.draw(st.integers(1, 9)))
    values = data.draw(hnp.arrays(dtype, shape))
    with numpy.errstate(all="ignore"):
        assert alike(reduced(values, op), in_order(values, op))
