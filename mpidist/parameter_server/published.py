"""Memory of a server that its clients on the same node read where it lies, without asking.

The server owns both: a `Ledger`, words that say what it has done for each client; and, for each layout of its
variables, `Buffers`, several copies of all of them.  One copy is *current*.  A client *pins* the current one, reads
views of it, and gives it back at its next pull.  The server writes only copies that are neither current nor pinned,
and makes one current when it is complete: what a client sees never changes.

A pin is a store that must be visible before the current copy is looked at again, and the server stores the current
copy before it looks at the pins: both have a full fence there.
"""

from __future__ import annotations

import mmap
import secrets
from typing import Any

import numpy

from mpidist.parameter_server.layout import Key, Layout
from mpidist.runtime.board import fence, full_fence
from mpidist.runtime.shared_memory import SharedFile, map_file

#: Words between those of different writers: a cache line.
_LINE_WORDS = 8
_WORD_BYTES = 8

#: Words of `Buffers`: the current copy, and a number by which the memory is known.
_CURRENT, _TOKEN = 0, 1

#: As an array: that is added at half the cost of a number.
_ONE = numpy.array(1)

#: How many optimizers of a server have their steps in the ledger.
LEDGER_OPTIMIZERS = 64


class Ledger:
    """Words that a server writes and clients of its node read.

    Parameters
    ----------
    memory : writable buffer of `Ledger.nbytes` (clients) bytes
    clients : int
    """

    LAYOUT = 0
    _STEPS = _LINE_WORDS

    def __init__(self, memory: Any, clients: int) -> None:
        self.words = memoryview(memory)[: self.nbytes(clients)].cast("q")

    @staticmethod
    def nbytes(clients: int) -> int:
        """Return the size in bytes of a ledger for so many clients."""
        return _WORD_BYTES * (_LINE_WORDS + LEDGER_OPTIMIZERS + clients * _LINE_WORDS)

    @staticmethod
    def applied_word(client: int) -> int:
        """Return the index in `words` of how many pushes of a client are done with; what it may push follows it."""
        return _LINE_WORDS + LEDGER_OPTIMIZERS + client * _LINE_WORDS

    @classmethod
    def steps_word(cls, optimizer: int) -> int:
        """Return the index in `words` of the steps that an optimizer has made."""
        return cls._STEPS + optimizer


class _Places:
    """Where things lie in the memory of `Buffers`; word indices, and offsets in bytes."""

    def __init__(self, layout: Layout, clients: int, count: int) -> None:
        variables = len(layout.specs)
        self.pins = [_LINE_WORDS * (1 + client) for client in range(clients)]
        self.versions = _LINE_WORDS * (1 + clients)
        self.words = self.versions + count * variables
        self.stride = _pages(layout.nbytes)
        self.first = _pages(self.words * _WORD_BYTES)
        self.nbytes = self.first + count * self.stride

    def bytes_of(self, buffer: int) -> slice:
        start = self.first + buffer * self.stride
        return slice(start, start + self.stride)


class Buffers:
    """Copies of all variables of one layout: the server's side.

    Parameters
    ----------
    layout : Layout
    clients : int
        How many may pin a copy.  With none there is one copy, in private memory, which is written in place.

    Attributes
    ----------
    current : int
        The copy that is complete and newest.
    versions : array of int64, shape (variables,)
        How often each variable has been written, as it stands in the current copy.
    path : str
        Where clients map it; empty in private memory.
    token : int
        What they find there if it is still this.
    """

    def __init__(self, layout: Layout, clients: int) -> None:
        self.layout = layout
        self.count = clients + 2 if clients else 1
        self._places = places = _Places(layout, clients, self.count)
        self._file: SharedFile | None = None
        self.path = ""
        if clients:
            self._file = SharedFile(places.nbytes, reserved=places.first)
            self.path = self._file.path
        memory: Any = self._file.map() if self._file is not None else numpy.zeros(places.nbytes, numpy.uint8)
        self._memory = numpy.frombuffer(memory, numpy.uint8)
        self._words = memoryview(memory)[: places.words * _WORD_BYTES].cast("q")
        self._pin_words = slice(_LINE_WORDS, _LINE_WORDS * (1 + clients), _LINE_WORDS)
        self.token = self._words[_TOKEN] = secrets.randbits(62)
        variables = len(layout.specs)
        table = numpy.frombuffer(memory, numpy.int64, self.count * variables, places.versions * _WORD_BYTES)
        self._versions_of = list(table.reshape(self.count, variables))
        table.reshape(-1)[variables:] = -1  # nothing is in the other copies yet
        self.versions = self._versions_of[0]
        self._reserved: set[int] = set()
        self.bytes: list[Any] = [self._memory[places.bytes_of(buffer)] for buffer in range(self.count)]
        self.sections = [[section.of(memory) for section in layout.sections] for memory in self.bytes]
        self._views: dict[int, dict[Key, Any]] = {}
        #: Copies that are not current, the one written last first.
        self._others = list(range(1, self.count))
        self.current = 0
        self._reserve(0)

    def views(self, buffer: int) -> dict[Key, Any]:
        """Return the variables in a copy, as views, made once."""
        found = self._views.get(buffer)
        if found is None:
            found = self._views[buffer] = self.layout.views(self.bytes[buffer])
        return found

    def begin(self, changed: Any = None) -> int:
        """Return a copy to be written, up to date but for what is going to be written.

        Parameters
        ----------
        changed : slice, index array of int, or None
            The variables that will be written in full; None for all.

        Raises
        ------
        OSError
            There is no memory for another copy.
        """
        if self.count == 1:
            return 0
        full_fence()
        pinned = self._words[self._pin_words].tolist()
        others = self._others
        for place, buffer in enumerate(others):  # noqa: B007 - there is always one: copies are two more than pins
            if buffer + 1 not in pinned:
                break
        self._reserve(buffer)
        if changed is not None:
            self._catch_up(buffer, changed)
        if place:
            others.insert(0, others.pop(place))
        return buffer

    def give_up(self, buffer: int) -> None:
        """Take note that the copy that `begin` returned was not written to the end: nothing in it is to be believed."""
        if self.count > 1:
            self._versions_of[buffer][...] = -1

    def commit(self, buffer: int, changed: Any = None) -> None:
        """Make the copy that `begin` returned the current one; its `changed` variables have a new version each."""
        versions = self._versions_of[buffer]
        if changed is None:
            numpy.add(self.versions, _ONE, out=versions)
        else:
            versions[...] = self.versions
            versions[changed] += 1
        self.versions = versions
        if self.count > 1:
            self._others[0] = self.current
            self.current = buffer
            fence()
            self._words[_CURRENT] = buffer

    def _catch_up(self, buffer: int, changed: Any) -> None:
        """Copy what is newer in the current copy, and will not be written anyway."""
        stale = self._versions_of[buffer] != self.versions
        stale[changed] = False
        if stale.any():
            old, new = self.bytes[self.current], self.bytes[buffer]
            for span in self.layout.spans(numpy.flatnonzero(stale).tolist()):
                new[span] = old[span]

    def _reserve(self, buffer: int) -> None:
        if self._file is None or buffer in self._reserved:
            return
        where = self._places.bytes_of(buffer)
        self._file.reserve(where.start, where.stop - where.start)
        self._reserved.add(buffer)

    def close(self) -> None:
        """Take the way in away; whoever has mapped it keeps it."""
        if self._file is not None:
            self._file.unlink()


class Reader:
    """Copies of all variables of one layout: a client's side, read only but for its pin.

    Parameters
    ----------
    layout : Layout
    path, token : str, int
        As the server gave them.
    clients, client : int
        How many may pin, and which of them this is.

    Raises
    ------
    FileNotFoundError
        The server has another layout by now.
    """

    def __init__(self, layout: Layout, path: str, token: int, clients: int, client: int) -> None:
        self.layout = layout
        memory = map_file(path)
        count, variables = clients + 2, len(layout.specs)
        self._places = places = _Places(layout, clients, count)
        # The path may lead to another file by now, which got the number of one that is gone.
        if len(memory) < places.nbytes or memoryview(memory)[:64].cast("q")[_TOKEN] != token:
            raise FileNotFoundError(f"{path} is not the memory of this layout any more")
        self._pin = places.pins[client]
        self._words = memoryview(memory)[: places.words * _WORD_BYTES].cast("q")
        table = numpy.frombuffer(memory, numpy.int64, count * variables, places.versions * _WORD_BYTES)
        self._versions_of = list(table.reshape(count, variables))
        self._memory = numpy.frombuffer(memory, numpy.uint8)
        self._memory.flags.writeable = False
        self._views: dict[int, dict[Key, Any]] = {}

    def pin(self) -> int:
        """Pin the current copy, instead of the one pinned before, and return it."""
        words, pin = self._words, self._pin
        while True:
            buffer = words[_CURRENT]
            if words[pin] == buffer + 1:  # it could not be written meanwhile
                return buffer
            words[pin] = buffer + 1
            full_fence()
            if words[_CURRENT] == buffer:
                return buffer

    def unpin(self) -> None:
        """Give the pinned copy back."""
        self._words[self._pin] = 0

    def views(self, buffer: int) -> dict[Key, Any]:
        """Return the variables in a copy, as read-only views, made once."""
        found = self._views.get(buffer)
        if found is None:
            found = self._views[buffer] = self.layout.views(self._memory[self._places.bytes_of(buffer)])
        return found

    def versions(self, buffer: int) -> Any:
        """Return the versions of the variables in a pinned copy, in the layout's order."""
        return self._versions_of[buffer]


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
