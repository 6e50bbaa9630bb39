"""`Pushes`: the gradients that a server gets, from their arrival to their application."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from mpidist.errors import TransportError
from mpidist.parameter_server.consistency import Consistency
from mpidist.parameter_server.copies import NoCopy
from mpidist.parameter_server.protocol import PushHeader
from mpidist.parameter_server.server.peer import Peer
from mpidist.parameter_server.server.progress import ServerProgress
from mpidist.parameter_server.server.store import Planned
from mpidist.transports.connections.base import Message

#: How many headers are kept unpacked.
_KEPT_HEADERS = 256

#: Errors whose text alone does not say where they come from.
_OURS = (AssertionError, AttributeError, TypeError, KeyError)


class _Push:
    """A push between its arrival and its application.  See `Consistency.arrived`."""

    __slots__ = ("client", "number", "optimizer", "plan", "iteration", "iterations", "header", "message", "dropped")

    def __init__(self, peer: Peer, header: PushHeader, message: Message, plan: Planned, iterations: int) -> None:
        self.client = peer.number
        self.number = peer.arrived
        self.optimizer = header.optimizer
        self.plan = plan
        self.iteration = header.iteration
        self.iterations = iterations
        self.header = header
        self.message = message
        self.dropped = False


class Pushes:
    """The pushes of all clients of a server."""

    def __init__(
        self,
        progress: ServerProgress,
        consistency: Consistency,
        peers: Sequence[Peer],
        tell_failure: Callable[[Peer, dict[str, Any]], None],
        is_short: Callable[[], None],
    ) -> None:
        self._progress, self._store = progress, progress.store
        self._consistency = consistency
        self._peers = peers
        self._tell_failure, self._is_short = tell_failure, is_short
        self._headers: dict[bytes, PushHeader] = {}
        #: To be applied, each list as one; they wait only while there is no copy to be written.
        self.ready: list[list[Any]] = []

    def take(self, peer: Peer, message: Message) -> None:
        """Apply a push, or keep it until others have come; NoCopy, with nothing done, where there is no copy."""
        header = self._header(message.header)
        peer.arrived += 1
        try:
            plan = peer.plans[header.plan]
            if self._consistency.gathers:
                self._gather(peer, header, message, plan)
                return
            self._store.push(header.optimizer, plan, ((header.counts, message.payload, header.scale),))
        except TransportError:
            raise
        except NoCopy:
            peer.arrived -= 1
            raise
        except Exception as error:  # the server outlives a client's mistake, and tells it
            self._consistency.pushed(peer.number)  # it was a step, though one in vain
            self._fail(peer, peer.arrived, header.optimizer, message, error)
            return
        self._consistency.pushed(peer.number)
        message.release()
        self._done(peer, header.optimizer)

    def _header(self, raw: bytes) -> PushHeader:
        """Return a header, the same object if it has come before: most pushes say the same."""
        header = self._headers.get(raw)
        if header is None:
            if len(self._headers) >= _KEPT_HEADERS:
                self._headers.clear()
            header = self._headers[raw] = PushHeader.unpack(raw)
        return header

    def _gather(self, peer: Peer, header: PushHeader, message: Message, plan: Planned) -> None:
        iterations = self._store.optimizers[header.optimizer].optimizer.iterations
        push = _Push(peer, header, message, plan, iterations)
        ready = self._consistency.arrived(push)
        if push.dropped:
            message.release()
            self._done(peer, header.optimizer)
        self.apply(ready)

    def apply(self, ready: list[Any]) -> bool:
        """Apply pushes as one, and what this makes ready, after those that had to wait; return whether any was."""
        if ready:
            self.ready.append(ready)
        done = False
        while self.ready:
            ready = self.ready[0]
            first = ready[0].header
            try:
                pushed = [(push.header.counts, push.message.payload, push.header.scale) for push in ready]
                self._store.push(first.optimizer, ready[0].plan, pushed)
            except NoCopy:
                self._is_short()
                return done
            except Exception as error:  # as in `take`
                for push in ready:
                    self._fail(self._peers[push.client], push.number, push.optimizer, push.message, error)
            else:
                for push in ready:
                    push.message.release()
                    self._done(self._peers[push.client], first.optimizer)
            self.ready.pop(0)
            done = True
            if more := self._consistency.complete():
                self.ready.append(more)
        return done

    def _fail(self, peer: Peer, number: int, optimizer: int, message: Message, error: Exception) -> None:
        message.release()
        self._progress.show()
        self._tell_failure(peer, {**described(error, f"push {number}"), "push": number})
        self._done(peer, optimizer)

    def _done(self, peer: Peer, optimizer: int) -> None:
        self._progress.count_push(peer, optimizer)
        self._progress.show_clocks(self._consistency, self._peers)


def described(error: Exception, what: str) -> dict[str, Any]:
    """Return what a client is told of an error."""
    place = traceback.extract_tb(error.__traceback__)[-1:]
    where = f" ({place[0].name}, line {place[0].lineno})" if place else ""
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return {"what": what, "kind": type(error).__name__, "text": text + where * (type(error) in _OURS)}
