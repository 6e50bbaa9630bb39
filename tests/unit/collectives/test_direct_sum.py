"""The all-reduce through shared segments: lengths, cuts, dtypes, places used again through many turns and calls."""

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.ways import direct_sum
from mpidist.collectives.ways.direct_sum import DirectSum
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.selection import Way
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

SIZES = [2, 3, 4, 5, 8]


def _reduce(values_of, op="sum", scale=None, segment_bytes=1 << 20, calls=1, dtypes=("f8", "f8", "f8")):
    """Reduce ``values_of(rank, call)``, in one tensor, `calls` times; return this rank's results."""
    communicator, results = world_communicator(), []
    source, work, result = map(numpy.dtype, dtypes)
    for call in range(calls):
        values = numpy.asarray(values_of(communicator.rank, call), source)
        if call == 0:
            pieces = Pieces((0, values.size))
            way = Way("shared_memory", segment_bytes)
            reduction = communicator.reduction(way, pieces, pieces, (source, work, result), op, scale)
            assert isinstance(reduction, DirectSum)
        out = numpy.empty(values.size, result)
        with communicator.control.turnstile:
            watch = communicator.begin(communicator.call("test", [("", source, values.shape)]))
            reduction.run(watch, [values], [out])
        results.append(out)
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 127, 128, 129, 1000])
@pytest.mark.parametrize("segment_bytes", [64, 1 << 20])
def test_sums_of_every_length(size, count, segment_bytes):
    expected = (numpy.arange(count) % 5) * size + size * (size - 1) // 2

    def values(rank, call):
        return numpy.arange(count) % 5 + rank

    for (result,) in run_ranks(size, _reduce, values, "sum", None, segment_bytes):
        numpy.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(("op", "expected"), [("sum", 10.0), ("min", 1.0), ("max", 4.0), ("prod", 24.0)])
def test_reductions_of_1_2_3_4(op, expected):
    for (result,) in run_ranks(4, _reduce, lambda rank, call: numpy.full(300, rank + 1.0), op):
        numpy.testing.assert_array_equal(result, numpy.full(300, expected))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([2, 3]), st.integers(1, 400), st.integers(1, 1024), st.integers(1, 6))
def test_places_may_be_used_again_for_many_turns_and_calls(size, count, segment_bytes, calls):
    def values(rank, call):
        return (numpy.arange(count) % 7) * (call + 1) + rank

    for results in run_ranks(size, _reduce, values, "sum", None, segment_bytes, calls):
        for call, result in enumerate(results):
            expected = size * (numpy.arange(count) % 7) * (call + 1) + size * (size - 1) // 2
            numpy.testing.assert_array_equal(result, expected)


def test_bits_are_those_of_a_sum_in_rank_order_whatever_the_size_of_segments():
    def values(rank, call):
        return numpy.random.default_rng(rank).normal(size=500)

    expected = ((values(0, 0) + values(1, 0)) + values(2, 0)) + values(3, 0)
    for segment_bytes in (8, 64, 200, 1024):
        for (result,) in run_ranks(4, _reduce, values, "sum", None, segment_bytes):
            assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtypes", [(ml_dtypes.bfloat16, "f4", ml_dtypes.bfloat16), ("i4", "f8", "f8"), ("u1",) * 3])
def test_values_are_added_in_the_dtype_for_it_and_rounded_once(size, dtypes):
    scale = 1 / size if dtypes[0] == "i4" else None

    def values(rank, call):
        return numpy.arange(300) % 50 + rank + (1 << 8 if dtypes[1] == "f4" else 0)

    total = sum(values(rank, 0).astype(dtypes[0]).astype("f8") for rank in range(size))
    expected = (total if scale is None else total * scale).astype(dtypes[2])
    for (result,) in run_ranks(size, _reduce, values, "sum", scale, 64, 1, dtypes):
        assert result.dtype == numpy.dtype(dtypes[2])
        numpy.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "i4", "c16"])
def test_the_communicator_reduces_long_buffers_of_every_dtype_so(size, dtype):
    def step():
        communicator = world_communicator()
        buffer = ((numpy.arange(3000) % 4) + communicator.rank).astype(dtype).reshape(3, 1000)
        communicator.all_reduce(buffer, algorithm="shared_memory")
        return buffer

    expected = ((numpy.arange(3000) % 4) * size + size * (size - 1) // 2).astype(dtype).reshape(3, 1000)
    for result in run_ranks(size, step):
        assert result.dtype == numpy.dtype(dtype)
        numpy.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("lengths", [[1000], [5] * 200, [3, 700, 1, 296]])
@pytest.mark.parametrize("short_bytes", [1 << 14, 8], ids=["put together", "where they lie"])
def test_in_place_no_sum_is_taken_for_a_value(monkeypatch, size, lengths, short_bytes):
    monkeypatch.setattr(direct_sum, "_SHORT_BYTES", short_bytes)

    def step():
        communicator, offsets = world_communicator(), (0, *numpy.cumsum(lengths).tolist())
        pieces = Pieces(offsets)
        way, dtypes = Way("shared_memory", 256), (numpy.dtype("f8"),) * 3
        values = numpy.arange(1000.0) * (communicator.rank + 1) ** 2
        tensors = [values[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
        with communicator.control.turnstile:
            watch = communicator.begin(communicator.call("test"))
            communicator.reduction(way, pieces, pieces, dtypes, "sum").run(watch, tensors, tensors)
            watch = communicator.begin(communicator.call("test"))
            flat = Pieces((0, 1000))
            communicator.reduction(way, pieces, flat, dtypes, "sum").run(watch, tensors, [values])
        return values

    total = sum((rank + 1) ** 2 for rank in range(size))
    for result in run_ranks(size, step):
        numpy.testing.assert_array_equal(result, numpy.arange(1000.0) * total * size)


def test_a_rank_that_fails_between_two_segments_ends_the_waits_of_the_others():
    def step():
        communicator, pieces = world_communicator(), Pieces((0, 1000))
        dtypes = (numpy.dtype("f8"),) * 3
        reduction, calls = communicator.reduction(Way("shared_memory", 256), pieces, pieces, dtypes, "sum"), []
        values = numpy.ones(1000)

        def gather(start, stop, tensors, out):
            calls.append(start)
            if len(calls) == 5 and communicator.rank == 1:
                raise ValueError("boom")

        pieces.gather = gather
        with communicator.control.turnstile:
            reduction.run(communicator.begin(communicator.call("test")), [values], [values])

    with pytest.raises(ValueError, match="boom"):
        run_ranks(3, step)
