"""Checkpoint files: whole or not there, and every damaged byte is noticed."""

from __future__ import annotations

import resource
import zlib

import h5py
import ml_dtypes
import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpidist.errors import CheckpointError, CheckpointNotFoundError
from mpidist.training import hdf5_file

ARRAYS = {
    "model/kernel": numpy.arange(12, dtype="float32").reshape(3, 4),
    "model/bias": numpy.zeros(0, "float32"),
    "half": numpy.array([0.5, -1], "float16"),
    "brain": numpy.array([[1.5], [2]], ml_dtypes.bfloat16),
    "scalar": numpy.array(7, "int64"),
    "mask": numpy.array([True, False]),
    "fortran": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
}
NUMBERS = {
    "optimizer/iterations": 12,
    "optimizer/deep/er": -(1 << 63),
    "rate": 0.1,
    "endless": float("inf"),
    "name": "x",
    "text": "1",
    "flag": True,
    "nothing": None,
    "large": 1 << 127,
    "model/list": [1, "a", {"b": None}],
    "model/kernel/note": 3,
    "long": "x" * 100_000,
}


@pytest.fixture
def path(tmp_path):
    hdf5_file.write(tmp_path / "new" / "c.h5", ARRAYS, NUMBERS)
    return tmp_path / "new" / "c.h5"


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_everything_comes_back_bit_for_bit(path):
    arrays, numbers = hdf5_file.read(path)
    assert numbers == NUMBERS
    assert {name: type(number) for name, number in numbers.items()} == {n: type(x) for n, x in NUMBERS.items()}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        assert arrays[name].tobytes() == array.tobytes()
    assert names(path.parent) == ["c.h5"]


def test_any_hdf5_program_can_read_it(path):
    with h5py.File(path, "r") as file:
        kernel = file["model/kernel"]
        assert kernel[...].tolist() == ARRAYS["model/kernel"].tolist()
        assert kernel.attrs["crc32"] == zlib.crc32(ARRAYS["model/kernel"].tobytes())
        assert file["optimizer"].attrs["iterations"] == 12
        assert (file.attrs["rate"], file.attrs["flag"], file.attrs["name"]) == (0.1, True, '"x"')


def test_damage_in_an_array_names_it_and_both_checksums(path):
    raw = path.read_bytes()
    at = raw.index(ARRAYS["model/kernel"].tobytes())
    path.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
    damaged = b"\xff" + ARRAYS["model/kernel"].tobytes()[1:]
    expected = f"{zlib.crc32(damaged):#010x}, expected {zlib.crc32(ARRAYS['model/kernel'].tobytes()):#010x}"
    with pytest.raises(CheckpointError, match=rf"c.h5 is damaged: array 'model/kernel' has CRC-32 {expected}"):
        hdf5_file.read(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_every_flipped_bit_is_noticed(path, data):
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    damaged = path.with_name("damaged.h5")
    damaged.write_bytes(raw)
    with pytest.raises(CheckpointError, match="damaged.h5"):
        hdf5_file.read(damaged)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_every_truncation_is_noticed(path, data):
    raw = path.read_bytes()
    short = path.with_name("short.h5")
    short.write_bytes(raw[: data.draw(st.integers(0, len(raw) - 1))])
    with pytest.raises(CheckpointError, match="short.h5 is truncated"):
        hdf5_file.read(short)


def test_missing_and_unreadable(tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="none.h5"):
        hdf5_file.read(tmp_path / "none.h5")
    with pytest.raises(FileNotFoundError):
        hdf5_file.read(tmp_path / "none.h5")
    with pytest.raises(CheckpointError, match="cannot be read"):
        hdf5_file.read(tmp_path)


def test_another_format_is_named(path, monkeypatch):
    monkeypatch.setattr(hdf5_file, "FORMAT", 3)
    with pytest.raises(CheckpointError, match="has checkpoint format 2; this mpidist reads format 3"):
        hdf5_file.read(path)


def test_a_full_disk_leaves_the_old_file_and_nothing_else(path):
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError):
            hdf5_file.write(path, {"large": numpy.zeros(100_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert names(path.parent) == ["c.h5"]


def test_what_json_cannot_hold_leaves_nothing(tmp_path):
    with pytest.raises(TypeError, match="'x' cannot be saved: Object of type object is not JSON"):
        hdf5_file.write(tmp_path / "c.h5", {}, {"x": object()})
    with pytest.raises(TypeError, match="'x' cannot be saved: the key 0 of a dict in it is no text"):
        hdf5_file.write(tmp_path / "c.h5", {}, {"x": [{"a": {0: 7}}]})
    assert names(tmp_path) == []


def test_arrays_of_the_other_byte_order_are_read_as_the_numbers_that_they_are(tmp_path):
    # so did versions before this one write them
    with h5py.File(tmp_path / "old.h5", "w", libver=hdf5_file.LIBRARY_VERSIONS) as content:
        array = numpy.arange(1, 4, dtype=">f8")
        ranges = hdf5_file.fill(content, {"a": array}, {}, {"a": hdf5_file.checksum(array)})
    with open(tmp_path / "old.h5", "r+b") as file:
        hdf5_file.add_trailer(file, ranges)
    arrays, _ = hdf5_file.read(tmp_path / "old.h5")
    assert arrays["a"].dtype == numpy.dtype("float64")
    assert arrays["a"].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "array",
    [
        numpy.array(["a", "bc"]),
        numpy.array([b"ab"]),
        numpy.str_("x"),
        numpy.zeros(2, [("a", "f4"), ("b", "f4")]),
        numpy.array([None, 1]),
        numpy.arange(2, dtype=">i4"),
    ],
    ids=["text", "bytes", "one text", "records", "objects", "other byte order"],
)
def test_what_would_not_come_back_as_it_is_is_not_saved(path, array):
    before = path.read_bytes()
    with pytest.raises(TypeError, match="'names' cannot be saved: it is an array of dtype"):
        hdf5_file.write(path, {**ARRAYS, "names": numpy.asarray(array)}, NUMBERS)
    assert path.read_bytes() == before
