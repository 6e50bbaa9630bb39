"""`Reader`: the copies of a server's variables, as a client on its node pins and reads them."""

from __future__ import annotations

import weakref
from typing import Any

import numpy

from mpidist.parameter_server.copies import _CURRENT, _LINE_WORDS, Variables, mapped, places_of_variables
from mpidist.parameter_server.layout import Key, Layout
from mpidist.runtime.board import fence, full_fence


class Reader(Variables):
    """Copies of all variables of one layout: a client's side, which pins what it reads."""

    def __init__(self, layout: Layout, path: str, token: int, clients: int, client: int) -> None:
        memory = mapped(path, places_of_variables(layout, clients).nbytes, token)
        super().__init__(layout, clients, memory)
        self._memory = memory
        self._pin = _LINE_WORDS * (1 + client)
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
        found = self._shown.get(copy)
        if found is None:
            where = self._places.bytes_of(copy)
            memory = numpy.frombuffer(self._memory, numpy.uint8, where.stop - where.start, where.start)
            memory.flags.writeable = False
            alive = [base for base in self._bases.get(copy, ()) if base() is not None]
            self._bases[copy] = [*alive, weakref.ref(memory)]
            found = self._shown[copy] = self.layout.views(memory)
        return found
