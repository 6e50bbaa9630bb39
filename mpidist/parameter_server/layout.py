"""Where variables lie in a server's memory, and where gradients lie in a push.  Pure: no memory is owned here.

A `Layout` puts variables of one dtype side by side, without gaps, in the order of their keys; a `PushPlan` puts
gradients in the same order.  So gradients of all variables of a server are one run of elements, and are applied by one
call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy

#: Number of a variable, and of its shard: 0 where it has no others.
Key = tuple[int, int]

_ALIGN = 64

#: About what a client or a server keeps for each variable of a plan, besides gradients.
_BYTES_PER_VARIABLE = 1 << 11


def aligned(nbytes: int) -> int:
    """Return the next multiple of a cache line."""
    return -(-nbytes // _ALIGN) * _ALIGN


def dtype_name(dtype: Any) -> str:
    """Return what `numpy.dtype` makes the dtype of again; ml_dtypes' floats have no letter code of their own."""
    dtype = numpy.dtype(dtype)
    return dtype.name if dtype.kind == "V" and dtype.names is None else dtype.str


@dataclass(frozen=True)
class VariableSpec:
    """What is known of a variable, or of one shard of it, everywhere."""

    key: Key
    name: str
    shape: tuple[int, ...]
    dtype: numpy.dtype

    @cached_property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def whole_name(self) -> str:
        """The name of the variable of which this may be a shard."""
        return self.name.removesuffix(f"/part_{self.key[1]}")

    def described(self) -> list[Any]:
        """Return this as what JSON can hold."""
        return [list(self.key), self.name, list(self.shape), dtype_name(self.dtype)]

    @classmethod
    def from_description(cls, description: Sequence[Any]) -> VariableSpec:
        """Return what `described` described."""
        key, name, shape, dtype = description
        return cls((key[0], key[1]), name, tuple(shape), numpy.dtype(dtype))

    def __str__(self) -> str:
        shard = f" (shard {self.key[1]})" if self.key[1] else ""
        return f"variable {self.name!r}{shard} of shape {self.shape} and dtype {self.dtype}"


def in_order(specs: Iterable[VariableSpec]) -> list[VariableSpec]:
    """Return variables in the order in which layouts and plans put them."""
    return sorted(specs, key=lambda spec: (dtype_name(spec.dtype), spec.key))


@dataclass(frozen=True)
class Section:
    """Elements of one dtype, side by side."""

    dtype: numpy.dtype
    start: int
    size: int

    @property
    def stop(self) -> int:
        """Offset in bytes of its end."""
        return self.start + self.size * self.dtype.itemsize

    def of(self, memory: Any) -> Any:
        """Return this section of a flat array of bytes, as a view."""
        return memory[self.start : self.stop].view(self.dtype)


def _sections(pairs: Iterable[tuple[numpy.dtype, int]]) -> list[Section]:
    """Return the sections of elements that come as (dtype, count), those of one dtype after another."""
    sections: list[Section] = []
    for dtype, size in pairs:
        if sections and sections[-1].dtype == dtype:
            sections[-1] = Section(dtype, sections[-1].start, sections[-1].size + size)
        else:
            sections.append(Section(dtype, aligned(sections[-1].stop) if sections else 0, size))
    return sections


def _places(specs: Iterable[VariableSpec]) -> list[tuple[int, int]]:
    """Return the number of its section, and its first element there, of each of some variables that are in order."""
    places: list[tuple[int, int]] = []
    number, filled, before = -1, 0, None
    for spec in specs:
        if before is None or spec.dtype != before:
            number, filled, before = number + 1, 0, spec.dtype
        places.append((number, filled))
        filled += spec.size
    return places


class Layout:
    """Where each variable lies in a buffer of bytes."""

    def __init__(self, specs: Iterable[VariableSpec]) -> None:
        self.specs = in_order(specs)
        self.index = {spec.key: index for index, spec in enumerate(self.specs)}
        self.sections = _sections((spec.dtype, spec.size) for spec in self.specs)
        places = _places(self.specs)
        self.section_of, self.first = [number for number, _ in places], [first for _, first in places]
        self.nbytes = aligned(self.sections[-1].stop) if self.sections else 0

    def spec(self, key: Key) -> VariableSpec:
        """Return the variable of a key."""
        return self.specs[self.index[key]]

    def views(self, memory: Any) -> dict[Key, Any]:
        """Return every variable, in its shape, in a flat array of bytes.  Local."""
        flat = [section.of(memory) for section in self.sections]
        return {
            spec.key: flat[number][first : first + spec.size].reshape(spec.shape)
            for spec, number, first in zip(self.specs, self.section_of, self.first, strict=True)
        }

    def places_of(self, keys: Iterable[Key]) -> Any:
        """Return the places in `specs` of those variables that are here: a slice or an array, None for all of them."""
        places = sorted(self.index[key] for key in keys if key in self.index)
        if len(places) == len(self.specs):
            return None
        if places and places[-1] - places[0] + 1 == len(places):
            return slice(places[0], places[-1] + 1)
        return numpy.array(places, numpy.intp)

    def spans(self, indices: Iterable[int]) -> Iterator[tuple[int, slice]]:
        """Yield section and elements in which some variables lie, neighbours together; `indices` ascend."""
        number, start, stop = -1, 0, 0
        for index in indices:
            section, first = self.section_of[index], self.first[index]
            if (section, first) != (number, stop):
                if number >= 0:
                    yield number, slice(start, stop)
                number, start = section, first
            stop = first + self.specs[index].size
        if number >= 0:
            yield number, slice(start, stop)


def slots_of(state: Mapping[str, Any]) -> dict[Key, dict[str, Any]]:
    """Return the slots of each variable by name, of what a state has as ``"variable/shard/slot"``."""
    slots: dict[Key, dict[str, Any]] = {}
    for name, value in state.items():
        if name.count("/") == 2:
            number, shard, slot = name.split("/")
            slots.setdefault((int(number), int(shard)), {})[slot] = value
    return slots


@dataclass(frozen=True)
class PushPlan:
    """Which gradients one push carries, and where they lie in its message.

    First those of whole variables, section by section.  Behind them, for each variable of which rows are pushed: the
    numbers of the rows, and the rows.

    `digest` is that of the list on all servers, where these gather: two lists of which one server has the same part are
    two steps there too.
    """

    dense: tuple[VariableSpec, ...]
    sparse: tuple[VariableSpec, ...] = ()
    push_dtype: numpy.dtype | None = None
    digest: str = ""

    def wire_dtype(self, spec: VariableSpec) -> numpy.dtype:
        """Return the dtype in which a gradient of this variable is sent."""
        narrow = self.push_dtype
        return narrow if narrow is not None and narrow.itemsize < spec.dtype.itemsize else spec.dtype

    @cached_property
    def sections(self) -> list[Section]:
        """Where gradients of whole variables lie: one section for each dtype of variables."""
        ends: list[Section] = []
        for section in _sections((spec.dtype, spec.size) for spec in self.dense):
            spec = VariableSpec((0, 0), "", (), section.dtype)
            start = aligned(ends[-1].stop) if ends else 0
            ends.append(Section(self.wire_dtype(spec), start, section.size))
        return ends

    @property
    def own_nbytes(self) -> int:
        """About how many bytes are kept for it, besides gradients."""
        return _BYTES_PER_VARIABLE * (len(self.dense) + len(self.sparse))

    @cached_property
    def dense_nbytes(self) -> int:
        """Size in bytes of the gradients of whole variables."""
        return aligned(self.sections[-1].stop) if self.sections else 0

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """By variable of `dense`: the number of its section, and its first element there."""
        return _places(self.dense)

    def row_places(self, counts: Sequence[int]) -> list[tuple[slice, slice]]:
        """Return where numbers and rows lie, in bytes, by variable of `sparse`."""
        places, end = [], self.dense_nbytes
        for spec, count in zip(self.sparse, counts, strict=True):
            numbers = slice(end, end + 8 * count)
            start = aligned(numbers.stop)
            row_nbytes = math.prod(spec.shape[1:]) * self.wire_dtype(spec).itemsize
            rows = slice(start, start + count * row_nbytes)
            end = aligned(rows.stop)
            places.append((numbers, rows))
        return places

    def nbytes(self, counts: Sequence[int] = ()) -> int:
        """Return the size in bytes of a message with so many rows of each variable of `sparse`."""
        return aligned(self.row_places(counts)[-1][1].stop) if self.sparse else self.dense_nbytes
