"""One server as a client sees it: how it is asked, what has been pushed to it, and the snapshot that was read last.

`NearServer` is on the same node: its ledger and its copies of the variables are read where they lie, and a pull is no
message at all.  `FarServer` answers a pull with all its variables in one message.

A snapshot is the server's memory (pinned) or the client's own (a copy of the message); either way it stays as it is
until the next pull.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mpidist.errors import ServerError, TornVariableError, TransportError
from mpidist.parameter_server import protocol
from mpidist.parameter_server.direct import Direct
from mpidist.parameter_server.layout import Key, Layout, VariableSpec
from mpidist.parameter_server.protocol import Kind
from mpidist.parameter_server.published import LEDGER_OPTIMIZERS, Ledger, Reader
from mpidist.parameter_server.turn import Turn
from mpidist.runtime.board import fence
from mpidist.runtime.shared_memory import map_file
from mpidist.transports.connections.base import Area, Connection, Message
from mpidist.transports.connections.waiting import Patience

if TYPE_CHECKING:
    from mpidist.parameter_server.push_part import Part

#: Requests with more bytes have memory of their own, for as long as they last.
_KEPT_BYTES = 1 << 20

#: Errors of a server that are raised at the client as what they are.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (IndexError, KeyError, MemoryError, OSError, TypeError, ValueError, TornVariableError)
}


def error_kind(name: str) -> type[Exception]:
    """Return what is raised at a client for an error of a server, or of another rank, of this type."""
    return _KINDS.get(name, ServerError)


def open_server(line: Connection, number: int, client: int) -> ServerEnd:
    """Return a server as a client sees it, after a first word with it.  Local."""
    end = ServerEnd(line, number, client)
    answer, _ = end.ask("hello")
    kind: type[ServerEnd] = FarServer
    if answer["ledger"]:
        try:
            end.ledger = map_file(answer["ledger"])
            kind = NearServer
        except OSError:  # in another container: by messages then
            pass
    return kind.opened(end, answer)


class ServerEnd:
    """What is common to servers near and far.

    Parameters
    ----------
    line : Connection
    number, client : int
        Of the server, and of this client.

    Attributes
    ----------
    pushed : int
        Pushes sent.
    has_clock, gathers : bool
        See `Consistency`.
    steps : sequence of int
        By optimizer: its steps as seen when this client's present step began.
    forgotten : list of int
        Plans that are not used any more, of which the server is told with the next new one.
    views : dict of int to list of (array, list of array)
        By plan: the sections of the few arrays that its gradients are packed in.
    """

    ledger: Any = None

    def __init__(self, line: Connection, number: int, client: int) -> None:
        self.line = line
        self.number = number
        self.client = client
        control = line.presence.control
        self.name = f"ps {number} ({control.name(line.presence.name_of(line.peer))})"
        self._who = f"rank {control.rank} waits for {self.name}"
        self._patience = Patience([line], f"{self._who} to apply what it pushed")
        self.pushed = 0
        self.clients = 0
        self.has_clock = self.gathers = False
        self.steps: Sequence[int] = ()
        self.forgotten: list[int] = []
        self.views: dict[int, list[tuple[Any, list[Any]]]] = {}
        self._areas: list[Area | None] = [None, None]
        self._failures: list[dict[str, Any]] = []

    @classmethod
    def opened(cls, before: ServerEnd, answer: dict[str, Any]) -> ServerEnd:
        """Return the end of a server that has said hello."""
        end = cls(before.line, before.number, before.client)
        end.ledger = before.ledger
        end.clients, end.has_clock, end.gathers = answer["clients"], answer["has_clock"], answer["gathers"]
        end._open(answer)
        return end

    def _open(self, answer: dict[str, Any]) -> None:
        """Prepare what the kind of end needs."""

    # -- messages -----------------------------------------------------------------------------------------------------

    def area(self, nbytes: int) -> Area:
        """Return memory for a message to the server, not busy: the first of two, if that is free, since it is in cache.

        The second is for who pushes again before it reads.
        """
        areas = self._areas
        number = 0 if areas[0] is None or not areas[0].busy else 1
        area = areas[number]
        if area is None or area.array.size < nbytes:
            if area is not None:
                area.wait_free()
                area.close()
                areas[number] = None
                self.views.clear()  # or lists that are not pushed again would keep its memory
            try:
                area = areas[number] = self.line.area(max(64, nbytes))
            except TransportError:  # there is no memory for a second one
                first = areas[0]
                if not number or first is None or first.array.size < nbytes:
                    raise
                first.wait_free()
                return first
        elif number:
            area.wait_free()
        return area

    def tell_plan(self, number: int, **content: Any) -> None:
        """Have the server know a plan, and forget others."""
        forgotten, self.forgotten = self.forgotten, []
        self.ask("plan", number=number, forgotten=forgotten, **content)

    def forget_plan(self, number: int) -> None:
        """Take note that a plan is not used any more."""
        self.forgotten.append(number)
        self.views.pop(number, None)

    def push(self, header: bytes, area: Area, nbytes: int) -> None:
        """Send a push; does not wait for it to be applied."""
        self.pushed += 1
        self.line.send(header, area, nbytes)

    def apply(self, optimizer: int, part: Part, gradients: Sequence[Any], rate: float, scale: float) -> bool:
        """Do what a push would have the server do; return False, with nothing done, where a push is needed."""
        return False

    def settle(self, optimizer: int, part: Part) -> None:
        """Raise what would keep `apply` from doing it, as far as that is known; nothing is done yet."""

    def apply_unchecked(self, optimizer: int, part: Part, gradients: Sequence[Any], scale: float) -> bool:
        """Do as `apply` with gradients of which nobody has looked whether they fit, where ``part.rows`` can tell."""
        return False

    def set_rate(self, optimizer: int, value: float) -> None:
        """Set the learning rate of an optimizer from the next push on."""
        self.ask("rate", number=optimizer, value=value)

    def note(self, verb: str) -> None:
        """Tell the server something that needs no answer."""
        self.line.send(protocol.pack(Kind.NOTE, {"verb": verb}))

    def ask(self, verb: str, array: Any = None, **fields: Any) -> tuple[dict[str, Any], Any]:
        """Send a request and return its answer: content, and a new array or None.

        Raises
        ------
        ServerError, ValueError, TypeError, KeyError, IndexError
            What went wrong at the server, here or in a push before.
        """
        return self._answer(self._answered(verb, array, **fields))

    def _answered(self, verb: str, array: Any = None, **fields: Any) -> Message:
        """Send a request and return the message that answers it."""
        request, large = {"verb": verb, **fields}, None
        if array is None:
            self.line.send(protocol.pack(Kind.REQUEST, request))
        else:
            if array.nbytes > _KEPT_BYTES:  # such as initial values: nothing is to be left of them
                large = self.line.area(array.nbytes)
            area = large or self.area(array.nbytes)
            if array.nbytes:
                area.array[: array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            request["array"] = protocol.described(array)
            self.line.send(protocol.pack(Kind.REQUEST, request), area, array.nbytes)
        while True:
            message = self.line.wait(f"{self._who} to answer {verb!r}")
            if message.header[0] != Kind.PUSH_FAILURE:
                break
            self._failures.append(protocol.unpack(message.header))
        if large is not None:
            large.wait_free()
            large.close()
        return message

    def _answer(self, message: Message) -> tuple[dict[str, Any], Any]:
        content = protocol.unpack(message.header)
        if message.header[0] == Kind.FAILURE:
            self._failures.append(content)
        try:
            self._raise_failure()
            array = content.get("array")
            return content, None if array is None else protocol.as_described(message.payload, array).copy()
        finally:  # or the server would wait for its memory, for ever
            message.release()

    def check(self) -> None:
        """Raise what went wrong with pushes of this client, if word of it has come."""
        message = self.line.receive()
        if message is not None:
            self._failures.append(protocol.unpack(message.header))
        if self._failures:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if not self._failures:
            return
        first = self._failures[0]
        self._failures = []
        kind = error_kind(first["kind"])
        named = "" if kind is not ServerError or first["kind"] == "RuntimeError" else f"{first['kind']}: "
        error: Any = kind(f"{self.name}, {first['what']}: {named}{first['text']}")
        if "push" in first:
            error.failed_push = self.number, first["push"]
        try:
            raise error
        finally:
            del error  # or it would hold itself, and what its frames hold, by its traceback

    # -- what near and far servers do each in their way ---------------------------------------------------------------

    def pull(self) -> dict[Key, Any]:
        """Return the server's variables as they are now, this client's pushes included: read-only views.

        Tables are not among them.
        """
        raise NotImplementedError

    def give_back(self) -> None:
        """Let the memory of the last snapshot be written: another one is about to be pulled."""

    def look_for(self, key: Key) -> bool:
        """Make the server put new variables among the others; return whether `key` is there then."""
        raise NotImplementedError

    def version(self, key: Key) -> int:
        """Return the version of a variable in the snapshot that was pulled last."""
        raise NotImplementedError

    def begin_step(self, ask: bool = False) -> None:
        """Wait until this client may start a step; with `ask`, by the server's own word."""
        answer, _ = self.ask("step", pushed=self.pushed)
        self.steps = answer["steps"]

    def steps_of(self, optimizer: int) -> int:
        """Return an optimizer's steps as seen when this client's present step began, 0 if it was not there yet."""
        return max(0, self.steps[optimizer]) if optimizer < len(self.steps) else 0

    def flush(self) -> None:
        """Wait until the server is done with all pushes of this client."""
        self.ask("flush")

    def iterations(self, optimizer: int) -> int:
        """Return the steps of an optimizer, this client's pushes included; KeyError if the server has none such."""
        return self.ask("rate", number=optimizer, value=None)[0]["iterations"]

    def forget(self) -> None:
        """Give back what is of no more use when the server is gone."""

    def leave(self) -> None:
        """Give areas and snapshot back, and tell the server that nothing more comes."""
        for area in self._areas:
            if area is not None and not area.busy:
                area.close()
        self._areas = [None, None]
        self.note("leave")


class NearServer(ServerEnd):
    """A server on this node."""

    _reader: Reader | None = None
    _pinned: Reader | None = None  # what the present snapshot is of; there may be a newer layout
    _layout_number = -1
    _buffer = -1
    _direct: Direct | None = None

    def _open(self, answer: dict[str, Any]) -> None:
        ledger = Ledger(self.ledger, self.clients)
        self._words = ledger.words
        self._applied = Ledger.applied_word(self.client)
        if answer["takes_turns"]:
            patience = Patience([self.line], f"{self._who} to let it change variables there")
            with suppress(OSError):  # by messages then
                turn = Turn(answer["ledger"], self._words, patience, self.line.presence.control)
                self._direct = Direct(self, ledger, turn)
        self.line.presence.while_waiting.append(self._let_go)

    def _let_go(self) -> None:
        """Give back what this client has pinned, if the server needs it and nobody looks at it."""
        if self._words[Ledger.SHORT] and self._pinned is not None:
            self._pinned.let_go()

    def pull(self) -> dict[Key, Any]:
        words = self._words
        if words[self._applied] < self.pushed:
            self.give_back()  # the server may need the copy
            self._await(self._applied)
        self.check()
        fence()
        if words[Ledger.LAYOUT] != self._layout_number:
            self._map()
        assert self._reader is not None
        self._pinned = self._reader
        self._buffer = self._pinned.pin()
        return self._pinned.shown(self._buffer)

    def give_back(self) -> None:
        if self._pinned is not None:
            self._pinned.unpin()

    def look_for(self, key: Key) -> bool:
        self._map()
        return self._reader is not None and key in self._reader.layout.index

    def version(self, key: Key) -> int:
        reader = self._pinned
        assert reader is not None
        return int(reader.versions_in(self._buffer)[reader.layout.index[key]])

    def begin_step(self, ask: bool = False) -> None:
        if ask:
            super().begin_step()
            return
        words = self._words
        if words[self._applied] < self.pushed:
            self._await(self._applied)
        self.check()
        if self.has_clock and words[self._applied + 1] < self.pushed:
            self._await(self._applied + 1)
        if self.gathers:
            fence()
            self.steps = words[Ledger.steps_word(0) : Ledger.steps_word(LEDGER_OPTIMIZERS)].tolist()

    def apply(self, optimizer: int, part: Part, gradients: Sequence[Any], rate: float, scale: float) -> bool:
        return self._direct is not None and self._direct.push(optimizer, part, gradients, rate, scale)

    def apply_unchecked(self, optimizer: int, part: Part, gradients: Sequence[Any], scale: float) -> bool:
        return self._direct is not None and self._direct.push(optimizer, part, gradients, math.nan, scale, False)

    def settle(self, optimizer: int, part: Part) -> None:
        if self._direct is not None:
            self._direct.settle(optimizer, part)

    def forget_plan(self, number: int) -> None:
        super().forget_plan(number)
        if self._direct is not None:
            self._direct.forget_plan(number)

    def set_rate(self, optimizer: int, value: float) -> None:
        if self._direct is None or not self._direct.set_rate(optimizer, value):
            super().set_rate(optimizer, value)

    def newest(self) -> tuple[Reader, int]:
        """Return the copies of the server's variables as they are laid out now, and the number of that layout."""
        self._map()
        assert self._reader is not None
        return self._reader, self._layout_number

    def look(self) -> None:
        """Look whether the server is still there; errors as for `Connection.wait`."""
        self._patience.look()

    def flush(self) -> None:
        if self._words[self._applied] < self.pushed:
            self._await(self._applied)
        self.check()

    def iterations(self, optimizer: int) -> int:
        self.flush()
        steps = self._words[Ledger.steps_word(optimizer)]
        if steps < 0:
            raise KeyError(f"{self.name} has no optimizer {optimizer}")
        return steps

    def leave(self) -> None:
        if self._reader is not None:
            self._reader.unpin()
        self.forget()
        super().leave()

    def forget(self) -> None:
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    def _await(self, word: int) -> None:
        """Wait until a word of the ledger has come to the number of pushes made."""
        words, pushed, patience = self._words, self.pushed, self._patience
        patience.reset()
        while words[word] < pushed:
            patience.tick()
        fence()

    def _map(self) -> None:
        """Map the copies of the server's present layout, unless that is done."""
        while True:
            answer, _ = self.ask("layout", maps=True)
            if answer["number"] == self._layout_number:
                return
            layout = Layout(map(VariableSpec.from_description, answer["specs"]))
            try:
                # Nobody writes the copies of an older layout: views of them stay as they are without a pin.
                self._reader = Reader(layout, answer["path"], answer["token"], self.clients, self.client)
            except FileNotFoundError:  # there is another layout already
                continue
            self._layout_number = answer["number"]
            return


class FarServer(ServerEnd):
    """A server on another node, or one whose memory cannot be seen.

    A snapshot lies where the line has received it, in memory that the line uses for the next one.
    """

    _layout: Layout | None = None
    _layout_number = -1
    _versions: dict[Key, int] = {}
    _kept: Message | None = None  # the present snapshot's
    _views: dict[Key, Any] = {}
    _viewed: tuple[Any, ...] = ()  # what the views are of: memory and layout

    def pull(self) -> dict[Key, Any]:
        self.give_back()
        message = self._answered("pull")
        content = protocol.unpack(message.header)
        if message.header[0] == Kind.FAILURE or self._failures or self.line.is_shared:
            content, memory = self._answer(message)  # memory of the server is not to be kept from it
        else:
            self._kept, memory = message, message.payload
        if content["layout"] != self._layout_number or self._layout is None:
            self._find_layout()
            return self.pull()
        self._versions = dict(zip(self._layout.index, content["versions"], strict=True))
        memory.flags.writeable = False
        viewed = memory.ctypes.data, self._layout
        if viewed != self._viewed:
            self._views, self._viewed = self._layout.views(memory), viewed
        return self._views

    def leave(self) -> None:
        self.give_back()
        super().leave()

    def give_back(self) -> None:
        if self._kept is not None:
            self._kept.release()
            self._kept = None

    def look_for(self, key: Key) -> bool:
        found = key in self._find_layout().index
        if found:  # another pull follows within this snapshot, whose views are in use: their memory is left to them
            self._kept = None
        return found

    def version(self, key: Key) -> int:
        return self._versions[key]

    def _find_layout(self) -> Layout:
        answer, _ = self.ask("layout", maps=False)
        if self._layout is None or answer["number"] != self._layout_number:
            self._layout = Layout(map(VariableSpec.from_description, answer["specs"]))
            self._layout_number = answer["number"]
        return self._layout
