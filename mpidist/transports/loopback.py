"""Ranks as threads of one process, with delays and failures to order: for tests, not for speed.

Every pair of ranks of every group has a *mailbox*, a queue of messages in the order of sending.  The receiver takes
messages out while it waits, and copies the bytes itself.  By default a send is only done when that has happened (a
rendezvous), so that code which relies on buffering hangs here, and is found, instead of on somebody's cluster.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from mpidist.errors import TransportError
from mpidist.runtime.control import ControlChannel, Watch
from mpidist.transports.base import Pending, Transport

#: How long a waiting thread sleeps at most, in seconds, before it looks around; new messages wake it.
_NAP_SECONDS = 0.0005


class InjectedFault(TransportError):
    """The failure that `Faults.fail_at` asked for."""


@dataclass(frozen=True)
class Faults:
    """What shall go wrong, for tests.  Messages and ranks count from 0, in the world; messages are never reordered.

    Attributes
    ----------
    delay_seconds : float or callable
        How long a message is under way; or ``delay_seconds(source, destination)`` returns it.
    drop : (source, destination, message) or None
        This message between these two ranks is lost: its sender believes it sent.
    fail_at : (rank, message) or None
        The rank raises `InjectedFault` in place of sending its message of this number.
    """

    delay_seconds: float | Callable[[int, int], float] = 0.0
    drop: tuple[int, int, int] | None = None
    fail_at: tuple[int, int] | None = None

    def delay(self, source: int, destination: int) -> float:
        """Return how long a message between two ranks is under way, in seconds."""
        return self.delay_seconds(source, destination) if callable(self.delay_seconds) else self.delay_seconds


@dataclass(slots=True)
class _Sent:
    """A message in a mailbox: the sender's own bytes, or a copy of them, not to be seen before `due`."""

    bytes: Any
    source: int
    due: float
    done: bool = False


@dataclass(slots=True)
class _Posted:
    """A receive that waits for its message."""

    bytes: Any
    done: bool = False


class LoopbackWorld:
    """The memory that thread ranks share: mailboxes, and an event by which each is woken.

    `controls`: one a rank.  Messages smaller than `eager_bytes` are copied when they are sent, and their sends are done
    at once.  The transports accept `memory` of these kinds: a test may forbid device memory, or allow it.
    """

    def __init__(
        self, controls: Sequence[ControlChannel], eager_bytes: int, memory: frozenset[str], faults: Faults | None
    ) -> None:
        self.size = size = len(controls)
        self.eager_bytes = eager_bytes
        self.memory = memory
        self.faults = Faults() if faults is None else faults
        self.mailboxes: dict[Hashable, deque[_Sent]] = {}
        self.arrivals = [threading.Event() for _ in range(size)]
        #: By group and number of the split: the color that each rank gave.
        self.colors: dict[Hashable, dict[int, int]] = {}
        #: By source, then destination: how many messages were sent.
        self.sent = [[0] * size for _ in range(size)]
        self.transports = [LoopbackTransport(self, control, tuple(range(size)), ()) for control in controls]

    def mailbox(self, context: Hashable, source: int, destination: int) -> deque[_Sent]:
        """Return the queue of messages between two ranks within one group."""
        key = (context, source, destination)
        found = self.mailboxes.get(key)
        return self.mailboxes.setdefault(key, deque()) if found is None else found


class LoopbackTransport(Transport):
    """A group of thread ranks; see `Transport`.

    `context`, equal on all ranks of the group, keeps the messages of groups apart.
    """

    name = "loopback"
    has_channels = True
    in_one_process = True

    def __init__(
        self, world: LoopbackWorld, control: ControlChannel, world_ranks: tuple[int, ...], context: tuple[int, ...]
    ) -> None:
        self.control = control
        self.world_ranks = world_ranks
        self.rank, self.size = world_ranks.index(control.rank), len(world_ranks)
        #: By rank of the group: which thread it is.
        self._threads = tuple(map(control.world_ranks.__getitem__, world_ranks))
        self._thread = self._threads[self.rank]
        self.memory = world.memory
        self._world = world
        self._context = context
        self._splits = 0
        self._posted: dict[int, deque[_Posted]] = {}

    def send(self, array: Any, destination: int) -> Pending:
        content = self.content(array, destination)
        world, source, target = self._world, self._thread, self._threads[destination]
        number = world.sent[source][target]
        if world.faults.fail_at == (source, sum(world.sent[source])):
            raise InjectedFault(f"rank {source} of {world.size}: the test asked for a failure at this message")
        world.sent[source][target] += 1
        eager = content.size < world.eager_bytes
        due = time.monotonic() + world.faults.delay(source, target)
        message = _Sent(content.copy() if eager else content, self.rank, due)
        if world.faults.drop == (source, target, number):
            message.done = True
            return message
        world.mailbox(self._context, source, target).append(message)
        world.arrivals[target].set()
        return _Sent(message.bytes, self.rank, due, done=True) if eager else message

    def receive(self, array: Any, source: int) -> Pending:
        posted = _Posted(self.content(array, source))
        self._posted.setdefault(source, deque()).append(posted)
        return posted

    def wait(self, pendings: Sequence[Pending], watch: Watch) -> None:
        self._until(lambda: all(pending.done for pending in pendings), watch)

    def poll(self, pendings: Sequence[Pending]) -> bool:
        self._deliver()
        return all(pending.done for pending in pendings)

    def among(self, members: Sequence[int], channel: int) -> LoopbackTransport:
        world_ranks = tuple(self.world_ranks[member] for member in members)
        return LoopbackTransport(self._world, self.control, world_ranks, (*self._context, -1, channel))

    def split(self, color: int) -> LoopbackTransport:
        number, self._splits = self._splits, self._splits + 1
        colors = self._world.colors.setdefault((self._context, number), {})
        colors[self.rank] = color
        for thread in self._threads:
            self._world.arrivals[thread].set()
        self._until(lambda: len(colors) == self.size, self.control.watch("split of a loopback group"))
        members = tuple(world_rank for rank, world_rank in enumerate(self.world_ranks) if colors[rank] == color)
        return LoopbackTransport(self._world, self.control, members, (*self._context, number, color))

    def close(self) -> None:
        self.closed = True

    def _until(self, ready: Callable[[], bool], watch: Watch) -> None:
        """Take in messages until `ready()`; sleeps between looks, until a message comes or a moment has passed."""
        arrival = self._world.arrivals[self._thread]
        while not ready():
            arrival.clear()
            self._deliver()
            if not ready() and not arrival.wait(_NAP_SECONDS):
                watch.tick()

    def _deliver(self) -> None:
        """Bring messages that are there and due to the receives that wait for them, in the order of both."""
        for source, posted in self._posted.items():
            mailbox = self._world.mailbox(self._context, self._threads[source], self._thread)
            while posted and mailbox and mailbox[0].due <= time.monotonic():
                self._hand_over(mailbox.popleft(), posted.popleft())

    def _hand_over(self, message: _Sent, posted: _Posted) -> None:
        if message.bytes.size != posted.bytes.size:
            raise self.wrong_size(message.bytes.size, message.source, posted.bytes.size)
        posted.bytes[...] = message.bytes
        posted.done = message.done = True
        self._world.arrivals[self._threads[message.source]].set()
