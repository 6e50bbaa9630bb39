"""How far apart clients may be: policies, each an object on the server.

A *step* of a client is one push.  `Asynchronous` applies each push as it comes and lets all go on.  `StaleSynchronous`
does too, but holds back who is too far ahead.  `BackupWorkers` applies the mean of the first n gradients of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: More pushes than any client makes: it may go on.
UNLIMITED = 1 << 62


class Consistency:
    """Base of the policies, and the rule that nothing is held back.

    A server asks its policy about every push.  Clients are known by their numbers.  All methods are Local.
    """

    #: Whether clients have to look for word that they may start a step.
    has_clock = False
    #: Whether a push may wait for others before it is applied.
    gathers = False

    def start(self, clients: Sequence[int]) -> Consistency:
        """Return the policy for one server with these clients, all of them active: one without memory of others."""
        return self

    def pushed(self, client: int) -> None:
        """Take note of a push that is applied at once."""

    def arrived(self, push: Any) -> list[Any]:
        """Return the pushes to be applied now as one: their mean.  Nothing, if none is to be applied yet.

        Only asked of a policy that `gathers`.

        Parameters
        ----------
        push : object with attributes `client`, `optimizer`, `plan`, `iteration`, `iterations` and `dropped`
            `iteration` is what the client had seen of the optimizer's steps, `iterations` how many there are.
            `dropped` is set if it comes too late.
        """
        return [push]

    def complete(self) -> list[Any]:
        """Return what `arrived` would return now, without another push."""
        return []

    def permitted(self, client: int) -> int:
        """Return how many pushes a client may have made to start another step."""
        return UNLIMITED

    def set_active(self, client: int, is_active: bool) -> None:
        """Take note that a client has work, or has none, or has gone."""

    def stand_aside(self, client: int) -> None:
        """Take note that a client makes no steps: what it pushes now and then, as a chief may, counts for nobody."""


class Asynchronous(Consistency):
    """Every push is applied when it arrives; nobody waits for anybody."""

    def __repr__(self) -> str:
        return "Asynchronous()"


class StaleSynchronous(Consistency):
    """Asynchronous, but no client is more than `staleness` steps ahead of the slowest.

    A client may start step c, counted from 0, when all active ones have finished c - staleness steps.  Clients that
    left, died or have no work do not count; one that comes back counts from where the slowest is.

    Parameters
    ----------
    staleness : int
        0 or more; with 0 all wait for all.

    Raises
    ------
    ValueError
        `staleness` is negative.
    """

    has_clock = True

    def __init__(self, staleness: int) -> None:
        if staleness < 0:
            raise ValueError(f"staleness must be 0 or more steps, got {staleness}")
        self.staleness = staleness
        self._clocks: dict[int, int] = {}
        self._pushes: dict[int, int] = {}
        self._aside: set[int] = set()

    def stand_aside(self, client: int) -> None:
        self._aside.add(client)

    def start(self, clients: Sequence[int]) -> StaleSynchronous:
        policy = StaleSynchronous(self.staleness)
        policy._clocks = dict.fromkeys(clients, 0)
        policy._pushes = dict.fromkeys(clients, 0)
        return policy

    def pushed(self, client: int) -> None:
        if client in self._aside:
            return
        self.set_active(client, True)
        self._clocks[client] += 1
        self._pushes[client] += 1

    def permitted(self, client: int) -> int:
        clock = self._clocks.get(client)
        if clock is None:
            return UNLIMITED
        return self._pushes[client] + min(self._clocks.values()) + self.staleness - clock

    def set_active(self, client: int, is_active: bool) -> None:
        if not is_active:
            self._clocks.pop(client, None)
        elif client not in self._clocks:
            self._clocks[client] = min(self._clocks.values(), default=0)

    def __repr__(self) -> str:
        return f"StaleSynchronous(staleness={self.staleness})"


class BackupWorkers(Consistency):
    """Synchronous steps that do not wait for the slowest: the first `count` gradients of a step make it.

    Their mean is applied as one.  Gradients that come later for the same step are dropped, and counted.  All clients
    wait, before they read again, until their step is made.  Where fewer than `count` clients are left, those make it.

    Parameters
    ----------
    count : int
        1 or more.

    Attributes
    ----------
    dropped : int
        Gradients that came too late, as a server counts them: 0 in the object that is given to the strategy.

    Raises
    ------
    ValueError
        `count` is not positive.
    """

    gathers = True

    def __init__(self, count: int) -> None:
        if count < 1:
            raise ValueError(f"count must be 1 or more workers, got {count}")
        self.count = count
        self.dropped = 0
        self._active: set[int] = set()
        self._aside: set[int] = set()
        self._waiting: dict[tuple[int, Any], list[Any]] = {}

    def start(self, clients: Sequence[int]) -> BackupWorkers:
        policy = BackupWorkers(self.count)
        policy._active = set(clients)
        return policy

    def stand_aside(self, client: int) -> None:
        self._aside.add(client)

    def arrived(self, push: Any) -> list[Any]:
        if push.client in self._aside:
            return [push]
        self._active.add(push.client)
        if push.iteration < push.iterations:
            self.dropped += 1
            push.dropped = True
            return []
        # gradients for other variables, as those of a second loss, make a step of their own
        self._waiting.setdefault((push.optimizer, push.plan), []).append(push)
        return self.complete()

    def complete(self) -> list[Any]:
        """Return the pushes of one step that has enough of them, if there is one; they wait no longer."""
        needed = min(self.count, max(1, len(self._active)))
        for key, pushes in self._waiting.items():
            if len(pushes) >= needed:
                return self._waiting.pop(key)
        waiting = {push.client for pushes in self._waiting.values() for push in pushes}
        if waiting and waiting >= self._active:  # for different variables each: no more will come for any step
            first = min(waiting)  # and not who came first, which may be another on another server
            found = (key for key, pushes in self._waiting.items() if first in {push.client for push in pushes})
            return self._waiting.pop(next(found))
        return []

    def set_active(self, client: int, is_active: bool) -> None:
        (self._active.add if is_active else self._active.discard)(client)

    def __repr__(self) -> str:
        return f"BackupWorkers(count={self.count})"
