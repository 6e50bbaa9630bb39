"""Memory of a server that its clients on the same node read where it lies, without asking.

The server owns both: a `Ledger`, words that say what it has done for each client; and, for each layout of its
variables, `Buffers`, several copies of all of them.  One copy is *current*.  A client *pins* the current one, reads
views of it, and gives it back at its next pull.  Who writes - the server, or a client that has the turn - writes only
copies that are neither current nor pinned, and makes one current when it is complete: what a client sees never changes.
A copy that was begun and not completed, since its writer died, is never looked at: the next writer finds it marked.

A pin is a store that must be visible before the current copy is looked at again, and a writer stores the current
copy before it looks at the pins: both have a full fence there.
"""

from __future__ import annotations

import mmap
import secrets
import weakref
from typing import Any

import numpy

from mpidist.parameter_server.layout import Key, Layout
from mpidist.runtime.board import fence, full_fence
from mpidist.runtime.shared_memory import SharedFile, map_file

#: Words between those of different writers: a cache line.
_LINE_WORDS = 8
_WORD_BYTES = 8

#: Words of `Copies`: the current one, a number by which the memory is known, and 1 + the copy that is being written.
#: Then: how many changes there were; what the last ones changed, which all changed the same; and the first of these.
_CURRENT, _TOKEN, _WRITING, _CHANGES, _ALIKE, _ALIKE_SINCE = range(6)

#: As an array: that is added at half the cost of a number.
_ONE = numpy.array(1)

#: How many optimizers of a server have their steps in the ledger.
LEDGER_OPTIMIZERS = 64


class NoCopy(Exception):
    """Raised by who would write, with nothing changed, until a client has given back what it has pinned."""


class Ledger:
    """Words that say how far a server is, and who may change its variables.

    Its clients on the same node read them, and write those of what they have changed themselves, see `Direct`.

    Parameters
    ----------
    memory : writable buffer of `Ledger.nbytes` (clients) bytes
    clients : int
    """

    #: Number of the layout; how often an optimizer got another rule or schedule; whether anything is torn; whether the
    #: server waits for a copy that clients have pinned.
    LAYOUT, RULES, TORN, SHORT = 0, 1, 2, 3
    #: 1 + the rank that has the turn; pushes that are done with; how often a client has set a learning rate itself.
    HELD, PUSHES, RATES = _LINE_WORDS, _LINE_WORDS + 1, _LINE_WORDS + 2
    _STEPS = 2 * _LINE_WORDS

    _RATES = _STEPS + LEDGER_OPTIMIZERS
    _CLIENTS = _RATES + LEDGER_OPTIMIZERS

    def __init__(self, memory: Any, clients: int) -> None:
        view = memoryview(memory)[: self.nbytes(clients)]
        self.words = view.cast("q")
        #: The same as floats.
        self.reals = view.cast("d")

    @classmethod
    def nbytes(cls, clients: int) -> int:
        """Return the size in bytes of a ledger for so many clients."""
        return _WORD_BYTES * cls.applied_word(clients)

    @classmethod
    def applied_word(cls, client: int) -> int:
        """Return the index in `words` of how many pushes of a client are done with; what it may push follows it."""
        return cls._CLIENTS + client * _LINE_WORDS

    @classmethod
    def steps_word(cls, optimizer: int) -> int:
        """Return the index in `words` of the steps that an optimizer has made."""
        return cls._STEPS + optimizer

    @classmethod
    def rate_real(cls, optimizer: int) -> int:
        """Return the index in `reals` of an optimizer's learning rate, NaN where it is a function of the steps."""
        return cls._RATES + optimizer


class _Places:
    """Where things lie in the memory of `Copies`; word indices, and offsets in bytes."""

    def __init__(self, layout: Layout, clients: int) -> None:
        variables = len(layout.specs)
        #: Two more than can be pinned; with no clients one, which is written in place.
        self.count = clients + 2 if clients else 1
        self.pins = [_LINE_WORDS * (1 + client) for client in range(clients)]
        self.reserved = _LINE_WORDS * (1 + clients)
        #: By copy, the number of the change that it was written by.
        self.changes = self.reserved + self.count
        self.versions = self.changes + self.count
        self.words = self.versions + self.count * variables
        self.stride = _pages(layout.nbytes)
        self.first = _pages(self.words * _WORD_BYTES)
        self.nbytes = self.first + self.count * self.stride

    def bytes_of(self, buffer: int) -> slice:
        start = self.first + buffer * self.stride
        return slice(start, start + self.stride)


class Copies:
    """Copies of all variables of one layout, in memory that a server and its clients have mapped.

    Who writes has the turn: the server, or a client that holds its `NodeLock`.

    Parameters
    ----------
    layout : Layout
    clients : int
        How many may pin a copy.
    memory : writable buffer

    Attributes
    ----------
    layout : Layout
    count : int
        Of copies.
    bytes : list of array of uint8
        By copy, its memory.
    sections : list of list of array
        By copy, the sections of the layout.
    """

    def __init__(self, layout: Layout, clients: int, memory: Any) -> None:
        self.layout = layout
        self._places = places = _Places(layout, clients)
        self.count = places.count
        self._words = memoryview(memory)[: places.words * _WORD_BYTES].cast("q")
        self._pin_words = slice(_LINE_WORDS, _LINE_WORDS * (1 + clients), _LINE_WORDS)
        variables = len(layout.specs)
        table = numpy.frombuffer(memory, numpy.int64, self.count * variables, places.versions * _WORD_BYTES)
        self._versions_of = list(table.reshape(self.count, variables))
        flat = numpy.frombuffer(memory, numpy.uint8)
        self.bytes: list[Any] = [flat[places.bytes_of(buffer)] for buffer in range(self.count)]
        self.sections = [[section.of(each) for section in layout.sections] for each in self.bytes]
        self._views: dict[int, dict[Key, Any]] = {}

    @property
    def current(self) -> int:
        """The copy that is complete and newest."""
        return self._words[_CURRENT]

    @property
    def versions(self) -> Any:
        """How often each variable has been written, as it stands in the current copy: array of int64."""
        return self._versions_of[self._words[_CURRENT]]

    def versions_in(self, buffer: int) -> Any:
        """Return the versions of the variables in a copy, in the layout's order."""
        return self._versions_of[buffer]

    def views(self, buffer: int) -> dict[Key, Any]:
        """Return the variables in a copy, as views, made once."""
        found = self._views.get(buffer)
        if found is None:
            found = self._views[buffer] = self.layout.views(self.bytes[buffer])
        return found

    def stamp(self) -> tuple[int, int]:
        """Return what `is_as` compares: the current copy, and the change that it was written by."""
        current = self._words[_CURRENT]
        return current, self._words[self._places.changes + current]

    def is_as(self, stamp: tuple[int, int]) -> bool:
        """Whether the current copy is that of a stamp: what was read of it with neither pin nor turn is whole then."""
        fence()
        return self.stamp() == stamp

    def begin(self, changed: Any = None) -> int:
        """Return a copy to be written, up to date but for what is going to be written; -1 if the server is to find one.

        Parameters
        ----------
        changed : slice, index array of int, or None
            The variables that will be written in full; None for all.

        Raises
        ------
        NoCopy
            The server finds none: as many are pinned as there is memory for.
        """
        words = self._words
        if self.count == 1:
            return 0
        if words[_WRITING]:
            self.give_up(words[_WRITING] - 1)
        buffer = self._free()
        if buffer < 0:
            buffer = self._one_more()
            if buffer < 0:
                return -1
        words[_WRITING] = buffer + 1
        if changed is not None and not self._differs_in(buffer, changed):
            self._catch_up(buffer, changed)
        return buffer

    def _free(self) -> int:
        """Return a copy that has memory and that nobody reads, -1 if there is none."""
        words = self._words
        full_fence()
        current = words[_CURRENT]
        pinned = words[self._pin_words].tolist()
        reserved = self._places.reserved
        for buffer in range(self.count):
            if buffer != current and buffer + 1 not in pinned and words[reserved + buffer]:
                return buffer
        return -1

    def _one_more(self) -> int:
        """Have memory for another copy, and return it; -1 if that is another's to do."""
        return -1

    def _differs_in(self, buffer: int, changed: Any) -> bool:
        """Whether a copy is known to differ from the current one in nothing but these variables."""
        words = self._words
        return (
            words[_ALIKE] == _name_of(changed) > 0 and words[self._places.changes + buffer] >= words[_ALIKE_SINCE] - 1
        )

    def give_up(self, buffer: int) -> None:
        """Take note that the copy that `begin` returned was not written to the end: nothing in it is to be believed."""
        words = self._words
        if self.count > 1:
            if buffer != words[_CURRENT]:
                self._versions_of[buffer][...] = -1
                words[self._places.changes + buffer] = -1
            words[_WRITING] = 0

    def commit(self, buffer: int, changed: Any = None) -> None:
        """Make the copy that `begin` returned the current one; its `changed` variables have a new version each."""
        words, versions = self._words, self._versions_of[buffer]
        before = self._versions_of[words[_CURRENT]]
        if changed is None:
            numpy.add(before, _ONE, out=versions)
        elif self._differs_in(buffer, changed):
            numpy.add(before[changed], _ONE, out=versions[changed])
        else:
            versions[...] = before
            versions[changed] += 1
        words[_CHANGES] = number = words[_CHANGES] + 1
        if words[_ALIKE] != (name := _name_of(changed)):
            words[_ALIKE_SINCE] = number  # first: who dies here leaves too few copies that are known to differ so
            fence()
            words[_ALIKE] = name
        words[self._places.changes + buffer] = number
        fence()
        words[_CURRENT] = buffer
        fence()
        words[_WRITING] = 0

    def _catch_up(self, buffer: int, changed: Any) -> None:
        """Copy what is newer in the current copy, and will not be written anyway."""
        stale = self._versions_of[buffer] != self.versions
        stale[changed] = False
        if stale.any():
            old, new = self.bytes[self.current], self.bytes[buffer]
            for span in self.layout.spans(numpy.flatnonzero(stale).tolist()):
                new[span] = old[span]


class Buffers(Copies):
    """Copies of all variables of one layout: the server's side, which makes them.

    Parameters
    ----------
    layout : Layout
    clients : int
        How many may pin a copy.  With none there is one copy, in private memory, which is written in place.

    Attributes
    ----------
    path : str
        Where clients map it; empty in private memory.
    token : int
        What they find there if it is still this.

    Raises
    ------
    OSError
        There is no memory for two copies.
    """

    def __init__(self, layout: Layout, clients: int) -> None:
        places = _Places(layout, clients)
        self._file: SharedFile | None = None
        self._admitted: dict[int, bool] = {}
        self.path = ""
        if clients:
            self._file = SharedFile(places.nbytes, reserved=places.bytes_of(1).stop)
            self.path = self._file.path
        memory: Any = self._file.map() if self._file is not None else numpy.zeros(places.nbytes, numpy.uint8)
        super().__init__(layout, clients, memory)
        self.token = self._words[_TOKEN] = secrets.randbits(62)
        for buffer in range(1, self.count):  # nothing is in the other copies yet
            self.give_up(buffer)
        for buffer in range(min(2, self.count)):
            self._words[places.reserved + buffer] = 1

    def admit(self, client: int) -> bool:
        """Have memory for the copy that one more client may pin; return whether there is, or was when it was asked.

        With two more copies than pins, there is always one to be written.
        """
        if client not in self._admitted:
            self._admitted[client] = self._reserve_one()
        return self._admitted[client]

    def forget(self, client: int) -> None:
        """Take back what a client has pinned that is gone."""
        if self.count > 1:
            self._words[self._places.pins[client]] = 0

    def _reserve_one(self) -> bool:
        words, reserved = self._words, self._places.reserved
        for buffer in range(self.count):
            if not words[reserved + buffer]:
                where = self._places.bytes_of(buffer)
                assert self._file is not None
                try:
                    self._file.reserve(where.start, where.stop - where.start)
                except OSError:
                    return False
                words[reserved + buffer] = 1
                return True
        return True

    def _one_more(self) -> int:
        self._reserve_one()
        buffer = self._free()
        if buffer < 0:
            raise NoCopy
        return buffer

    def close(self) -> None:
        """Take the way in away; whoever has mapped it keeps it."""
        if self._file is not None:
            self._file.unlink()


class Reader(Copies):
    """Copies of all variables of one layout: a client's side, which pins what it reads.

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
        memory = map_file(path)
        # The path may lead to another file by now, which got the number of one that is gone.
        if len(memory) < _Places(layout, clients).nbytes or memoryview(memory)[:64].cast("q")[_TOKEN] != token:
            raise FileNotFoundError(f"{path} is not the memory of this layout any more")
        super().__init__(layout, clients, memory)
        self._memory = memory
        self._pin = self._places.pins[client]
        self._shown: dict[int, dict[Key, Any]] = {}
        #: By copy, what the views of it that were shown, and theirs, belong to.
        self._bases: dict[int, list[weakref.ref[Any]]] = {}

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
                fence()
                return buffer

    def unpin(self) -> None:
        """Give the pinned copy back."""
        self._words[self._pin] = 0

    def let_go(self) -> None:
        """Give the pinned copy back if nobody holds a view of it."""
        buffer = self._words[self._pin] - 1
        self._shown.pop(buffer, None)
        if all(base() is None for base in self._bases.get(buffer, ())):
            self.unpin()

    def shown(self, buffer: int) -> dict[Key, Any]:
        """Return the variables in a pinned copy, as read-only views, made once."""
        found = self._shown.get(buffer)
        if found is None:
            where = self._places.bytes_of(buffer)
            memory = numpy.frombuffer(self._memory, numpy.uint8, where.stop - where.start, where.start)
            memory.flags.writeable = False
            alive = [base for base in self._bases.get(buffer, ()) if base() is not None]
            self._bases[buffer] = [*alive, weakref.ref(memory)]
            found = self._shown[buffer] = self.layout.views(memory)
        return found


def _name_of(changed: Any) -> int:
    """Return a number for neighbours in a layout, 0 for anything else."""
    return changed.start << 32 | changed.stop if type(changed) is slice else 0


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
