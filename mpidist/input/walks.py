"""`Walk`: what one iterator has read of a data set, where only reading tells what that is.

Iterators of one data set may take turns, or run in threads; each has a walk of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Read:
    """What has been read of a stage, as far as that is counted."""

    rows: int = 0
    checksum: int = 0


class Walk:
    """What has been read of the stages of a data set; `expected` is read before the position that it begins at."""

    def __init__(self, expected: Read | None = None) -> None:
        self.expected = expected
        self._read: dict[Hashable, Read] = {}

    def through(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield the steps; each is taken while this is the `current` walk."""
        while True:
            token = _CURRENT.set(self)
            try:
                step = next(steps)
            except StopIteration:
                return
            finally:
                _CURRENT.reset(token)
            yield step

    def note(self, stage: Hashable, read: Read) -> None:
        """Keep what has been read of a stage."""
        self._read[stage] = read

    def read(self, stage: Hashable) -> Read:
        """Return what has been read of a stage."""
        return self._read.get(stage, Read())


_CURRENT: ContextVar[Walk] = ContextVar("walk")


def current() -> Walk:
    """Return the walk that takes a step now, or a new one: nobody asks what it has read."""
    return _CURRENT.get(None) or Walk()
