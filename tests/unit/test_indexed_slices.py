"""Rows of an array: checked against adding them up one by one."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.variables import IndexedSlices


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
    numpy.testing.assert_array_equal(sparse.to_dense(), added_up(*rows), strict=True)
    once = sparse.coalesced()
    assert once.indices.tolist() == sorted(set(indices.tolist()))
    assert once.values.dtype == values.dtype
    numpy.testing.assert_array_equal(once.to_dense(), added_up(*rows), strict=True)
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
