"""The all-reduce through shared segments: values, cuts, buffers reused through many turns."""

import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.collectives.communicator import Communicator
from mpidist.collectives.segment_pipeline import SegmentPipeline
from mpidist.testing import run_ranks
from mpidist.transports import world

SIZES = [2, 3, 4, 5, 8]


def _taker(out):
    def take(start, values):
        out[start : start + len(values)] = values

    return take


def _reduce(values_of, op="sum", scale=None, segment_bytes=None, calls=1, dtype="f8"):
    """Reduce ``values_of(rank, call)`` through segments, `calls` times; return this rank's results."""
    here, results = world(), []
    pipeline = None
    for call in range(calls):
        values = numpy.asarray(values_of(here.transport.rank, call), dtype)
        if pipeline is None:
            rank = here.transport.rank
            pipeline = SegmentPipeline(here.segments, rank, values.size, values.dtype, op, scale, segment_bytes)
        communicator = Communicator.world()
        watch = communicator.begin(communicator.call("test", [("", values.dtype, values.shape)]))
        bounds, out = pipeline.bounds, numpy.empty_like(values)

        def fill(index, place, bounds=bounds, values=values):
            place[...] = values[bounds[index][0] : bounds[index][1]]

        pipeline.run(watch, fill, _taker(out))
        results.append(out)
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 3, 127, 128, 129, 1000])
def test_sums_of_every_length(size, count):
    expected = (numpy.arange(count) % 5) * size + size * (size - 1) // 2
    for (result,) in run_ranks(size, _reduce, lambda rank, call: numpy.arange(count) % 5 + rank):
        numpy.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize(("op", "expected"), [("sum", 10.0), ("min", 1.0), ("max", 4.0), ("prod", 24.0)])
def test_reductions_of_1_2_3_4(op, expected):
    for (result,) in run_ranks(4, _reduce, lambda rank, call: numpy.full(300, rank + 1.0), op):
        numpy.testing.assert_array_equal(result, numpy.full(300, expected))


def test_a_mean_is_a_scaled_sum():
    for (result,) in run_ranks(4, _reduce, lambda rank, call: numpy.full(300, rank), "sum", 0.25):
        numpy.testing.assert_array_equal(result, numpy.full(300, 1.5))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([2, 3]), st.integers(1, 400), st.integers(1, 1024), st.integers(1, 6))
def test_places_may_be_reused_for_many_turns_and_calls(size, count, segment_bytes, calls):
    def values(rank, call):
        return (numpy.arange(count) % 7) * (call + 1) + rank

    for results in run_ranks(size, _reduce, values, "sum", None, segment_bytes, calls):
        for call, result in enumerate(results):
            expected = size * (numpy.arange(count) % 7) * (call + 1) + size * (size - 1) // 2
            numpy.testing.assert_array_equal(result, expected)


def test_bits_do_not_depend_on_the_size_of_segments():
    def values(rank, call):
        return numpy.random.default_rng(rank).normal(size=500)

    all_bits = set()
    for segment_bytes in (8, 64, 200, 1024):
        all_bits |= {result.tobytes() for (result,) in run_ranks(4, _reduce, values, "sum", None, segment_bytes)}
    assert len(all_bits) == 1


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", ["f2", ml_dtypes.bfloat16, "f4", "i4", "c16"])
def test_the_communicator_uses_them_for_long_buffers_of_every_dtype(size, dtype):
    def step():
        communicator = Communicator.world()
        buffer = ((numpy.arange(3000) % 4) + communicator.rank).astype(dtype).reshape(3, 1000)
        communicator.all_reduce(buffer, algorithm="shared_memory")
        return buffer

    expected = ((numpy.arange(3000) % 4) * size + size * (size - 1) // 2).astype(dtype).reshape(3, 1000)
    for result in run_ranks(size, step):
        assert result.dtype == numpy.dtype(dtype)
        numpy.testing.assert_array_equal(result, expected)


def test_a_rank_that_fails_between_two_segments_ends_the_waits_of_the_others():
    def step():
        here = world()
        values = numpy.ones(1000)
        pipeline = SegmentPipeline(here.segments, here.transport.rank, 1000, values.dtype, "sum", None, 1024)
        communicator = Communicator.world()
        watch = communicator.begin(communicator.call("test"))

        def fill(index, place):
            if index == 3 and here.transport.rank == 1:
                raise ValueError("boom")
            place[...] = 1.0

        pipeline.run(watch, fill, _taker(values))

    with pytest.raises(ValueError, match="boom"):
        run_ranks(3, step)
