"""Rows of `.npy` and `.npz` files, mapped into memory unless they are compressed."""

from __future__ import annotations

import struct
import threading
import zipfile
from typing import Any

import numpy

from mpidist.input import structure
from mpidist.input.files import Table, read_rows
from mpidist.input.stage import Positions

#: A zip file's local header before the name; it ends with the lengths of name and extra bytes.
_LOCAL_HEADER = struct.Struct("<26x2H")


#: One header at a time: NumPy parses it as Python, and CPython before 3.11.8 and 3.12.2 fails now and then where two
#: threads do so at once ("AST constructor recursion depth mismatch").
_HEADERS = threading.Lock()


class ArrayTable(Table):
    """The rows of arrays that are sliced like arrays."""

    def __init__(self, path: str, arrays: Any) -> None:
        super().__init__(path)
        self._arrays = arrays
        self.rows = self._rows_of(arrays)

    def read(self, rows: Positions) -> Any:
        return structure.map_leaves(
            lambda array: numpy.array(read_rows(array, rows), copy=True, subok=False), self._arrays
        )


def npy_table(paths: Any) -> ArrayTable:
    """Return the rows of ``.npy`` files side by side.  Local."""
    with _HEADERS:
        arrays = structure.map_leaves(lambda path: numpy.load(path, mmap_mode="r", allow_pickle=False), paths)
    return ArrayTable(", ".join(structure.leaves(paths)), arrays)


def npz_table(path: str, names: Any = None) -> ArrayTable:
    """Return the rows of arrays in a ``.npz`` file, mapped into memory unless they are compressed.  Local."""
    with zipfile.ZipFile(path) as archive:
        known = {name.removesuffix(".npy"): name for name in archive.namelist()}

        def load(name: str) -> numpy.ndarray:
            if name not in known:
                raise KeyError(f"{path} has no array {name!r}; it has {', '.join(map(repr, known))}")
            member = archive.getinfo(known[name])
            if member.compress_type == zipfile.ZIP_STORED:
                return _mapped(path, member)
            with archive.open(member) as file, _HEADERS:
                return numpy.lib.format.read_array(file, allow_pickle=False)

        return ArrayTable(path, structure.map_leaves(load, names or {name: name for name in known}))


def _mapped(path: str, member: zipfile.ZipInfo) -> numpy.ndarray:
    """Return an array that lies uncompressed in a zip file as a view of the file."""
    with open(path, "rb") as file:
        file.seek(member.header_offset)
        name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        file.seek(member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)
        with _HEADERS:
            version, formats = numpy.lib.format.read_magic(file), numpy.lib.format
            read_header = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
            shape, in_columns, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError(f"{member.filename} in {path} holds Python objects, which are not read")
        if 0 in shape:
            return numpy.empty(shape, dtype)
        order = "F" if in_columns else "C"
        return numpy.memmap(path, dtype, "r", offset=file.tell(), shape=shape, order=order)  # type: ignore[call-overload]
