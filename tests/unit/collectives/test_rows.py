"""Lists of short tensors packed at one go: those that are like the first are, and no others."""

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.reductions.rows import Rows

SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=4)
DTYPES = st.sampled_from(["f4", "f8", "i4", ">f4"])


def _list(shapes, dtype):
    return [
        (numpy.arange(numpy.prod(shape, dtype=int)) + index).reshape(shape).astype(dtype) for index, shape in shapes
    ]


def _flat(tensors):
    return numpy.concatenate([tensor.ravel() for tensor in tensors])


@given(SHAPES, SHAPES, DTYPES)
def test_a_list_is_packed_if_all_its_shapes_and_dtypes_are_those_of_the_first(first, second, dtype):
    planned, tensors = _list(enumerate(first), "f4"), _list(enumerate(second), dtype)
    rows = Rows.of(planned, numpy.dtype("f4"))
    alike = all(shape and shape[1:] == first[0][1:] for shape in first)
    assert (rows is not None) == alike
    if rows is not None:
        out = numpy.full(_flat(planned).size, -1, "f4")
        for pack in (rows.pack, rows.pack_arrays):
            out[:] = -1
            packed = pack(tensors, out)
            assert packed == (first == second and dtype == "f4")
            if packed:
                numpy.testing.assert_array_equal(out, _flat(tensors))


def test_tensors_that_are_not_contiguous_are_packed_in_the_order_of_their_axes():
    planned = _list(enumerate([(4, 3), (2, 3)]), "f4")
    tensors = [planned[0].T.copy().T, planned[1][::-1]]
    out = numpy.zeros(18, "f4")
    assert Rows.of(planned, planned[0].dtype).pack(tensors, out)
    numpy.testing.assert_array_equal(out, _flat(tensors))
    lists = [tensor[:, 0] for tensor in planned]
    assert Rows.of(lists, lists[0].dtype).pack_arrays(lists, out[:6])
    numpy.testing.assert_array_equal(out[:6], _flat(lists))


@pytest.mark.parametrize("strange", [[1.0, 2.0], None, 3.0, numpy.float32(1), "ab"])
def test_what_is_no_array_is_refused(strange):
    rows = Rows.of(_list(enumerate([(2,), (2,)]), "f4"), numpy.dtype("f4"))
    assert not rows.pack([numpy.ones(2, "f4"), strange], numpy.zeros(4, "f4"))
    assert not rows.pack_arrays([numpy.ones(2, "f4"), strange], numpy.zeros(4, "f4"))


@pytest.mark.parametrize("strange", [[1.0, 2.0], numpy.ma.array([1.0, 2.0], mask=[False, True])])
def test_what_joins_as_arrays_do_and_is_none_is_no_array(strange):
    rows = Rows.of(_list(enumerate([(2,), (2,)]), "f8"), numpy.dtype("f8"))
    assert not rows.pack_arrays([numpy.ones(2), strange], numpy.zeros(4))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u8", "?", "c8", "c16", ml_dtypes.bfloat16])
def test_rows_of_every_dtype(dtype):
    tensors = [numpy.arange(start, start + 3).astype(dtype) for start in range(4)]
    out = numpy.zeros(12, dtype)
    rows = Rows.of(tensors, numpy.dtype(dtype))
    assert rows.pack_arrays(tensors, out)
    assert out.tobytes() == _flat(tensors).tobytes()
    for others in ([*tensors, tensors[0]], tensors[1:], [tensors[0], tensors[1][None], tensors[2], tensors[3]]):
        assert not rows.pack_arrays(others, out)


def test_tensors_of_another_dtype_than_is_reduced_are_not_for_rows():
    assert Rows.of(_list(enumerate([(2,), (2,)]), "f2"), numpy.dtype("f4")) is None


def test_nothing_is_copied_of_a_list_with_other_lengths():
    rows = Rows.of(_list(enumerate([(2,), (4,)]), "f4"), numpy.dtype("f4"))
    out = numpy.full(6, -1, "f4")
    assert not rows.pack_arrays(_list(enumerate([(3,), (3,)]), "f4"), out)
    assert (out == -1).all()
