"""Lines of text and CSV files, by an index of their places that is made once."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy

from mpidist.arrays import has_numbers
from mpidist.input.files import Table, read_rows
from mpidist.input.stage import ArraySpec, Positions

_BLOCK_BYTES, _NEWLINE = 1 << 24, 10

#: The texts of truth values, in any case.
_TRUTH = {"0": False, "1": True, "false": False, "true": True}


class TextTable(Table):
    """The lines of a text file, as str without their line ends; they are sliced like an array."""

    shape, dtype = (0,), numpy.dtype(object)

    def __init__(self, path: str, encoding: str = "utf-8", skip: int = 0) -> None:
        super().__init__(path)
        if len("\n\n".encode(encoding)) - len("\n".encode(encoding)) != 1 or not "\n".encode(encoding).endswith(b"\n"):
            raise ValueError(
                f"{path}: lines are found by the byte 0x0a, which ends none in {encoding}; convert it to UTF-8"
            )
        self.encoding, self.skip = encoding, skip

    @cached_property
    def _bytes(self) -> numpy.ndarray:
        try:
            return numpy.memmap(self.path, numpy.uint8, "r")
        except ValueError:  # an empty file cannot be mapped
            return numpy.empty(0, numpy.uint8)

    @cached_property
    def _starts(self) -> numpy.ndarray:
        """Where each line begins, and behind them where the last one ends."""
        size, mark = len(self._bytes), self._bytes[: len(codecs.BOM_UTF8)]
        found = [numpy.array([len(mark) if mark.tobytes() == codecs.BOM_UTF8 else 0])]
        for at in range(0, size, _BLOCK_BYTES):
            found.append(numpy.flatnonzero(self._bytes[at : at + _BLOCK_BYTES] == _NEWLINE) + (at + 1))
        starts = numpy.concatenate(found)
        return (starts if starts[-1] == size else numpy.append(starts, size))[self.skip :]

    @property
    def rows(self) -> int:  # type: ignore[override]
        """Number of lines, without those left out."""
        return max(len(self._starts) - 1, 0)

    def lines(self, rows: Positions) -> list[str]:
        """Return these lines."""
        if not len(rows):
            return []
        return list(read_rows(self, rows, row_bytes=len(self._bytes) // self.rows))

    def __getitem__(self, rows: slice) -> numpy.ndarray:
        """Return lines that follow each other, as an array of objects."""
        text = self._bytes[self._starts[rows.start] : self._starts[rows.stop]].tobytes().decode(self.encoding)
        found = numpy.empty(rows.stop - rows.start, object)
        found[:] = [line.removesuffix("\r") for line in text.split("\n")[: len(found)]]
        return found

    def read(self, rows: Positions) -> Any:
        return numpy.array(self.lines(rows), dtype=numpy.str_)

    def spec(self) -> Any:
        return ArraySpec((), numpy.dtype("U"))


class CsvTable(TextTable):
    """The rows of a CSV file: a dict of columns where it has a header, a tuple where it has none."""

    def __init__(
        self,
        path: str,
        columns: Sequence[Any] | None = None,
        dtype: Any = "float32",
        header: bool = True,
        delimiter: str = ",",
        encoding: str = "utf-8",
    ) -> None:
        super().__init__(path, encoding, skip=int(header))
        self._delimiter = delimiter
        first = next(iter(self._fields([self._first_line()])), [])
        names: list[Any] = [name.strip() for name in first] if header else list(range(len(first)))
        self.header = header
        self.fields = len(names)
        wanted = names if columns is None else list(columns)
        unknown = [name for name in wanted if name not in names]
        if unknown:
            raise KeyError(f"{path} has no column {unknown[0]!r}; it has {', '.join(map(repr, names))}")
        if twice := [name for name in wanted if names.count(name) > 1 or wanted.count(name) > 1]:
            raise ValueError(f"{path} has, or is asked for, the column {twice[0]!r} more than once; name each once")
        of = dtype if isinstance(dtype, Mapping) else dict.fromkeys(wanted, dtype)
        if nowhere := [name for name in of if name not in names]:
            raise KeyError(f"{path} has no column {nowhere[0]!r} for its dtype; it has {', '.join(map(repr, names))}")
        self._columns = [(name, names.index(name), numpy.dtype(of.get(name, "float32"))) for name in wanted]

    def _first_line(self) -> str:
        with open(self.path, encoding=self.encoding, newline="\n") as file:
            return file.readline().rstrip("\r\n").removeprefix("\ufeff")

    def _fields(self, lines: list[str]) -> list[list[str]]:
        return list(csv.reader(lines, delimiter=self._delimiter, strict=True))

    def read(self, rows: Positions) -> Any:
        parsed = self._parsed(rows)
        found = {
            name: self._column(name, dtype, [row[at] for row in parsed], rows) for name, at, dtype in self._columns
        }
        return found if self.header else tuple(found.values())

    def _parsed(self, rows: Positions) -> list[list[str]]:
        lines = self.lines(rows)
        parsed = self._fields(lines)
        if len(parsed) != len(lines):
            raise ValueError("a quoted field holds a line break, which is not supported")
        for row, fields in zip(rows, parsed, strict=True):
            if len(fields) != self.fields:
                raise ValueError(f"row {row} has {len(fields)} fields, expected {self.fields}")
        return parsed

    def _column(self, name: Any, dtype: numpy.dtype, texts: list[str], rows: Positions) -> numpy.ndarray:
        if dtype.kind == "U":
            return numpy.array(texts, dtype=numpy.str_)
        try:
            return _numbers(texts, dtype)
        except ValueError:
            for row, text in zip(rows, texts, strict=True):
                try:
                    _numbers([text], dtype)
                except ValueError as error:
                    raise ValueError(f"column {name!r} of row {row} is {text!r}, expected {dtype}") from error
            raise

    def spec(self) -> Any:
        found = {name: ArraySpec((), dtype) for name, _, dtype in self._columns}
        return found if self.header else tuple(found.values())


def _numbers(texts: list[str], dtype: numpy.dtype) -> numpy.ndarray:
    """Return what texts mean in a dtype; ValueError where one means nothing in it."""
    if dtype.kind == "b":  # NumPy takes every text that is not empty for True
        if wrong := {text.strip().lower() for text in texts} - _TRUTH.keys():
            raise ValueError(f"{min(wrong)!r} is none of {', '.join(_TRUTH)}")
        return numpy.array([_TRUTH[text.strip().lower()] for text in texts], dtype)
    if has_numbers(dtype) and any("_" in text for text in texts):  # Python leaves out one between digits
        raise ValueError("there is no underscore in a number")
    if dtype.kind in "iu":  # of numbers that do not fit, an older NumPy keeps the last bits
        numbers, limits = [int(text) for text in texts], numpy.iinfo(dtype)
        if numbers and not limits.min <= min(numbers) <= max(numbers) <= limits.max:
            raise ValueError(f"a number is not from {limits.min} to {limits.max}")
        return numpy.array(numbers, dtype)
    with numpy.errstate(over="ignore"):  # it is an error below
        found = numpy.array(texts, dtype=numpy.str_).astype(dtype)
    if has_numbers(dtype) and any("inf" not in texts[place].lower() for place in numpy.flatnonzero(numpy.isinf(found))):
        raise ValueError(f"a number is beyond the largest of {dtype}")
    return found
