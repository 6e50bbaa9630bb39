"""`Server`: the loop of a ps rank.  It takes what clients send, applies it to its `Store`, and answers.

Everything is done in the order in which it comes; nothing is done by a second thread.  What must wait for others, such
as a read that is ahead of its clock, is put aside and looked at again after every message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy

from mpidist.errors import PeerLostError, TransportError
from mpidist.parameter_server import protocol
from mpidist.parameter_server.consistency import Asynchronous, Consistency
from mpidist.parameter_server.copies import NoCopy
from mpidist.parameter_server.ledger import Ledger
from mpidist.parameter_server.protocol import Kind
from mpidist.parameter_server.server.peer import Peer
from mpidist.parameter_server.server.progress import ServerProgress
from mpidist.parameter_server.server.pushes import Pushes, described
from mpidist.parameter_server.server.requests import SEE, Requests, Waiting
from mpidist.parameter_server.write_lock import WriteLock
from mpidist.transports.connections.base import Area, Connection, Message
from mpidist.transports.connections.waiting import Patience


class _NeedsLock(Exception):
    """Raised by what would change variables, or has read what another was writing, without the write lock."""


class Server:
    """One ps rank."""

    def __init__(
        self, connections: Sequence[Connection], number: int = 0, consistency: Consistency | None = None
    ) -> None:
        self.number = number
        self._connections = list(connections)
        self._progress = ServerProgress(self._connections, number)
        self.ledger, self.store = self._progress.ledger, self._progress.store
        self._short = Patience(self._connections, f"ps {number}", idle=True, warns=True)
        self.consistency = (consistency or Asynchronous()).start(range(len(connections)))
        self.clients = [Peer(n, connection, Ledger.applied_word(n)) for n, connection in enumerate(connections)]
        self._lock = self._own_lock()
        self._aside: list[tuple[Peer, Callable[[], None]]] = []
        shared = self._progress, self.consistency, self.clients
        self._pushes = Pushes(*shared, lambda peer, text: self._send(peer, Kind.PUSH_FAILURE, text), self._is_short)
        self._requests = Requests(number, *shared, self._lock is not None)

    def _own_lock(self) -> WriteLock | None:
        """Return what is taken before variables are changed, where clients may change them, too."""
        if not self._progress.path or self.consistency.has_clock or self.consistency.gathers:
            return None
        patience = Patience(self._connections, f"ps {self.number} waits for the write lock", idle=True, warns=True)
        try:
            return WriteLock(self._progress.path, self.ledger.words, patience, self._connections[0].presence.control)
        except OSError:  # then it is the only one that changes them
            return None

    @property
    def pushes(self) -> int:
        """Gradients applied so far, or dropped as too late."""
        return self.ledger.words[Ledger.PUSHES]

    # -- the loop -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until every client has left, or is lost."""
        patience = Patience(self._connections, f"ps {self.number} waits for its clients", idle=True)
        try:
            while any(client.is_here for client in self.clients):
                if self.poll():
                    patience.reset()
                elif self._wait(patience):
                    self._look_for_losses()
        finally:
            self.close()

    def poll(self) -> bool:
        """Take at most one message of every client; return whether anything was done."""
        is_busy = bool(self._pushes.ready) and self._apply([])
        for client in self.clients:
            message = client.first or (client.connection.receive() if client.is_here else None)
            if message is not None:
                is_busy = self._take(client, message) or is_busy
        return is_busy

    def _wait(self, patience: Patience) -> bool:
        """Let others run, since there is nothing to do; return whether this looked around."""
        if self.ledger.words[Ledger.SHORT]:
            return self._short.tick()
        waiting = [client for client in self.clients if client.first is not None]
        if not waiting:
            return patience.tick()
        assert self._lock is not None
        looked = self._lock.wait()
        if looked:  # who has the lock may be stopped
            for client in waiting:
                self._take_without_lock(client)
        return looked

    def close(self) -> None:
        """Give memory back; clients that read it keep it."""
        self._progress.close()
        if self._lock is not None:
            self._lock.close()

    # -- copies that clients have pinned ------------------------------------------------------------------------------

    def _is_short(self) -> None:
        """Show in the ledger that clients are to give back copies that they do not look at any more."""
        words, buffers = self.ledger.words, self.store.buffers
        if not words[Ledger.SHORT]:
            words[Ledger.SHORT] = 1
            self._short.reset()
            self._short.what = (
                f"ps {self.number} waits for a client to give back a copy of its variables of "
                f"{buffers.layout.nbytes} bytes, since there is no memory for one more{SEE}"
            )
        for client in self.clients:
            if client.connection.gone:
                buffers.forget(client.number)

    def _is_short_no_more(self) -> None:
        if self.ledger.words[Ledger.SHORT]:
            if not self._pushes.ready and all(each.first is None for each in self.clients):
                self.ledger.words[Ledger.SHORT] = 0

    # -- messages -----------------------------------------------------------------------------------------------------

    def _take(self, client: Peer, message: Message) -> bool:
        """Deal with a message; return False if it has to wait for the lock, and the client's later ones with it."""
        client.first, lock = message, self._lock
        try:
            if lock is None:
                self._deal_with(client, message)
            elif not lock.try_acquire():
                return False
            else:
                self._deal_with_locked(client, message)
                lock.release()
        except BaseException as error:
            if lock is not None:
                lock.release()
            if not isinstance(error, NoCopy):
                raise
            client.first = message
            self._is_short()
            return False
        self._is_short_no_more()
        return True

    def _take_without_lock(self, client: Peer) -> None:
        """Deal with a message that only reads while another has the lock, unless that writes what it reads."""
        assert client.first is not None
        self._progress.catch_up()  # and again with the lock: a step may be half counted
        with suppress(_NeedsLock):
            self._deal_with(client, client.first, has_lock=False)

    def _deal_with_locked(self, client: Peer, message: Message) -> None:
        self._progress.catch_up()
        try:
            self._deal_with(client, message)
        finally:
            self._progress.know()

    def _deal_with(self, client: Peer, message: Message, has_lock: bool = True) -> None:
        kind = message.header[0]
        if kind == protocol.PUSH_KIND:
            if not has_lock:
                raise _NeedsLock
            client.first = None
            self._pushes.take(client, message)
            self._is_short_no_more()
        elif kind == protocol.REQUEST_KIND:
            self._answer(client, message, has_lock)
        else:
            client.first = None
            self._note(client, protocol.unpack(message.header))
            message.release()
        if self._aside:
            self._look_again()

    def _answer(self, client: Peer, message: Message, has_lock: bool) -> None:
        request = protocol.unpack(message.header)
        array = None
        if "array" in request:
            array = protocol.as_described(message.payload, request["array"])
        if not has_lock and not self._requests.only_reads(request):
            raise _NeedsLock

        def attempt() -> None:
            try:
                answer = self._found(client, request, array, has_lock)
            except Waiting:
                self._aside.append((client, attempt))
                return
            except (TransportError, _NeedsLock, NoCopy):
                raise
            except Exception as error:  # the server outlives a client's mistake, and tells it
                message.release()
                self._progress.show()  # it may have got as far as to lay out anew
                self._send(client, Kind.FAILURE, described(error, request["verb"]))
                return
            message.release()
            self._progress.show()
            self._send(client, Kind.ANSWER, *answer)

        attempt()
        client.first = None

    def _found(
        self, client: Peer, request: dict[str, Any], array: Any, has_lock: bool
    ) -> tuple[dict[str, Any], Area | None, int]:
        """Return the answer to a request: content, and the area and bytes of an array that belongs to it."""
        buffers, stamp = self.store.buffers, self.store.buffers.stamp()
        content, *arrays = self._requests.answer(client, request, array)
        if not arrays:
            return content, None, 0
        values = numpy.asarray(arrays[0])
        area = client.area(values.nbytes)
        area.array[: values.nbytes].view(values.dtype).reshape(values.shape)[...] = values
        if not has_lock and not buffers.is_as(stamp):
            raise _NeedsLock
        return {**content, "array": protocol.described(values)}, area, values.nbytes

    def _send(
        self, client: Peer, kind: Kind, content: dict[str, Any], area: Area | None = None, nbytes: int = 0
    ) -> None:
        if client.connection.gone:
            return
        try:
            if area is None:
                client.connection.send(protocol.pack(kind, content))
            else:
                client.connection.send(protocol.pack(kind, content), area, nbytes)
        except PeerLostError:  # it died meanwhile, and the job goes on
            self._gone(client)

    # -- who takes part -----------------------------------------------------------------------------------------------

    def _note(self, client: Peer, note: dict[str, Any]) -> None:
        if note["verb"] == "leave":
            client.connection.lose("left")  # that its process is gone soon is no death
            self._gone(client)
        elif note["verb"] == "aside":
            self.consistency.stand_aside(client.number)
            self._set_active(client.number, False)
        else:
            self._set_active(client.number, note["verb"] == "active")

    def _look_for_losses(self) -> None:
        for client in self.clients:
            if client.is_here and client.connection.gone and client.connection.lost:
                self._gone(client)

    def _gone(self, client: Peer) -> None:
        client.is_here = False
        self._aside = [(whose, attempt) for whose, attempt in self._aside if whose is not client]
        self._set_active(client.number, False)
        if self._aside:
            self._look_again()

    def _look_again(self) -> None:
        """Try what was put aside once more."""
        aside, self._aside = self._aside, []
        for _, attempt in aside:
            attempt()

    def _set_active(self, client: int, is_active: bool) -> None:
        self.consistency.set_active(client, is_active)
        self._apply(self.consistency.complete())
        self._progress.show_clocks(self.consistency, self.clients)

    def _apply(self, ready: list[Any]) -> bool:
        done = self._pushes.apply(ready)
        self._is_short_no_more()
        return done
