"""One file of named arrays and numbers, as HDF5: written whole or not at all, every byte of it under a checksum.

Any HDF5 program reads the file.  An array ``a/b/c`` is the data set of that name, with its CRC-32 as an attribute.  A
number ``a/b/c`` is the attribute ``c`` of the group ``a/b``.  Names that HDF5 would not find again are coded
(`entry_names`).  The *skeleton* is all that lies outside of the arrays:
HDF5's own structure, names, shapes, attributes.  Its CRC-32 is in a trailer behind the HDF5 data.  It is checked before
the HDF5 library sees the file, since a damaged structure can crash that library, and the process with it.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy

from mpidist.errors import CheckpointError, CheckpointNotFoundError, MpidistError
from mpidist.input.hdf5 import h5py
from mpidist.training.entry_names import coded, coded_attribute, decoded
from mpidist.training.temporary_files import left_behind, temporary
from mpidist.whole_file import FULL

FORMAT = 2

#: Attributes that are no numbers of the user.
_FORMAT_NAME, _DTYPE_NAME, _CHECKSUM_NAME = "mpidist_format", "dtype", "crc32"
_OF_ARRAYS = (_DTYPE_NAME, _CHECKSUM_NAME)

#: HDF5 structures of version 1.8: attributes may be longer than 64 KiB; readable since 2008.
LIBRARY_VERSIONS = ("v108", "v110")

#: The end of the file: length and CRC-32 of the trailer's JSON text before it, and a mark.
_FOOTER = struct.Struct("<QI8s")
_MARK = b"mpidist\x02"

#: What the trailer says of the names; older ones say nothing, and names stand in the file as they were given.
_NAMES = "coded"
_READ_BYTES = 1 << 20
_INT64 = range(-(1 << 63), 1 << 63)

#: The places of arrays in the file: (offset, bytes), ascending.
Ranges = list[tuple[int, int]]


def write(
    path: Path,
    arrays: Mapping[str, numpy.ndarray],
    numbers: Mapping[str, Any],
    permit_fn: Callable[[], None] = lambda: None,  # raises where the file must not get its name
) -> None:
    """Write a file that is there complete, or not at all; errors also as for `require_storable`.  Local."""
    require_storable(arrays)
    written = begin(path)
    try:
        with open(written, "w+b") as file:
            with h5py().File(file, "w", libver=LIBRARY_VERSIONS) as content:
                checksums = {name: checksum(array) for name, array in arrays.items()}
                ranges = fill(content, arrays, numbers, checksums)
            add_trailer(file, ranges)
        finish(written, path, permit_fn)
    except BaseException as error:
        written.unlink(missing_ok=True)
        if (full := _full_disk(error, path.parent, sum(array.nbytes for array in arrays.values()))) is not None:
            raise full from None
        if isinstance(error, SystemError) and isinstance(cause := first_cause(error), OSError):
            # from Python 3.12 on, closing the file, which fails once more, has this error
            raise cause from None
        raise


def first_cause(error: BaseException) -> BaseException:
    """Return the first error of the file system; closing a file on a full disk raises it again and again.  Local."""
    while not isinstance(error, MpidistError) and isinstance(error.__context__, OSError):
        error = error.__context__
    return error


def _full_disk(error: BaseException, directory: Path, nbytes: int) -> CheckpointError | None:
    """Return what to say where a file found no room: how much there is, and how much it needs."""
    cause = first_cause(error)
    if not isinstance(cause, OSError) or cause.errno not in FULL:
        return None
    try:
        free = f"{shutil.disk_usage(directory).free / 1e6:.1f} MB are free in {directory}"
    except OSError:
        free = f"{directory} cannot be asked what is free"
    needs = f"the file needs {nbytes / 1e6:.1f} MB, and {free}"
    return CheckpointError(f"{cause}; {needs}; earlier checkpoints are as they were; make room, or keep fewer of them")


def begin(path: Path) -> Path:
    """Make the directory of a file, and return the name under which it is written.  Local."""
    os.makedirs(path.parent, exist_ok=True)  # unlike Path.mkdir, it raises errors that have no others behind them
    for left in left_behind(path.parent, lambda name: name == path.name):
        left.unlink(missing_ok=True)
    return temporary(path)


def finish(written: Path, path: Path, permit_fn: Callable[[], None]) -> None:
    """Give a file that is written, and on the disk, its name; arguments and errors as for `write`.  Local."""
    permit_fn()
    with open(written, "rb") as ours:  # as long as it is open, no other file can have its number
        os.replace(written, path)
        _sync_directory(path.parent)
        permit_fn()
        try:
            is_ours = os.path.samestat(os.fstat(ours.fileno()), os.stat(path))
        except FileNotFoundError:
            is_ours = False
    if not is_ours:
        raise CheckpointError(
            f"another job has replaced {path} at the same time; give every job a directory of its own"
        )


def fill(
    content: Any,
    arrays: Mapping[str, numpy.ndarray],
    numbers: Mapping[str, Any],
    checksums: Mapping[str, int],
    stored: bool = True,  # False makes room for the arrays only, which parallel HDF5 does at once
) -> Ranges:
    """Write arrays and numbers to an open HDF5 file; return where the arrays are."""
    content.attrs[_FORMAT_NAME] = FORMAT
    ranges = []
    for name, array in arrays.items():
        if stored:
            entry = content.create_dataset(coded(name), data=storable(array))
        else:
            entry = content.create_dataset(coded(name), array.shape, storable(array).dtype)
        entry.attrs[_DTYPE_NAME] = array.dtype.name
        entry.attrs[_CHECKSUM_NAME] = checksums[name]
        if array.size:
            ranges.append((entry.id.get_offset(), array.nbytes))
    for name, number in numbers.items():
        group, _, attribute = coded(name).rpartition("/")
        holder = content if not group else content[group] if group in content else content.create_group(group)
        holder.attrs[coded_attribute(attribute, _taken(group, holder))] = _as_attribute(name, number)
    return sorted(ranges)


def read(path: Path) -> tuple[dict[str, numpy.ndarray], dict[str, Any]]:
    """Return the arrays and the numbers of a file, all of them checked.  Local."""
    try:
        with open(path, "rb") as file:
            name_of = decoded if check_skeleton(path, file) else str
            with h5py().File(file, "r") as content:
                entries = list(_entries(content))
                found = {name_of(name): entry for name, entry in entries if hasattr(entry, "shape")}
                arrays = {name: _read_array(path, entry, name) for name, entry in found.items()}
                return arrays, {name_of(name): number for group in entries for name, number in _numbers(*group)}
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"there is no checkpoint {path}") from None
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield (coded name, group or data set) for all that is in a file, and for itself."""
    waiting = [("", content)]  # no recursion: names may have many parts
    while waiting:
        name, entry = waiting.pop()
        yield name, entry
        if not hasattr(entry, "shape"):
            waiting.extend((f"{name}/{key}" if name else key, entry[key]) for key in reversed(list(entry)))


def _taken(name: str, entry: Any) -> tuple[str, ...]:
    """Return the attributes of a group or data set that are no numbers of the user."""
    return _OF_ARRAYS if hasattr(entry, "shape") else () if name else (_FORMAT_NAME,)


def _numbers(name: str, entry: Any) -> Iterator[tuple[str, Any]]:
    taken = _taken(name, entry)
    for key, value in entry.attrs.items():
        if key not in taken:
            number = json.loads(value) if isinstance(value, str) else value.item()
            yield (f"{name}/{key}" if name else key), number


def _as_attribute(name: str, number: Any) -> Any:
    if isinstance(number, (bool, numpy.bool_)):
        return numpy.bool_(number)
    if isinstance(number, int) and number in _INT64:
        return numpy.int64(number)
    if isinstance(number, float):
        return numpy.float64(number)
    try:
        _require_text_keys(number)
        return json.dumps(number)
    except TypeError as error:
        raise TypeError(
            f"{name!r} cannot be saved: {error}; give arrays and numbers under names of their own"
        ) from None


def _require_text_keys(number: Any) -> None:
    """Raise TypeError for a dict with other keys than text, which would come back as text."""
    if isinstance(number, dict):
        for key in number:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} of a dict in it is no text")
    if isinstance(number, (dict, list, tuple)):
        for each in number.values() if isinstance(number, dict) else number:
            _require_text_keys(each)


def checksum(array: numpy.ndarray) -> int:
    """Return the CRC-32 of an array's bytes in C order.  Local."""
    return zlib.crc32(numpy.ascontiguousarray(array).reshape(-1).view("uint8").data)


def _read_array(path: Path, entry: Any, name: str) -> numpy.ndarray:
    array = numpy.asarray(entry[()])
    _require_checksum(path, f"array {name!r}", checksum(array), int(entry.attrs[_CHECKSUM_NAME]))
    dtype = _dtype(path, name, entry.attrs[_DTYPE_NAME])
    if array.dtype.newbyteorder("=") == dtype:  # older files have arrays in the byte order that they were given in
        return array.astype(dtype, copy=False)
    return array.view(dtype)


def add_trailer(file: BinaryIO, ranges: Ranges) -> None:
    """Write the trailer behind a finished HDF5 file, and wait until all is on the disk.  Local."""
    end = file.seek(0, os.SEEK_END)
    checksum_of_skeleton = _skeleton_checksum(file, ranges, end)
    text = json.dumps({"format": FORMAT, "names": _NAMES, "arrays": ranges, "crc32": checksum_of_skeleton}).encode()
    file.seek(end)
    file.write(text + _FOOTER.pack(len(text), zlib.crc32(text), _MARK))
    file.flush()
    os.fsync(file.fileno())


def check_skeleton(path: Path, file: BinaryIO) -> bool:
    """Return whether the names in a file are coded, and rewind it.  Local.

    CheckpointError where the file is none of ours, or its structure is not whole.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _FOOTER.size, 0))
    footer = file.read()
    length, expected, mark = _FOOTER.unpack(footer) if len(footer) == _FOOTER.size else (0, 0, b"")
    end = size - _FOOTER.size - length
    if mark[:-1] != _MARK[:-1] or end < 0:
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
    return bool(trailer.get("names") == _NAMES)


def _skeleton_checksum(file: BinaryIO, ranges: Ranges, end: int) -> int:
    """Return the CRC-32 of the first `end` bytes without the arrays."""
    crc = start = 0
    for offset, length in [*ranges, (end, 0)]:
        file.seek(start)
        while start < offset:
            block = file.read(min(_READ_BYTES, offset - start))
            if not block:
                return ~crc  # shorter than its trailer says
            crc = zlib.crc32(block, crc)
            start += len(block)
        start = offset + length
    return crc


def _require_checksum(path: Path, what: str, got: int, expected: int) -> None:
    if got != expected:
        raise CheckpointError(
            f"{path} is damaged: {what} has CRC-32 {got:#010x}, expected {expected:#010x}; restore another checkpoint"
        )


def require_storable(arrays: Mapping[str, numpy.ndarray]) -> None:
    """Raise TypeError for an array that would not come back as it is: text, records, objects, foreign bytes.  Local."""
    for name, array in arrays.items():
        try:
            is_known = numpy.dtype(array.dtype.name) == array.dtype and not array.dtype.hasobject
        except TypeError:
            is_known = False
        if not is_known:
            raise TypeError(
                f"{name!r} cannot be saved: it is an array of dtype {array.dtype}, expected numbers, truth values or "
                "times; give text as str or a list of str, and each field of a record under a name of its own"
            )


def storable(array: numpy.ndarray) -> numpy.ndarray:
    """Return the array, or its bits as unsigned integers where HDF5 has no such dtype (bfloat16).  Local."""
    return array if array.dtype.kind in "biufc" else array.view(f"u{array.dtype.itemsize}")


def _dtype(path: Path, name: str, text: str) -> numpy.dtype:
    try:
        return numpy.dtype(text)
    except TypeError:
        raise CheckpointError(
            f"{path}: array {name!r} has dtype {text}, which NumPy does not know; import the package that adds it "
            "(ml_dtypes for bfloat16) before restoring"
        ) from None


def _sync_directory(directory: Path) -> None:
    """Let the directory's new entry survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
