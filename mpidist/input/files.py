"""`FileRows`: rows of files.  A `Table` reads any rows of one file, and no others."""

from __future__ import annotations

import glob
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy

from mpidist.errors import InputError
from mpidist.input import structure
from mpidist.input.sources import explained
from mpidist.input.stage import Positions, Stage, as_array, gather_by, moved, row_spec, shown, spec_of

#: Rows whose distance in bytes is at most this are read in one slice, with the rows between them.
_GAP_BYTES = 1 << 16

#: The most files that the order of rows names.
_MOST_SHOWN = 8


class Table:
    """The rows of one file."""

    rows: int

    def __init__(self, path: str) -> None:
        self.path = path

    def _rows_of(self, arrays: Any) -> int:
        try:
            return structure.rows_of(arrays)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from None

    def read(self, rows: Positions) -> Any:
        """Return these rows, joined along a first axis; copies."""
        raise NotImplementedError(type(self).__name__)

    def spec(self) -> Any:
        """Return the `ArraySpec` of every array of a row."""
        return row_spec(structure.map_leaves(spec_of, self.read(range(min(self.rows, 1)))))


class FileRows(Stage):
    """The rows of several files, one file after the other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tuple(tables)
        self._ends = numpy.cumsum([table.rows for table in self.tables])
        self.length = int(self._ends[-1]) if len(self._ends) else 0

    @classmethod
    def checked(cls, tables: Sequence[Table]) -> FileRows:
        """Return the rows of these files; ValueError if one has other arrays than the first."""
        first = tables[0].spec()
        for table in tables[1:]:
            if (found := table.spec()) != first:
                raise ValueError(
                    f"files of one data set must have rows alike: {tables[0].path} has {shown(first)}, "
                    f"{table.path} has {shown(found)}"
                )
        return cls(tables)

    def gather(self, epoch: int, positions: Positions) -> Any:
        if len(self.tables) == 1:
            return self._read(0, positions)
        if isinstance(positions, range):
            first, last = numpy.searchsorted(self._ends, [positions.start, positions.stop - 1], "right").tolist()
            if first == last:
                return self._read(first, moved(positions, -self._begin(first)))
            positions = as_array(positions)
        numbers = numpy.searchsorted(self._ends, positions, "right")
        return gather_by(numbers, lambda number, at: self._read(number, positions[at] - self._begin(number)))

    def _begin(self, number: int) -> int:
        return int(self._ends[number]) - self.tables[number].rows

    def _read(self, number: int, rows: Positions) -> Any:
        table = self.tables[number]
        try:
            return table.read(rows)
        except Exception as error:
            some = f"row {rows[0]}" if len(rows) == 1 else f"rows {min(rows)} to {max(rows)}"
            raise InputError(f"{some} of {table.path} could not be read: {explained(error)}") from error

    def spec(self) -> Any:
        return next((table for table in self.tables if table.rows), self.tables[0]).spec()

    def order(self, batch_size: bool = True) -> list[str]:
        # without directories; a table may be several files side by side
        names = [", ".join(map(os.path.basename, table.path.split(", "))) for table in self.tables]
        files = [f"{name} ({table.rows})" for name, table in zip(names, self.tables, strict=True)]
        some = ", ".join(files[:_MOST_SHOWN])
        rest = f", ... ({len(files)} files, checksum {zlib.crc32(', '.join(files).encode()):#010x})"
        return [f"{self.length} rows of {shown(self.spec())} in {some}{rest if len(files) > _MOST_SHOWN else ''}"]

    def place(self, epoch: int, position: int) -> str:
        number = int(numpy.searchsorted(self._ends, position, "right"))
        return f"row {position - self._begin(number)} of {self.tables[number].path}"


def read_rows(array: Any, rows: Positions, row_bytes: int | None = None) -> numpy.ndarray:
    """Return rows, in any order, of something that is sliced like an array, by contiguous slices.  Local."""
    if isinstance(rows, range):
        return array[rows.start : rows.stop]
    if not len(rows):
        return array[:0]
    order = numpy.argsort(rows, kind="stable")
    ascending = rows[order]
    values = numpy.empty((len(rows), *array.shape[1:]), array.dtype)
    gap = max(_GAP_BYTES // max(row_bytes or values.nbytes // len(rows), 1), 1)
    for run in numpy.split(numpy.arange(len(rows)), numpy.flatnonzero(numpy.diff(ascending) > gap) + 1):
        first, last = int(ascending[run[0]]), int(ascending[run[-1]])
        values[order[run]] = array[first : last + 1][ascending[run] - first]
    return values


def tables_of(paths: Any, make: Callable[[str], Table]) -> FileRows:
    """Return the rows of the files that names and patterns mean.  Local."""
    return FileRows.checked([make(path) for path in expanded(paths)])


def expanded(paths: Any) -> list[str]:
    """Return the files that names and patterns mean, in order; FileNotFoundError if there is none.  Local."""
    files: list[str] = []
    for path in [paths] if isinstance(paths, (str, Path)) else paths:
        name = os.fspath(path)
        is_pattern = any(mark in name for mark in "*?[") and not os.path.exists(name)
        matches = sorted(glob.glob(name)) if is_pattern else [name]
        if not matches or not os.path.exists(matches[0]):
            raise FileNotFoundError(f"there is no file {name}" + (" that the pattern matches" if is_pattern else ""))
        files += matches
    if not files:
        raise ValueError("a data set of files needs at least one file, got an empty list")
    return files
