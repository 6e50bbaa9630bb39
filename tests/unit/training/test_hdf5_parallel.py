"""The arithmetic of checkpoints that all ranks write: whose rows, and checksums of the whole from those of parts."""

from __future__ import annotations

import zlib

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpidist
from mpidist.errors import CheckpointError
from mpidist.testing import run_ranks
from mpidist.training import hdf5_parallel


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_parts_join(first, second):
    found = hdf5_parallel.joined_checksum(zlib.crc32(first), zlib.crc32(second), len(second))
    assert found == zlib.crc32(first + second)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.lists(st.integers(0, 7), max_size=2), st.sampled_from(["int8", "float64"]))
def test_every_row_has_one_writer_and_the_whole_its_checksum(size, shape, dtype):
    random = numpy.random.default_rng(0)
    small = random.integers(0, 100, shape).astype(dtype)
    rows = size * 3 + 1
    large = random.integers(0, 100, (-(-hdf5_parallel.SPLIT_BYTES // rows), rows), "int8").T  # not contiguous
    arrays = {"small": small, "large": large}
    parts = [hdf5_parallel.part_checksums(arrays, rank, size) for rank in range(size)]
    found = hdf5_parallel.whole_checksums(list(arrays), parts)
    assert found == {name: zlib.crc32(array.tobytes()) for name, array in arrays.items()}
    for name, array in arrays.items():
        if array.ndim:
            slices = [hdf5_parallel.rows_of(array, rank, size) for rank in range(size)]
            numbers = [row for each in slices for row in range(each.start, each.stop)]
            assert sorted(numbers) == list(range(len(array))), name
    assert all(length for (_, length) in (part[1] for part in parts))


def test_asking_for_what_h5py_cannot_do_is_refused_on_all_ranks(tmp_path):
    def save():
        with pytest.raises(
            CheckpointError, match="was not saved on ranks .*parallel HDF5.*save with parallel=None"
        ) as e:
            mpidist.Checkpoint().save(tmp_path / "c.h5", parallel=True)
        return e.value.on_all_ranks

    assert run_ranks(2, save) == [True] * 2
    assert list(tmp_path.iterdir()) == []
