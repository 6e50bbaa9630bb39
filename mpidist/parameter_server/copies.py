"""Copies of variables, and of slots, that a server and the clients on its node read and write where they lie.

Who has the write lock - the server, or a client - writes a copy that nobody reads, and makes it current when it is
complete.  So a reader never sees a change, and a writer that dies leaves the copy before: the one that it had begun
is marked, and nothing in it is believed.

Of the variables there are two copies more than clients that may *pin* one while they read it.  Slots are read by who
writes only: of them there are two copies, their *sides*.  Each copy of the variables says which side of each optimizer
belongs to it, so that one store makes variables and slots current together.

A pin is a store that must be visible before the current copy is looked at again, and a writer stores the current
copy before it looks at the pins: both have a full fence there.
"""

from __future__ import annotations

import mmap
import secrets
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy

from mpidist.optimizers.slices import compute_dtype
from mpidist.parameter_server.layout import Key, Layout, Section, aligned
from mpidist.runtime.board import fence, full_fence, needs_fence
from mpidist.runtime.shared_memory import LINE_WORDS, WORD_BYTES, SharedFile, map_file

#: The first words: the current copy of variables, a number by which the memory is known, how many changes there were.
_CURRENT, _TOKEN, _CHANGES = range(3)

#: The version of what is not there, and has no memory yet.
_ABSENT = -2

#: As an array: that is added at half the cost of a number.
_ONE = numpy.array(1)


class NoCopy(Exception):
    """Raised by who would write, with nothing changed, until a client has given back what it has pinned."""


class _Places:
    """Where things lie in the memory of `Copies`: word indices, and offsets in bytes."""

    def __init__(self, layout: Layout, arrays: Sequence[Sequence[Section]], count: int, own_words: int) -> None:
        self.whole = LINE_WORDS + own_words
        self.versions = self.whole + count
        self.words = self.versions + count * len(layout.specs)
        self.stride = _pages(max((each.stop for section in arrays for each in section), default=0))
        self.first = _pages(self.words * WORD_BYTES)
        self.nbytes = self.first + count * self.stride

    def bytes_of(self, copy: int) -> slice:
        start = self.first + copy * self.stride
        return slice(start, start + self.stride)


class Copies:
    """Several copies of arrays in the places of one layout.  Who changes them has the write lock.

    Places of `own_words` words are for the subclass; `memory_of` returns memory for all places.
    """

    #: The file that a server makes; None in private memory, and for a client.
    _file: SharedFile | None = None

    def __init__(
        self,
        layout: Layout,
        arrays: Sequence[Sequence[Section]],
        count: int,
        own_words: int,
        memory_of: Callable[[_Places], Any],
    ) -> None:
        self.layout, self.count, self._arrays = layout, count, arrays
        self._places = places = _Places(layout, arrays, count, own_words)
        self._memory = memory = memory_of(places)
        self._words = memoryview(memory)[: places.words * WORD_BYTES].cast("q")
        table = numpy.frombuffer(memory, numpy.int64, count * len(layout.specs), places.versions * WORD_BYTES)
        self.versions: list[Any] = list(table.reshape(count, len(layout.specs)))
        self._first_version, self._variables = places.versions, len(layout.specs)
        self._whole = places.whole
        self._version_bytes = [each.view(numpy.uint8).data for each in self.versions]
        flat = numpy.frombuffer(memory, numpy.uint8)
        self.bytes: list[Any] = [flat[places.bytes_of(copy)] for copy in range(count)]
        self.sections = [[[part.of(each) for part in section] for section in arrays] for each in self.bytes]

    def _new(self, places: _Places) -> Any:
        """Return new memory: that of the file, private where there is none."""
        return numpy.zeros(places.nbytes, numpy.uint8) if self._file is None else self._file.map()

    def _name(self) -> int:
        """Give new memory a number, and return it."""
        self._words[_TOKEN] = token = secrets.randbits(62)
        return token

    @property
    def path(self) -> str:
        """Where clients map it; empty in private memory."""
        return "" if self._file is None else self._file.path

    def close(self) -> None:
        """Take the way in away; whoever has mapped it keeps it."""
        if self._file is not None:
            self._file.unlink()

    def prepare(self, old: int, new: int, changed: Any) -> None:
        """Bring a copy up to date with another, but for the `changed` variables, which are going to be written."""
        words, whole = self._words, self._whole + new
        if not words[whole]:  # its last writer did not come to the end
            self.versions[new][...] = -1
        words[whole] = 0
        if changed is None:
            return
        if type(changed) is slice:  # neighbours: whether the others are alike is asked in a tenth of the time
            one, other = self._version_bytes[old], self._version_bytes[new]
            start, stop = changed.start * WORD_BYTES, changed.stop * WORD_BYTES
            if other[:start] == one[:start] and other[stop:] == one[stop:]:
                return
        before, versions = self.versions[old], self.versions[new]
        stale = versions != before
        stale[changed] = False
        versions[stale] = before[stale]
        stale &= before != _ABSENT
        for number, where in self.layout.spans(numpy.flatnonzero(stale).tolist()):
            for after, array in zip(self.sections[new][number], self.sections[old][number], strict=True):
                after[where] = array[where]

    def count_change(self, old: int, new: int, changed: Any) -> None:
        """Give the `changed` variables of a copy that was prepared a new version each."""
        before, versions = self.versions[old], self.versions[new]
        if changed is None:
            numpy.add(before, _ONE, out=versions)
        elif type(changed) is slice:
            if changed.stop == changed.start + 1:
                place, words = self._first_version + changed.start, self._words
                words[place + new * self._variables] = words[place + old * self._variables] + 1
            else:
                numpy.add(before[changed], _ONE, out=versions[changed])
        else:
            versions[changed] = before[changed] + 1

    def finish(self, new: int) -> None:
        """Take note that a copy which was made current is whole."""
        self._words[self._whole + new] = 1


class Variables(Copies):
    """Copies of all variables of one layout."""

    def __init__(self, layout: Layout, clients: int, memory_of: Callable[[_Places], Any]) -> None:
        count = clients + 2 if clients else 1
        arrays = [[section] for section in layout.sections]
        super().__init__(layout, arrays, count, clients * LINE_WORDS + 2 * count, memory_of)
        self._pin_words = slice(LINE_WORDS, LINE_WORDS * (1 + clients), LINE_WORDS)
        self._reserved = LINE_WORDS * (1 + clients)
        start = (self._reserved + count) * WORD_BYTES
        #: By copy, one bit for each optimizer: the side of its slots that belongs to the copy.
        self._sides = memoryview(self._memory)[start : start + count * WORD_BYTES].cast("Q")
        self._views: dict[int, dict[Key, Any]] = {}

    @property
    def current(self) -> int:
        """The copy that is complete and newest."""
        return self._words[_CURRENT]

    def views(self, copy: int) -> dict[Key, Any]:
        """Return the variables in a copy, as views, made once."""
        found = self._views.get(copy)
        if found is None:
            found = self._views[copy] = self.layout.views(self.bytes[copy])
        return found

    def side(self, optimizer: int) -> int:
        """Return which side of an optimizer's slots belongs to the current copy."""
        return self._sides[self._words[_CURRENT]] >> optimizer & 1

    def stamp(self) -> tuple[int, int]:
        """Return what `is_as` compares: the current copy, and how many changes there were."""
        return self._words[_CURRENT], self._words[_CHANGES]

    def is_as(self, stamp: tuple[int, int]) -> bool:
        """Whether nothing was changed since a stamp: what was read with neither pin nor lock is whole then."""
        fence()
        return self.stamp() == stamp

    def begin(self, changed: Any = None) -> int:
        """Return a copy to be written, up to date but for what changes; -1 if the server is to find one."""
        if self.count == 1:
            return 0
        copy = self._free()
        if copy < 0:
            copy = self._one_more()
        if copy >= 0:
            self.prepare(self._words[_CURRENT], copy, changed)
        return copy

    def _free(self) -> int:
        """Return a copy that has memory and that nobody reads, -1 if there is none."""
        words = self._words
        full_fence()
        current = words[_CURRENT]
        pinned = words[self._pin_words].tolist()
        for copy in range(self.count):
            if copy != current and copy + 1 not in pinned and words[self._reserved + copy]:
                return copy
        return -1

    def _one_more(self) -> int:
        """Have memory for another copy, and return it; -1 if that is another's to do."""
        return -1

    def commit(self, copy: int, changed: Any = None, flipped: int = 0) -> None:
        """Make the copy that `begin` returned the current one."""
        words = self._words
        current = words[_CURRENT]
        self.count_change(current, copy, changed)
        self._sides[copy] = self._sides[current] ^ flipped
        words[_CHANGES] += 1
        if needs_fence:
            fence()
        words[_CURRENT] = copy
        if needs_fence:
            fence()
        words[self._whole + copy] = 1


class Buffers(Variables):
    """Copies of all variables of one layout: the server's side, which makes them."""

    def __init__(self, layout: Layout, clients: int) -> None:
        self._admitted: dict[int, bool] = {}

        def memory_of(places: _Places) -> Any:
            if clients:
                self._file = SharedFile(places.nbytes, reserved=places.bytes_of(1).stop)
            return self._new(places)

        super().__init__(layout, clients, memory_of)
        self.token = self._name()
        self.finish(0)
        for copy in range(min(2, self.count)):
            self._words[self._reserved + copy] = 1

    def admit(self, client: int) -> bool:
        """Have memory for the copy that one more client may pin; return whether there is, or was when it was asked."""
        if client not in self._admitted:
            self._admitted[client] = self._reserve_one()
        return self._admitted[client]

    def forget(self, client: int) -> None:
        """Take back what a client has pinned that is gone."""
        if self.count > 1:
            self._words[LINE_WORDS * (1 + client)] = 0

    def _reserve_one(self) -> bool:
        for copy in range(self.count):
            if not self._words[self._reserved + copy]:
                where = self._places.bytes_of(copy)
                assert self._file is not None
                try:
                    self._file.reserve(where.start, where.stop - where.start)
                except OSError:
                    return False
                self._words[self._reserved + copy] = 1
                return True
        return True

    def _one_more(self) -> int:
        self._reserve_one()
        copy = self._free()
        if copy < 0:
            raise NoCopy
        return copy


class Reader(Variables):
    """Copies of all variables of one layout: a client's side, which pins what it reads."""

    def __init__(self, layout: Layout, path: str, token: int, clients: int, client: int) -> None:
        super().__init__(layout, clients, mapped(path, token))
        self._pin = LINE_WORDS * (1 + client)
        self._shown: dict[int, dict[Key, Any]] = {}
        #: By copy, what the views of it that were shown, and theirs, belong to.
        self._bases: dict[int, list[weakref.ref[Any]]] = {}

    def pin(self) -> int:
        """Pin the current copy, instead of the one pinned before, and return it."""
        words, pin = self._words, self._pin
        while True:
            copy = words[_CURRENT]
            if words[pin] == copy + 1:  # it could not be written meanwhile
                return copy
            words[pin] = copy + 1
            full_fence()
            if words[_CURRENT] == copy:
                fence()
                return copy

    def unpin(self) -> None:
        """Give the pinned copy back."""
        self._words[self._pin] = 0

    def let_go(self) -> None:
        """Give the pinned copy back if nobody holds a view of it."""
        copy = self._words[self._pin] - 1
        self._shown.pop(copy, None)
        if all(base() is None for base in self._bases.get(copy, ())):
            self.unpin()

    def shown(self, copy: int) -> dict[Key, Any]:
        """Return the variables in a pinned copy, as read-only views, made once."""
        views = self._shown.get(copy)
        if views is None:
            where = self._places.bytes_of(copy)
            memory = numpy.frombuffer(self._memory, numpy.uint8, where.stop - where.start, where.start)
            memory.flags.writeable = False
            alive = [base for base in self._bases.get(copy, ()) if base() is not None]
            self._bases[copy] = [*alive, weakref.ref(memory)]
            views = self._shown[copy] = self.layout.views(memory)
        return views


class SlotCopies(Copies):
    """The slots of one optimizer for the variables of one layout: two sides, or one that is written in place."""

    def __init__(self, layout: Layout, names: Sequence[str], sides: int, memory_of: Callable[[_Places], Any]) -> None:
        super().__init__(layout, _slot_sections(layout, len(names)), sides, 0, memory_of)
        self.names = tuple(names)

    def of(self, key: Key, side: int) -> dict[str, Any]:
        """Return the slots of a variable by name, flat: views."""
        index = self.layout.index[key]
        first = self.layout.first[index]
        where = slice(first, first + self.layout.specs[index].size)
        whole = self.sections[side][self.layout.section_of[index]]
        return {name: array[where] for name, array in zip(self.names, whole, strict=True)}


class OwnSlotCopies(SlotCopies):
    """Slots: the server's side, which makes them.  A variable gets its slots when it is first updated.

    In private memory where there is no room to share: who has not mapped them pushes by messages.
    """

    def __init__(
        self, layout: Layout, names: Sequence[str], sides: int, initial: Mapping[str, float], shares: bool
    ) -> None:
        def memory_of(places: _Places) -> Any:
            if shares:
                with suppress(OSError):
                    self._file = SharedFile(places.nbytes, reserved=places.first)
            return self._new(places)

        super().__init__(layout, names, sides, memory_of)
        self._initial = initial
        self._present: set[int] = set()
        self.token = self._name()
        for side in range(sides):
            self.versions[side][...] = _ABSENT
            self.finish(side)

    @property
    def keys(self) -> list[Key]:
        """The variables that have slots, in the order of the layout."""
        return [self.layout.specs[place].key for place in sorted(self._present)]

    def admit(self, keys: Iterable[Key]) -> bool:
        """Give variables slots that have none; return False, with nothing changed, if there is no room to share."""
        places = sorted(self.layout.index[key] for key in keys)
        new = [place for place in places if place not in self._present]
        spans = list(self.layout.spans(new))
        try:
            for number, where in spans:
                self._reserve(number, where)
        except OSError:
            return False
        for side in self.sections:
            for number, where in spans:
                for name, array in zip(self.names, side[number], strict=True):
                    array[where] = self._initial.get(name, 0)
        for versions in self.versions:
            versions[new] = 0
        self._present.update(new)
        return True

    def _reserve(self, number: int, where: slice) -> None:
        if self._file is None:
            return
        for side in range(self.count):
            start = self._places.bytes_of(side).start
            for part in self._arrays[number]:
                first, stop = (start + part.start + each * part.dtype.itemsize for each in (where.start, where.stop))
                self._file.reserve(first, stop - first)

    def set(self, key: Key, side: int, values: Mapping[str, Any]) -> None:
        """Set the slots of a variable on all sides, which nobody else writes: to initial ones where no value is."""
        for name, array in self.of(key, side).items():
            array[...] = numpy.reshape(values[name], -1) if values else self._initial.get(name, 0)
        for other in {*range(self.count)} - {side}:
            for name, array in self.of(key, other).items():
                array[...] = self.of(key, side)[name]


def _slot_sections(layout: Layout, count: int) -> list[list[Section]]:
    """Return, by section of a layout, where so many slots of it lie."""
    by_section: list[list[Section]] = []
    end = 0
    for section in layout.sections:
        by_section.append([])
        for _ in range(count):
            by_section[-1].append(Section(compute_dtype(section.dtype), end, section.size))
            end = aligned(by_section[-1][-1].stop)
    return by_section


def mapped(path: str, token: int) -> Callable[[_Places], Any]:
    """Return what maps memory that a server has made; FileNotFoundError if the path leads to another file by now."""

    def memory_of(places: _Places) -> Any:
        memory = map_file(path)
        if len(memory) < places.nbytes or memoryview(memory)[:64].cast("q")[_TOKEN] != token:
            raise FileNotFoundError(f"{path} is not the memory of this layout any more")
        return memory

    return memory_of


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
