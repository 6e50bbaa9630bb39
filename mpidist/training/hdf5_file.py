"""One file of named arrays and numbers, as HDF5: written whole or not at all, every byte of it under a checksum.

Any HDF5 program reads the file.  Every array has its CRC-32 as an attribute.  All that lies outside of the arrays (the
*skeleton*: HDF5's own structure, names, shapes, attributes) has one in a trailer behind the HDF5 data, and is checked
before the HDF5 library sees it: given a damaged structure, that library can crash the process.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from mpidist.errors import CheckpointError, CheckpointNotFoundError, MissingDependencyError

FORMAT = 1

#: The end of the file: length and CRC-32 of the trailer's JSON text before it, and a mark.
_FOOTER = struct.Struct("<QI8s")
_MARK = b"mpidist\x01"
_READ_BYTES = 1 << 20

#: Where the arrays lie in the file: (offset, bytes), ascending.
Ranges = list[tuple[int, int]]


def write(path: Path, arrays: Mapping[str, numpy.ndarray], numbers: Mapping[str, Any]) -> None:
    """Write a file that is there complete, or not at all.  Local.

    Parameters
    ----------
    path : Path
        Replaced if it exists; its directory is made.
    arrays : mapping of str to numpy.ndarray
        Names with ``/`` become groups.
    numbers : mapping of str to (int, float, str, bool or None)
        Stored as one attribute, as JSON.

    Raises
    ------
    OSError
        What the file system says; nothing is left behind.
    """
    os.makedirs(path.parent, exist_ok=True)  # unlike Path.mkdir, it raises errors that have no others behind them
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with open(temporary, "w+b") as file:
            ranges = _write_hdf5(file, arrays, numbers)
            _write_trailer(file, ranges)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def read(path: Path) -> tuple[dict[str, numpy.ndarray], dict[str, Any]]:
    """Return the arrays and the numbers of a file, all of them checked.  Local.

    Raises
    ------
    CheckpointNotFoundError
        If there is no file.
    CheckpointError
        If it is truncated, damaged or not one of ours; names what is damaged, and both checksums.
    """
    try:
        with open(path, "rb") as file:
            _check_skeleton(path, file)
            with _h5py().File(file, "r") as content:
                index = json.loads(content.attrs["index"])
                return {name: _read_array(path, content[name], name) for name in index["arrays"]}, index["numbers"]
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is no checkpoint {path}") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def checksum(array: numpy.ndarray) -> int:
    """Return the CRC-32 of an array's bytes in C order.  Local."""
    return zlib.crc32(numpy.ascontiguousarray(array).reshape(-1).view("uint8").data)


def _write_hdf5(file: BinaryIO, arrays: Mapping[str, numpy.ndarray], numbers: Mapping[str, Any]) -> Ranges:
    ranges = []
    with _h5py().File(file, "w") as content:
        content.attrs["mpidist_format"] = FORMAT
        content.attrs["index"] = json.dumps({"arrays": list(arrays), "numbers": dict(numbers)})
        for name, array in arrays.items():
            entry = content.create_dataset(name, data=_storable(array))
            entry.attrs["dtype"] = array.dtype.name
            entry.attrs["crc32"] = checksum(array)
            if array.size:
                ranges.append((entry.id.get_offset(), array.nbytes))
    return sorted(ranges)


def _read_array(path: Path, entry: Any, name: str) -> numpy.ndarray:
    array = numpy.asarray(entry[()])
    _require_checksum(path, f"array {name!r}", checksum(array), int(entry.attrs["crc32"]))
    dtype = _dtype(path, name, entry.attrs["dtype"])
    return array if array.dtype == dtype else array.view(dtype)


def _write_trailer(file: BinaryIO, ranges: Ranges) -> None:
    end = file.seek(0, os.SEEK_END)
    text = json.dumps({"format": FORMAT, "arrays": ranges, "crc32": _skeleton_checksum(file, ranges, end)}).encode()
    file.seek(end)
    file.write(text + _FOOTER.pack(len(text), zlib.crc32(text), _MARK))


def _check_skeleton(path: Path, file: BinaryIO) -> None:
    """Raise CheckpointError unless the file is one of ours and its structure is whole; rewinds the file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _FOOTER.size, 0))
    footer = file.read()
    length, expected, mark = _FOOTER.unpack(footer) if len(footer) == _FOOTER.size else (0, 0, b"")
    end = size - _FOOTER.size - length
    if mark != _MARK or end < 0:
        raise CheckpointError(f"{path} is truncated, or is no checkpoint: {size} bytes without our mark at their end")
    file.seek(end)
    text = file.read(length)
    _require_checksum(path, "the trailer", zlib.crc32(text), expected)
    trailer = json.loads(text)
    if trailer["format"] != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {trailer['format']}; this mpidist reads format {FORMAT}")
    ranges = [(offset, length) for offset, length in trailer["arrays"]]
    _require_checksum(path, "the HDF5 structure", _skeleton_checksum(file, ranges, end), trailer["crc32"])
    file.seek(0)


def _skeleton_checksum(file: BinaryIO, ranges: Ranges, end: int) -> int:
    """Return the CRC-32 of the first `end` bytes without the arrays."""
    found = start = 0
    for offset, length in [*ranges, (end, 0)]:
        file.seek(start)
        while start < offset:
            block = file.read(min(_READ_BYTES, offset - start))
            if not block:
                return ~found  # shorter than its trailer says
            found = zlib.crc32(block, found)
            start += len(block)
        start = offset + length
    return found


def _require_checksum(path: Path, what: str, got: int, expected: int) -> None:
    if got != expected:
        raise CheckpointError(
            f"{path} is damaged: {what} has CRC-32 {got:#010x}, expected {expected:#010x}; restore another checkpoint"
        )


def _storable(array: numpy.ndarray) -> numpy.ndarray:
    """Return the array, or its bits as unsigned integers where HDF5 has no such dtype (bfloat16)."""
    return array if array.dtype.kind in "biufc" else array.view(f"u{array.dtype.itemsize}")


def _dtype(path: Path, name: str, text: str) -> numpy.dtype:
    try:
        return numpy.dtype(text)
    except TypeError:
        raise CheckpointError(
            f"{path}: array {name!r} has dtype {text}, which NumPy does not know; import the package that adds it "
            "(ml_dtypes for bfloat16) before restoring"
        ) from None


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingDependencyError("checkpoints are HDF5 files and need h5py: pip install h5py") from None
    return h5py


def _sync_directory(directory: Path) -> None:
    """Let the directory's new entry survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
