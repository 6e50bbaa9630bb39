"""`WorkerEnd`: one worker, as the chief sees it, with the batches of calls that it has."""

from __future__ import annotations

import time
from collections import deque

from mpidist.parameter_server.coordinator.conversation import Conversation
from mpidist.parameter_server.coordinator.values import RemoteValue

#: With how much left to do a worker gets its next batch; unless the first takes so long that others might be done with
#: the next before it.
_AHEAD_SECONDS = 5e-3
_LONG_SECONDS = 20e-3


class CallBatch:
    """Calls that one worker has."""

    __slots__ = ("number", "calls", "seconds", "end", "began", "warn_after")

    def __init__(self, number: int, calls: list[RemoteValue], seconds: float, begin: float) -> None:
        self.number = number
        self.calls = calls
        self.seconds = seconds
        self.end = begin + seconds
        self.began = time.monotonic()
        self.warn_after = 0.0

    @property
    def running_seconds(self) -> float:
        """How long its worker has been running it, as far as the chief knows."""
        return time.monotonic() - self.began


class WorkerEnd:
    """One worker, as the chief sees it."""

    def __init__(self, index: int, talk: Conversation) -> None:
        self.index = index
        self.talk = talk
        self.batches: deque[CallBatch] = deque()
        self.known: set[int] = set()
        self.is_gone = False

    def has_room(self, now: float) -> bool:
        """Whether it should get more."""
        batches = self.batches
        if len(batches) != 1 or self.is_gone:
            return not batches and not self.is_gone
        return batches[0].seconds <= _LONG_SECONDS and self.next_look <= now

    @property
    def next_look(self) -> float:
        """When the chief should look again, to give it more or to hear what came of what it has."""
        batches = self.batches
        if not batches:
            return 0.0
        return batches[0].end if len(batches) > 1 else batches[0].end - _AHEAD_SECONDS

    @property
    def state(self) -> str:
        """What messages say of what it runs."""
        batch = self.batches[0]
        names = " or ".join(sorted({str(call._function) for call in batch.calls}))
        return f"{self} has been running {names} for {batch.running_seconds:.1f} s"

    def __str__(self) -> str:
        return f"worker {self.index} ({self.talk.peer_name})"
