"""Values between chief and workers: what comes out is what went in, and large arrays are not pickled."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.parameter_server.coordinator import packed

DTYPES = ["float32", "int64", "bool", "complex128", "S5", "M8[s]", ">f4"]
SHAPES = [(), (0,), (3,), (1023,), (1024,), (1025,), (40, 0), (70, 33)]


@st.composite
def arrays(draw) -> Any:
    """Return an array of any layout: in C's or Fortran's order, every other row, to be written or not."""
    shape = draw(st.sampled_from(SHAPES))
    array = numpy.arange(math.prod(shape)).reshape(shape).astype(draw(st.sampled_from(DTYPES)))
    order = draw(st.sampled_from(["C", "F", "strided"]))
    array = (
        array[::2] if order == "strided" and array.ndim else numpy.asarray(array, order="F" if order == "F" else "C")
    )
    array.flags.writeable = draw(st.booleans())
    return array


VALUES = st.recursive(arrays() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4), max_leaves=8)


def same(found: Any, expected: Any) -> bool:
    """Whether two values are equal, arrays in dtype, layout and whether they may be written, too."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(expected, numpy.ndarray):
        return type(found) is type(expected) and found == expected
    facts, wanted = ((a.dtype, a.shape, a.strides, a.flags.writeable, a.tobytes()) for a in (found, expected))
    return facts == wanted


def sent(content: Any) -> Any:
    """Return what a conversation makes of it."""
    text, buffers = packed.parted(content)
    pieces = [text, *buffers]
    where = packed.places([len(piece) for piece in pieces])
    memory = numpy.full(where[-1].stop, 7, numpy.uint8)
    packed.fill(memory, pieces, where)
    found = packed.joined(memory, where)
    memory[:] = 7  # the connection uses it again
    return found


@given(VALUES)
def test_what_is_unpacked_is_what_was_packed(value):
    expected = pickle.loads(pickle.dumps(value, 5))  # which leaves no gaps, and may leave out that it is read-only
    assert same(packed.unpacked(packed.packed(value)), expected)
    assert same(packed.unpacked(sent((1, packed.packed(value)))[1]), expected)
    assert same(packed.unpacked(pickle.loads(pickle.dumps(packed.packed(value), 5))), expected)


@pytest.mark.parametrize("size, is_pickled", [(1023, True), (1024, False), (1 << 20, False)])
def test_large_arrays_are_not_pickled(size, is_pickled):
    made = packed.packed({"x": numpy.ones(size, "float32")})
    text, buffers = packed.parted((1, [made]))
    assert len(text) < 500 + 4096 * is_pickled
    assert [buffer.nbytes for buffer in buffers] == ([] if is_pickled else [4 * size])
    assert packed.size_of(made) >= 4 * size


def test_what_was_packed_is_nobody_elses():
    x = numpy.arange(5000.0)
    made = packed.packed([x, x])
    x[:] = 0
    first, second = packed.unpacked(made)
    assert first is second and first.tolist() == list(range(5000))


def test_nothing_but_what_was_packed_has_a_size():
    assert [packed.size_of(each) for each in (None, 3, b"four")] == [0, 0, 4]
