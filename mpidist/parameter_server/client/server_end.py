"""`ServerEnd`: one server as a client sees it: how it is asked, and what has been pushed to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from mpidist.errors import ServerError, TornVariableError, TransportError, listed
from mpidist.parameter_server import protocol
from mpidist.parameter_server.client.part import PushPart
from mpidist.parameter_server.layout import Key, Layout, VariableSpec
from mpidist.parameter_server.protocol import Kind
from mpidist.transports.connections.base import Area, Connection, Message
from mpidist.transports.connections.waiting import Patience

#: Requests with more bytes have memory of their own, for as long as they last.
_KEPT_BYTES = 1 << 20

#: Requests that a server answers when it is done with what the client has pushed, and what else that takes.
_AFTER_PUSHES = ("step", "flush")
_WITH_OTHERS = ", with the gradients of workers that push the same lists of variables in the same order"

#: Seconds between two looks who has come to a meeting.
_MEETING_SECONDS = 0.002

#: Errors of a server that are raised at the client as what they are.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (IndexError, KeyError, MemoryError, OSError, TypeError, ValueError, TornVariableError)
}


def error_kind(name: str) -> type[Exception]:
    """Return what is raised at a client for an error of a server, or of another rank, of this type."""
    return _KINDS.get(name, ServerError)


class ServerEnd:
    """A server on another node, or one whose memory cannot be seen: all goes by messages.

    A snapshot lies where the connection has received it, in memory that the connection uses for the next one.
    """

    ledger: Any = None
    _layout: Layout | None = None
    _layout_number = -1
    _versions: dict[Key, int] = {}
    _kept: Message | None = None  # the present snapshot's
    _views: dict[Key, Any] = {}
    _viewed: tuple[Any, ...] = ()  # what the views are of: memory and layout

    def __init__(self, connection: Connection, number: int, client: int) -> None:
        self.connection = connection
        self.number = number
        self.client = client
        control = connection.presence.control
        self.name = f"ps {number} ({control.name(connection.presence.name_of(connection.peer))})"
        self._own = f"rank {control.rank}"
        self._who = f"{self._own} waits for {self.name}"
        self._patience = Patience([connection], f"{self._who} to apply what it pushed")
        #: Pushes sent, and how many of them the server is known to be done with.
        self.pushed = self._flushed = 0
        self.clients = 0
        self.has_clock = self.gathers = False
        #: By optimizer: its steps at this client's last reading, and this client's own ones since.
        self.steps: dict[int, int] = {}
        #: Plans that are not used any more, of which the server is told with the next new one.
        self.forgotten: list[int] = []
        #: Those that are kept.
        self.parts: WeakSet[PushPart] = WeakSet()
        self._areas: list[Area | None] = [None, None]
        self._failures: list[dict[str, Any]] = []

    def take_policy(self, answer: dict[str, Any]) -> None:
        """Take note of what the server has said at first."""
        self.clients, self.has_clock, self.gathers = answer["clients"], answer["has_clock"], answer["gathers"]
        if self.gathers:
            self._patience.what += _WITH_OTHERS

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
                self.drop_views()  # or lists that are not pushed again would keep its memory
            try:
                area = areas[number] = self.connection.area(max(64, nbytes))
            except TransportError:  # there is no memory for a second one
                first = areas[0]
                if not number or first is None or first.array.size < nbytes:
                    raise
                first.wait_free()
                return first
        elif number:
            area.wait_free()
        return area

    def drop_views(self) -> None:
        """Forget the arrays that gradients were packed in."""
        for part in self.parts:
            part.views.clear()

    def tell_plan(self, part: PushPart, **content: Any) -> None:
        """Have the server know a plan, and forget others."""
        self.parts.add(part)
        forgotten = list(self.forgotten)
        del self.forgotten[: len(forgotten)]
        self.ask("plan", number=part.number, forgotten=forgotten, **content)

    def push(
        self, optimizer: int, part: PushPart, chosen: Sequence[Any], gradients: Sequence[Any], scale: float
    ) -> None:
        """Send a push; does not wait for it to be applied."""
        seen = self.steps.get(optimizer, 0) if self.gathers else 0
        rows = [gradients[place].coalesced() for place in part.sparse]
        counts = tuple(len(each.indices) for each in rows)
        nbytes = part.plan.nbytes(counts) if rows else part.nbytes
        area = self.area(nbytes)
        part.pack(chosen, area.array, scale)
        if rows:
            part.pack_rows(rows, counts, area.array)
        self.pushed += 1
        self.connection.send(part.header(optimizer, seen, scale, counts), area, nbytes)
        self.steps[optimizer] = seen + 1

    def apply(self, optimizer: int, part: PushPart, gradients: Sequence[Any], scale: float) -> bool:
        """Do what a push would have the server do; return False, with nothing done, where a push is needed."""
        return False

    def settle(self, optimizer: int, part: PushPart) -> None:
        """Raise what would keep `apply` from doing it, as far as that is known; nothing is done yet."""

    def set_rate(self, optimizer: int, value: float) -> None:
        """Set the learning rate of an optimizer from the next push on."""
        self.ask("rate", number=optimizer, value=value)

    def note(self, verb: str) -> None:
        """Tell the server something that needs no answer."""
        self.connection.send(protocol.pack(Kind.NOTE, {"verb": verb}))

    def ask(
        self, verb: str, array: Any = None, timeout_seconds: float | None = None, **fields: Any
    ) -> tuple[dict[str, Any], Any]:
        """Send a request and return its answer: content, and a new array or None."""
        return self._answer(self._answered(verb, array, timeout_seconds, **fields))

    def _answered(self, verb: str, array: Any = None, timeout_seconds: float | None = None, **fields: Any) -> Message:
        """Send a request and return the message that answers it."""
        request, large = {"verb": verb, **fields}, None
        if array is None:
            self.connection.send(protocol.pack(Kind.REQUEST, request))
        else:
            if array.nbytes > _KEPT_BYTES:  # such as initial values: nothing is to be left of them
                large = self.connection.area(array.nbytes)
            area = large or self.area(array.nbytes)
            if array.nbytes:
                area.array[: array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
            request["array"] = protocol.described(array)
            self.connection.send(protocol.pack(Kind.REQUEST, request), area, array.nbytes)
        while True:
            others = _WITH_OTHERS if self.gathers and verb in _AFTER_PUSHES else ""
            message = self.connection.wait(f"{self._who} to answer {verb!r}{others}", timeout_seconds)
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
        message = self.connection.receive()
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

    # -- what a near server does in another way ---------------------------------------------------------------------

    def pull(self) -> dict[Key, Any]:
        """Return the server's variables as they are now, own pushes included: read-only views, without tables."""
        self.give_back()
        message = self._answered("pull")
        content = protocol.unpack(message.header)
        if message.header[0] == Kind.FAILURE or self._failures or self.connection.is_shared:
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

    def give_back(self) -> None:
        """Let the memory of the last snapshot be written: another one is about to be pulled."""
        if self._kept is not None:
            self._kept.release()
            self._kept = None

    def look_for(self, key: Key) -> bool:
        """Make the server put new variables among the others; return whether `key` is there then."""
        found = key in self._find_layout().index
        if found:  # another pull follows within this snapshot, whose views are in use: their memory is left to them
            self._kept = None
        return found

    def _find_layout(self) -> Layout:
        answer, _ = self.ask("layout", maps=False)
        if self._layout is None or answer["number"] != self._layout_number:
            self._layout = Layout(map(VariableSpec.from_description, answer["specs"]))
            self._layout_number = answer["number"]
        return self._layout

    def version(self, key: Key) -> int:
        """Return the version of a variable in the snapshot that was pulled last."""
        return self._versions[key]

    def begin_step(self, ask: bool = False) -> Sequence[int]:
        """Wait until this client may start a step; with `ask`, by the server's own word.

        Returns the steps of all optimizers, -1 for those that are not there yet, where the server gathers.
        """
        return self.ask("step", pushed=self.pushed)[0]["steps"]

    def flush(self) -> None:
        """Wait until the server is done with all pushes of this client."""
        if self._flushed == self.pushed:
            self.check()
        else:
            self.ask("flush")
            self._flushed = self.pushed

    def meet(self, number: int, timeout_seconds: float | None) -> None:
        """Return when the server knows that all clients have come to a meeting."""
        patience = Patience([self.connection], "", timeout_seconds)
        while absent := self.ask("meet", number=number, timeout_seconds=timeout_seconds)[0]["absent"]:
            patience.what = (
                f"{self._own} waits for {listed(absent)} to make a call that all workers make, as of restore"
            )
            patience.tick()
            time.sleep(_MEETING_SECONDS)

    def iterations(self, optimizer: int) -> int:
        """Return the steps of an optimizer, this client's pushes included; KeyError if the server has none such."""
        return self.ask("iterations", number=optimizer, value=None)[0]["iterations"]

    def forget(self) -> None:
        """Give back what is of no more use when the server is gone."""

    def leave(self) -> None:
        """Give areas and snapshot back, and tell the server that nothing more comes."""
        self.give_back()
        self.forget()
        for area in self._areas:
            if area is not None and not area.busy:
                area.close()
        self._areas = [None, None]
        self.note("leave")
