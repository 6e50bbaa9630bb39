"""Memory of a node through which one rank sends short arrays, and the beginnings of long ones, to one other."""

from __future__ import annotations

from typing import Any

from mpidist.runtime.board import fence
from mpidist.transports.node_memory import SharedSegments

#: A line of the cache, in bytes and in words, and the least bytes of a box that are worth having one.
LINE_BYTES, _LINE_WORDS, _LEAST_BYTES = 64, 8, 320


class Box:
    """Memory of a node in which one rank puts the head of a message for one other.

    It begins with a line of words of the sender, of which the first is the number of the message, and a line of the
    receiver, whose first word is the number of the message that it has taken.
    """

    def __init__(self, segments: SharedSegments, sender: int, receiver: int) -> None:
        nbytes = box_bytes(segments)
        start = (receiver - (receiver > sender)) * nbytes
        part: Any = segments.spare[sender, start : start + nbytes]
        raw = memoryview(part)
        self._words = raw.cast("q")
        self.content = raw[2 * LINE_BYTES :]

    def put(self, number: int, head: bytes) -> bool:
        """Put in the head of message `number`, if the one before has been taken."""
        words = self._words
        if words[_LINE_WORDS] < number - 1:
            return False
        self.content[: len(head)] = head
        fence()
        words[0] = number
        return True

    def holds(self, number: int) -> bool:
        """Whether the head of message `number` is there."""
        if self._words[0] < number:
            return False
        fence()
        return True

    def take(self, number: int) -> None:
        """Say that message `number` was read."""
        fence()
        self._words[_LINE_WORDS] = number


def box_bytes(segments: SharedSegments | None) -> int:
    """Return how many bytes the box of a pair has; 0 where they would be too few.  Local."""
    if segments is None:
        return 0
    size, spare = segments.spare.shape
    nbytes = spare // max(1, size - 1) // LINE_BYTES * LINE_BYTES
    return nbytes if nbytes >= _LEAST_BYTES else 0
