"""What two data sets must have alike: checksums of samples of the rows."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.input import Dataset
from mpidist.input.agreement import checksum, described

SHAPES = st.tuples(st.integers(0, 50), st.integers(0, 9), st.integers(1, 9))


@given(SHAPES, st.sampled_from(["u1", "f4", "f8", ml_dtypes.bfloat16]))
def test_small_arrays_are_summed_whole(shape, dtype):
    array = numpy.arange(numpy.prod(shape)).reshape(shape).astype(dtype)
    assert checksum(array, array.nbytes + 1) == zlib.crc32(array.tobytes())


@given(SHAPES, st.integers(1, 500), st.integers(0, 2))
def test_equal_arrays_have_equal_checksums_in_any_memory_order(shape, most_bytes, axis):
    array = numpy.random.default_rng(0).integers(0, 256, shape, "uint8")
    other = numpy.moveaxis(numpy.ascontiguousarray(numpy.moveaxis(array, axis, 0)), 0, axis)
    assert checksum(array, most_bytes) == checksum(other, most_bytes)


@pytest.mark.parametrize("shape", [(100_000, 3), (40, 50_000), (3, 200, 4000)])
def test_other_data_of_large_arrays_are_seen(shape):
    first, second = (numpy.random.default_rng(seed).integers(0, 100, shape, "uint8") for seed in (0, 1))
    assert checksum(first, 1000) != checksum(second, 1000)


@pytest.mark.parametrize("rows", [2, 16, 17, 1000])
def test_the_first_and_the_last_row_count(rows):
    array = numpy.zeros((rows, 8), "uint8")
    sums = {checksum(array, 64)}
    for row in (0, -1):
        changed = array.copy()
        changed[row] = 1
        sums.add(checksum(changed, 64))
    assert len(sums) == 3


def test_a_sample_is_no_larger_than_asked_for():
    class Counting(numpy.ndarray):
        taken = 0

        def __getitem__(self, key):
            found = super().__getitem__(key)
            if isinstance(key, numpy.ndarray):
                Counting.taken += found.nbytes
            return found

    for shape in [(100_000, 3), (5, 100_000)]:
        Counting.taken = 0
        checksum(numpy.zeros(shape).view(Counting), 4096)
        assert 0 < Counting.taken <= 4096


def test_what_is_compared():
    dataset = Dataset.from_arrays((numpy.zeros((4, 2)), {"n": numpy.zeros(4, "i4")}))
    dataset = dataset.shuffle(9, seed=3).repeat().batch(2)
    sums = [f"{zlib.crc32(bytes(count)):#010x}" for count in (4 * 2 * 8, 4 * 4)]
    assert described(dataset) == [
        ("array 0", numpy.dtype("f8"), (4, 2)),
        ("array 1/n", numpy.dtype("i4"), (4,)),
        ("type: Dataset", "", ()),
        ("batch size: 2", "", ()),
        ("drop_remainder: False", "", ()),
        ("order of the rows: shuffle(seed=3), repeat()", "", ()),
        (f"checksum of the data in array 0: {sums[0]}", "", ()),
        (f"checksum of the data in array 1/n: {sums[1]}", "", ()),
    ]


@pytest.mark.parametrize(
    "rows", [numpy.zeros(4, numpy.dtype([("a", "u1"), ("b", "f8")], align=True)), numpy.array([None, {}])]
)
def test_bytes_that_mean_nothing_elsewhere_are_left_out(rows):
    assert not any("checksum" in name for name, _, _ in described(Dataset.from_arrays(rows)))
