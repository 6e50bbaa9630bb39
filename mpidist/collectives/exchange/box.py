"""Memory of a node through which one rank sends short arrays, and the beginnings of long ones, to one other."""

from __future__ import annotations

from typing import Any

from mpidist.runtime.board import fence
from mpidist.runtime.shared_memory import LINE_BYTES, LINE_WORDS
from mpidist.transports.node_memory import SharedSegments

#: The least bytes of a box that are worth having one.
_LEAST_BYTES = 320

#: Of so many kinds of arrays the place in a box is known.
_KEPT = 64


class Box:
    """Memory of a node in which one rank puts the head of a message for one other, and a short array behind it.

    It begins with a line of words of the sender, of which the first is the number of the message, and a line of the
    receiver, whose first word is the number of the message that it has taken.  `content` is what comes behind the
    words.
    """

    def __init__(self, segments: SharedSegments, sender: int, receiver: int) -> None:
        nbytes = box_bytes(segments)
        start = (receiver - (receiver > sender)) * nbytes
        whole: Any = segments.boxes[sender, start : start + nbytes]
        self._words = memoryview(whole).cast("q")
        self._bytes = whole[2 * LINE_BYTES :]
        self.content = memoryview(self._bytes)
        self._values: dict[Any, Any] = {}

    def values(self, start: int, dtype: Any, shape: tuple[int, ...], nbytes: int) -> Any:
        """Return the array that begins at that byte of the content."""
        key = (start, dtype, shape)
        view = self._values.get(key)
        if view is None:
            if len(self._values) >= _KEPT:
                self._values.clear()
            view = self._values[key] = self._bytes[start : start + nbytes].view(dtype).reshape(shape)
        return view

    def put(self, number: int, head: bytes, start: int, array: Any) -> bool:
        """Put in the head of message `number`, and an array if there is one, when the message before has been taken."""
        words = self._words
        if words[LINE_WORDS] < number - 1:
            return False
        fence()
        self.content[: len(head)] = head
        if array is not None:
            self.values(start, array.dtype, array.shape, array.nbytes)[...] = array
        fence()
        words[0] = number
        return True

    def holds(self, number: int) -> bool:
        """Whether message `number` is there."""
        if self._words[0] < number:
            return False
        fence()
        return True

    def take(self, number: int) -> None:
        """Say that message `number` was read."""
        fence()
        self._words[LINE_WORDS] = number


def box_bytes(segments: SharedSegments | None) -> int:
    """Return how many bytes the box of a pair has; 0 where they would be too few.  Local."""
    if segments is None:
        return 0
    size, nbytes = segments.boxes.shape
    each: int = nbytes // max(1, size - 1) // LINE_BYTES * LINE_BYTES
    return each if each >= _LEAST_BYTES else 0
