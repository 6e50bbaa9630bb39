"""`reduce` and `gather`: N ranks equal one rank on all rows, uneven and empty parts included."""

from __future__ import annotations

import hypothesis.strategies as st
import ml_dtypes
import numpy
import pytest
from hypothesis import given, settings

from mpidist import context
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.testing import run_ranks


def reduced(parts, op, axis):
    def fn():
        strategy = MirroredStrategy()
        return strategy.reduce(op, parts[strategy.extended.replica_id], axis=axis)

    return run_ranks(len(parts), fn)


#: How many rows each rank has; at least one row in all.
row_counts = st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any)


@settings(max_examples=30)
@given(row_counts, st.sampled_from(["float32", "float64", "int16", "int64"]), st.sampled_from([0, -2, (0,), (0, 1)]))
def test_sum_and_mean_over_rows_equal_those_of_all_rows(counts, dtype, axis):
    rows = numpy.arange(3 * sum(counts)).astype(dtype).reshape(-1, 3)
    parts = numpy.split(rows, numpy.cumsum(counts)[:-1])
    for total in reduced(parts, "sum", axis):
        assert total.dtype == dtype
        numpy.testing.assert_array_equal(total, rows.sum(axis=axis, dtype=dtype))
    for mean in reduced(parts, "Mean", axis):
        assert mean.dtype == ("float64" if dtype.startswith("int") else dtype)
        numpy.testing.assert_allclose(mean, rows.mean(axis=axis, dtype="float64"), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", ml_dtypes.bfloat16])
def test_short_floats_are_summed_in_float32(dtype):
    # 4096 ones sum to 4096 in float32; added as float16 or bfloat16 they would stop at 2048 or 256
    parts = [numpy.ones(2048, dtype=dtype), numpy.ones(2048, dtype=dtype)]
    for total in reduced(parts, "SUM", 0):
        assert total.dtype == dtype and float(total) == 4096
    # the sum of these does not fit in a float16, their mean does
    parts = [numpy.full(100, 1024, dtype=dtype), numpy.full(300, 1024, dtype=dtype)]
    for mean in reduced(parts, "MEAN", 0):
        assert mean.dtype == dtype and float(mean) == 1024


def test_means_of_short_integers_do_not_overflow():
    parts = [numpy.full(300, 100, dtype="int8"), numpy.full(100, 20, dtype="int8")]
    assert reduced(parts, "MEAN", 0) == [80.0, 80.0]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("axis", [0, None])
def test_means_of_long_integers_do_not_overflow(axis, size):
    """Times in nanoseconds: the sum of six of them is more than an int64 holds."""
    parts = [numpy.full(4, 1_750_000_000_000_000_000, dtype="int64")] * size
    for mean in reduced(parts, "MEAN", axis):
        assert mean.dtype == "float64" and (mean == 1.75e18).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gather_joins_text_of_any_width(size):
    """Lines are as wide as the longest of them that a rank has."""
    lines = ["a", "bcd", "ef"][:size]

    def fn():
        strategy = MirroredStrategy()
        mine = numpy.array([lines[strategy.extended.replica_id]])
        in_replica = strategy.run(lambda: context.get_replica_context().all_gather([mine, mine.astype("S")], 0))
        at_last = strategy.run(lambda: context.get_replica_context().gather(mine, root=size - 1))
        all_have = [joined.tolist() for joined in (strategy.gather(mine, 0), *in_replica)]
        return all_have, None if at_last is None else at_last.tolist()

    all_have = [lines, lines, [line.encode() for line in lines]]
    assert run_ranks(size, fn) == [(all_have, None)] * (size - 1) + [(all_have, lines)]


def test_axes_that_do_not_exist():
    for axis in (1, -2, (0, 1)):
        with pytest.raises(ValueError, match="Invalid reduction dimension"):
            reduced([numpy.ones(2)], "SUM", axis)
    with pytest.raises(ValueError, match="same dimension more than once"):
        reduced([numpy.ones((2, 2))], "SUM", (0, -2))


def test_axis_is_required():
    with pytest.raises(TypeError, match="axis"):
        MirroredStrategy().reduce("SUM", 1.0)


def test_numbers_become_numpy_scalars_and_arrays_stay_arrays():
    strategy = MirroredStrategy()
    assert isinstance(strategy.reduce("SUM", 1.5, axis=None), numpy.float64)
    assert isinstance(strategy.reduce("SUM", numpy.ones(()), axis=None), numpy.ndarray)
    assert isinstance(strategy.reduce("MEAN", numpy.ones(3), axis=0), numpy.float64)


def test_sum_and_count_of_a_mean_go_in_one_call():
    def fn():
        strategy = MirroredStrategy()
        before = strategy.extended.communicator.control.call
        strategy.reduce("MEAN", numpy.ones((2, 3)), axis=0)
        return strategy.extended.communicator.control.call - before

    assert run_ranks(2, fn) == [1, 1]


@given(row_counts, st.sampled_from([0, 1, -1]))
@settings(max_examples=30)
def test_gather_joins_uneven_parts(counts, axis):
    whole = numpy.arange(2 * sum(counts)).reshape(-1, 2) if axis == 0 else numpy.arange(2 * sum(counts)).reshape(2, -1)
    parts = numpy.split(whole, numpy.cumsum(counts)[:-1], axis=axis)

    def fn():
        strategy = MirroredStrategy()
        mine = parts[strategy.extended.replica_id]
        gathered = strategy.run(lambda: context.get_replica_context().all_gather({"whole": mine}, axis))
        return strategy.gather(mine, axis), gathered["whole"]

    for gathered in run_ranks(len(parts), fn):
        for joined in gathered:
            numpy.testing.assert_array_equal(joined, whole)
