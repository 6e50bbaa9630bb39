"""Rows of HDF5 files, read by slices: h5py reads the chunks that a batch touches, and no others."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy

from mpidist.errors import MissingDependencyError
from mpidist.input import structure
from mpidist.input.files import Table, read_rows
from mpidist.input.node import ArraySpec

#: How many files of a data set are kept open, and how many bytes of decompressed chunks for each of their arrays.
_MOST_OPEN, _CHUNK_CACHE_BYTES = 32, 1 << 25


class OpenFiles:
    """The files of one data set that are open: those that were used last."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Any] = OrderedDict()

    def arrays(self, path: str, names: Any) -> Any:
        """Return the arrays (h5py.Dataset) of a file; all at its top where `names` is None."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        # several ranks read, and many network file systems cannot lock
        file = _h5py().File(path, "r", rdcc_nbytes=_CHUNK_CACHE_BYTES, locking=False)
        self._open[path] = found = structure.map_leaves(lambda name: _array(file, name), names or _at_top(file))
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)  # h5py closes a file when nothing refers to it
        return found


class Hdf5Table(Table):
    """The rows of some arrays of an HDF5 file.

    Parameters
    ----------
    path : str
    names : str, or nested tuples and dicts of str, or None
        The arrays; None is all arrays at the top of the file, by name.
    files : OpenFiles
    """

    def __init__(self, path: str, names: Any, files: OpenFiles) -> None:
        super().__init__(path)
        self._names, self._files = names, files
        try:
            self.rows = structure.rows_of(self._arrays())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    def _arrays(self) -> Any:
        return self._files.arrays(self.path, self._names)

    def read(self, rows: numpy.ndarray) -> Any:
        """Return these rows."""
        return structure.map_leaves(lambda array: read_rows(array, rows), self._arrays())

    def spec(self) -> Any:
        """Return what the file says."""
        return structure.map_leaves(lambda array: ArraySpec(array.shape[1:], array.dtype), self._arrays())


def _at_top(file: Any) -> dict[str, str]:
    found = {name: name for name in file if hasattr(file[name], "dtype")}
    if not found:
        raise ValueError(f"{file.filename} has no arrays at its top; name those you want, such as 'train/images'")
    return found


def _array(file: Any, name: str) -> Any:
    found = file.get(name)
    if not hasattr(found, "dtype"):
        raise KeyError(f"{file.filename} has no array {name!r}; at its top are {', '.join(map(repr, file))}")
    return found


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise MissingDependencyError(f"HDF5 files need h5py: pip install h5py ({error})") from error
    return h5py
