"""Rows of an array: checked against adding them up one by one."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import context
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.testing import run_ranks
from mpidist.variables import IndexedSlices
from tests.helpers.identical import assert_identical


@st.composite
def some_rows(draw):
    """Return (values, indices, dense_shape): any rows of a small array, in whole numbers."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(0, 3))
    indices = draw(st.lists(st.integers(0, rows - 1), max_size=12))
    flat = draw(st.lists(st.integers(-9, 9), min_size=len(indices) * columns, max_size=len(indices) * columns))
    dtype = draw(st.sampled_from(["float16", "float32", "float64", "int32"]))
    return numpy.array(flat, dtype).reshape(len(indices), columns), numpy.array(indices, int), (rows, columns)


def added_up(values, indices, shape):
    dense = numpy.zeros(shape, values.dtype)
    for row, index in zip(values, indices, strict=True):
        dense[index] += row
    return dense


@given(some_rows())
def test_rows_of_one_number_are_summed(rows):
    values, indices, shape = rows
    sparse = IndexedSlices(values, indices, shape)
    assert_identical(sparse.to_dense(), added_up(*rows))
    once = sparse.coalesced()
    assert once.indices.tolist() == sorted(set(indices.tolist()))
    assert once.values.dtype == values.dtype
    assert_identical(once.to_dense(), added_up(*rows))
    numpy.testing.assert_array_equal(sparse.values, values)  # unchanged


def test_short_floats_are_summed_in_float32():
    sparse = IndexedSlices(numpy.full((4096, 1), 1.0, "float16"), numpy.zeros(4096, int), (1, 1))
    assert sparse.to_dense()[0, 0] == 4096  # in float16, 2048 + 1 is 2048


def test_a_vector_has_scalars_as_rows():
    assert IndexedSlices([1.0, 2.0, 3.0], [2, 0, 2], (3,)).to_dense().tolist() == [2.0, 0.0, 4.0]
    assert IndexedSlices([], [], (3,)).to_dense().tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("values", "indices", "shape", "error", "text"),
    [
        (numpy.ones((2, 3)), [0.0, 1.0], None, TypeError, "must be integers, got float64"),
        (numpy.ones((2, 3)), [0, 1, 2], None, ValueError, r"\(3,\) and values of shape \(2, 3\)"),
        (numpy.ones((2, 3)), [[0, 1]], None, ValueError, "a vector of row numbers"),
        (numpy.ones((2, 3)), [0, 1], (4, 2), ValueError, r"rows of shape \(3,\).* of shape \(4, 2\)"),
        (numpy.ones((2, 3)), [0, 4], (4, 3), ValueError, "from 0 to 4 are outside"),
        (numpy.ones((2, 3)), [-1, 0], (4, 3), ValueError, "from -1 to 0 are outside"),
        (numpy.ones(1), [0], (), ValueError, r"no rows of an array of shape \(\)"),
    ],
)
def test_what_does_not_fit_is_refused(values, indices, shape, error, text):
    with pytest.raises(error, match=text):
        IndexedSlices(values, indices, shape)


def test_an_unknown_shape_must_be_given():
    rows = IndexedSlices(numpy.ones((1, 2)), [1])
    with pytest.raises(ValueError, match="without dense_shape"):
        rows.to_dense()
    assert rows.to_dense((2, 2)).tolist() == [[0, 0], [1, 1]]


# -- over replicas ----------------------------------------------------------------------------------------------------


def reduced(op, rows_of, dtype, size=3):
    """Return by rank what all replicas have after they reduced their rows of an array of shape (4, 2)."""

    def fn():
        strategy = MirroredStrategy()
        numbers = rows_of[strategy.extended.replica_id]
        rows = IndexedSlices(numpy.array([[n, -n] for n in numbers], dtype).reshape(-1, 2), numbers, (4, 2))
        before = rows.values.copy()
        together = strategy.run(lambda: context.get_replica_context().all_reduce(op, [numpy.ones(3), rows]))
        numpy.testing.assert_array_equal(rows.values, before)
        assert together[0].tolist() == [{"SUM": size, "MEAN": 1}[op]] * 3  # dense and sparse in one list
        return together[1]

    return run_ranks(size, fn)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32"])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("rows_of", [[[1, 3], [3, 3, 2], []], [[], [], []], [[2], [2], [2]]])
def test_the_rows_of_all_replicas_are_reduced(op, dtype, rows_of):
    total = numpy.zeros((4, 2))
    for numbers in rows_of:
        for number in numbers:
            total[number] += [number, -number]
    expected = total if op == "SUM" else total / 3
    for result in reduced(op, rows_of, dtype):
        assert result.indices.tolist() == sorted({number for numbers in rows_of for number in numbers})
        assert result.dtype == ("float64" if dtype == "int32" and op == "MEAN" else dtype)
        numpy.testing.assert_allclose(result.to_dense(), expected, rtol=1e-3 if dtype == "float16" else 1e-7)


def test_a_mean_of_short_floats_does_not_overflow_on_the_way():
    def fn():
        rows = IndexedSlices(numpy.array([[60000.0]], "float16"), [0], (1, 1))
        return MirroredStrategy().reduce("MEAN", rows, axis=None).to_dense().item()

    assert run_ranks(3, fn) == [60000.0] * 3  # the sum is more than a float16 can be


@pytest.mark.parametrize("verb", ["gather", "reduce"])
def test_there_are_no_axes_of_rows(verb):
    rows = IndexedSlices([1.0], [0], (2,))
    strategy = MirroredStrategy()
    call = {"gather": lambda: strategy.gather(rows, axis=0), "reduce": lambda: strategy.reduce("SUM", rows, axis=0)}
    with pytest.raises(NotImplementedError, match="does not support IndexedSlices; give it `rows.to_dense"):
        call[verb]()
    with pytest.raises(NotImplementedError, match="all_gather does not support"):
        strategy.run(lambda: context.get_replica_context().all_gather(rows, axis=0))
