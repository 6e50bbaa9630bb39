"""Rows of HDF5 files, read by slices: h5py reads the chunks that a batch touches, and no others."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from functools import cached_property
from typing import Any

from mpidist.errors import MissingDependencyError
from mpidist.input import structure
from mpidist.input.files import Table, read_rows
from mpidist.input.stage import Positions, row_spec

#: The most files of a data set that are open.
_MOST_OPEN = 32

#: Arrays up to this size are kept in memory: a call of HDF5 takes longer than their rows.
_SMALL_BYTES = 1 << 20

#: A cache of unpacked chunks, for batches that end inside of one: chunks, bytes, and slots of its table.
_CHUNKS, _MOST_CACHE_BYTES, _SLOTS = 4, 1 << 26, 521


class OpenFiles:
    """The files of one data set that are open: those that were used last.

    Several threads may ask for them: each iterator with `prefetch` has one.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def arrays(self, path: str, names: Any) -> Any:
        """Return the arrays (h5py.Dataset) of a file; all at its top where `names` is None."""
        with self._lock:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
            file = h5py().File(path, "r")
            self._open[path] = found = structure.map_leaves(lambda name: _array(file, name), names or _at_top(file))
            if len(self._open) > _MOST_OPEN:
                self._open.popitem(last=False)  # h5py closes a file when nothing refers to it
            return found


class Hdf5Table(Table):
    """The rows of some arrays of an HDF5 file."""

    def __init__(self, path: str, names: Any, files: OpenFiles) -> None:
        super().__init__(path)
        self._names, self._files = names, files
        self.rows = self._rows_of(self._arrays())

    def _arrays(self) -> Any:
        return self._files.arrays(self.path, self._names)

    def read(self, rows: Positions) -> Any:
        return structure.map_leaves(lambda array: read_rows(array, rows), self._arrays())

    def spec(self) -> Any:
        return row_spec(self._arrays())


def _at_top(file: Any) -> dict[str, str]:
    found = {name: name for name in file if hasattr(file[name], "dtype")}
    if not found:
        raise ValueError(f"{file.filename} has no arrays at its top; name those you want, such as 'train/images'")
    return found


def _array(file: Any, name: str) -> Any:
    array = file.get(name)
    if not hasattr(array, "dtype"):
        raise KeyError(f"{file.filename} has no array {name!r}; at its top are {', '.join(map(repr, file))}")
    is_small = not array.dtype.hasobject and array.size * array.dtype.itemsize <= _SMALL_BYTES
    return _SmallArray(array) if is_small and array.ndim else _with_room(array)


class _SmallArray:
    """An array of a file that is read whole at the first use, and kept: labels beside images, for the most part."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    @cached_property
    def _values(self) -> Any:
        return self._array[()]

    def __getitem__(self, rows: slice) -> Any:
        return self._values[rows].copy()


def _with_room(array: Any) -> Any:
    """Return an array whose chunks fit into its cache, if they are compressed: those that do not are unpacked again."""
    chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize if array.chunks else 0
    is_packed = array.id.get_create_plist().get_nfilters() > 0
    cache_bytes = array.id.get_access_plist().get_chunk_cache()[1]
    if not is_packed or chunk_bytes * _CHUNKS <= cache_bytes:
        return array
    library = h5py()
    access = library.h5p.create(library.h5p.DATASET_ACCESS)
    access.set_chunk_cache(_SLOTS, min(chunk_bytes * _CHUNKS, _MOST_CACHE_BYTES), 0.75)
    return library.Dataset(library.h5d.open(array.file.id, array.name.encode(), access))


def h5py() -> Any:
    """Return the h5py package; MissingDependencyError where there is none.  Local."""
    try:
        import h5py
    except ImportError as error:
        raise MissingDependencyError(f"HDF5 files need h5py: pip install h5py ({error})") from error
    return h5py
