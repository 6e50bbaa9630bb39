"""One rank alone, which sends to itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpidist.runtime.control import ControlChannel, Watch
from mpidist.transports.base import Transport


@dataclass(slots=True)
class _End:
    """One end of a message, the sent or the received one."""

    bytes: Any
    done: bool = False


class SingleTransport(Transport):
    """A group of one rank; see `Transport`.  Sends are done when the rank receives them."""

    name = "single"
    memory = frozenset({"host", "device"})
    has_channels = True

    def __init__(self, control: ControlChannel | None = None) -> None:
        self.control = ControlChannel.alone() if control is None else control
        self.rank, self.size = 0, 1
        self.world_ranks = (self.control.rank,)
        self._sent: deque[_End] = deque()
        self._posted: deque[_End] = deque()

    def send(self, array: Any, destination: int) -> _End:
        end = _End(self.content(array, destination))
        self._sent.append(end)
        self._match()
        return end

    def receive(self, array: Any, source: int) -> _End:
        end = _End(self.content(array, source))
        self._posted.append(end)
        self._match()
        return end

    def wait(self, pendings: Sequence[_End], watch: Watch) -> None:
        for end in pendings:
            while not end.done:
                watch.tick()

    def poll(self, pendings: Sequence[_End]) -> bool:
        return all(end.done for end in pendings)

    def among(self, members: Sequence[int], channel: int) -> SingleTransport:
        return SingleTransport(self.control)

    def split(self, color: int) -> SingleTransport:
        return SingleTransport(self.control)

    def close(self) -> None:
        self.closed = True

    def _match(self) -> None:
        if not (self._sent and self._posted):
            return
        sent, posted = self._sent.popleft(), self._posted.popleft()
        if sent.bytes.size != posted.bytes.size:
            raise self.wrong_size(sent.bytes.size, 0, posted.bytes.size)
        posted.bytes[...] = sent.bytes
        sent.done = posted.done = True
