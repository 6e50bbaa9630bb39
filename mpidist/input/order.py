"""The order of elements: `Shuffle`, `Repeat`, `Window`, `Shard`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy

from mpidist.input.sharding import WHOLE, RowPart
from mpidist.input.stage import Derived, Item, Length, Positions, Reordered, as_array, gather_by, moved


@dataclass(eq=False)
class Shuffle(Reordered):
    """The elements in an order of the epoch's own: all of them, in blocks without an end, a stream by a buffer."""

    buffer_size: int | None
    seed: int
    each_epoch: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.child.length == math.inf and self.buffer_size is None:
            raise ValueError(
                "`shuffle` of a data set that repeats forever needs a buffer_size; or call `shuffle` before `repeat`, "
                "which gives every repetition an order of its own"
            )
        # an epoch's end and the next one's beginning may be in one batch
        self._permutation = lru_cache(maxsize=2)(_permutation)

    def _key(self, epoch: int, block: int = 0) -> tuple[int, int, int]:
        return self.seed % (1 << 64), epoch if self.each_epoch else 0, block

    def _order(self, epoch: int, block: int) -> numpy.ndarray:
        return self._permutation(self._key(epoch, block), self._block())

    def _block(self) -> int:
        return int(self.child.length) if self.child.length != math.inf else int(self.buffer_size or 0)  # type: ignore[arg-type]

    def origin(self, epoch: int, positions: Any) -> tuple[int, Any]:
        order = self._order
        if self.child.length != math.inf:
            wanted = slice(positions.start, positions.stop) if isinstance(positions, range) else positions
            return epoch, order(epoch, 0)[wanted]
        size = self._block()
        if isinstance(positions, int):
            number, place = divmod(positions, size)
            return epoch, number * size + int(order(epoch, number)[place])
        blocks, inside = numpy.divmod(as_array(positions), size)
        return epoch, gather_by(blocks, lambda block, at: block * size + order(epoch, block)[inside[at]])

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        return itertools.islice(self._drawn(epoch), start, None)

    def _drawn(self, epoch: int) -> Iterator[Item]:
        random, buffer = numpy.random.default_rng(self._key(epoch)), []
        for item in self.child.items(epoch):
            buffer.append(item)
            if len(buffer) == self.buffer_size:
                place = int(random.integers(len(buffer)))
                buffer[place], buffer[-1] = buffer[-1], buffer[place]
                yield buffer.pop()
        for place in random.permutation(len(buffer)):
            yield buffer[place]

    def word(self) -> str:
        size = "" if self.child.indexed and self.child.length != math.inf else f"{self.buffer_size}, "
        return f"shuffle({size}seed={self.seed}{'' if self.each_epoch else ', the same in every epoch'})"


def _permutation(key: tuple[int, int, int], size: int) -> numpy.ndarray:
    return numpy.random.default_rng(key).permutation(size)


@dataclass(eq=False)
class Repeat(Derived):
    """The elements of a child that ends, `count` times over, each time as another epoch; None is forever."""

    count: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.length = self._times(self.child.length)
        self.by_row = self.child.by_row and self.child.length not in (None, 0)

    def _times(self, length: Length) -> Length:
        if self.count is None:
            return 0 if length == 0 else math.inf if self.child.indexed else None
        return 0 if self.count == 0 else None if length is None else length * self.count

    def _first(self, epoch: int) -> int:
        """Return which epoch of the child an epoch begins with."""
        return epoch << 32 if self.count is None else epoch * self.count

    def at(self, epoch: int, position: int, part: RowPart = WHOLE) -> Any:
        return self.child.at(*self._origin(epoch, position), part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        length, first = int(self.child.length or 1), self._first(epoch)
        if isinstance(positions, range) and (number := positions.start // length) == (positions.stop - 1) // length:
            return self.child.gather(first + number, moved(positions, -number * length))
        numbers, inside = numpy.divmod(as_array(positions), length)
        return gather_by(numbers, lambda number, at: self.child.gather(first + number, inside[at]))

    def _origin(self, epoch: int, position: int) -> tuple[int, int]:
        number, inside = divmod(position, int(self.child.length or 1))
        return self._first(epoch) + number, inside

    def place(self, epoch: int, position: int) -> str:
        if not self.child.indexed:
            return super().place(epoch, position)
        return self.child.place(*self._origin(epoch, position))

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        first, passed = self._first(epoch), 0
        for number in itertools.count(first) if self.count is None else range(first, first + self.count):
            # of a stream whose length is not known all items are counted
            seen = min(max(start - passed, 0), int(self.child.length or 0))
            for item in self.child.items(number, seen):
                seen += 1
                if passed + seen > start:
                    yield item
            if seen == 0:
                return
            passed += seen

    def batches_from(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        if not self.by_row:
            yield from super().batches_from(epoch, offset)
            return
        rows = self._rows()
        number, inside = divmod(offset, rows)
        for repetition in itertools.count(number) if self.count is None else range(number, self.count):
            for end, item in self.child.batches_from(self._first(epoch) + repetition, inside):
                yield repetition * rows + end, item
            inside = 0

    def _rows(self) -> int:
        """Return the number of rows of a repetition, with the rows that `batch` leaves out."""
        return self.child.offset_of(int(self.child.length or 0))

    def offset_of(self, step: int) -> int:
        if not self.by_row:
            return super().offset_of(step)
        number, inside = divmod(step, int(self.child.length or 1))
        return number * self._rows() + self.child.offset_of(inside)

    def step_of(self, offset: int) -> int:
        if not self.by_row:
            return super().step_of(offset)
        number, inside = divmod(offset, self._rows())
        return number * int(self.child.length or 0) + self.child.step_of(inside)

    def word(self) -> str:
        return f"repeat({'' if self.count is None else self.count})"


@dataclass(eq=False)
class Window(Reordered):
    """The elements from number `first` on, up to but without number `end`."""

    first: int
    end: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.length is not None:
            self.length = max(min(math.inf if self.end is None else self.end, self.length) - self.first, 0)

    def origin(self, epoch: int, positions: Any) -> tuple[int, Any]:
        return epoch, positions + self.first if isinstance(positions, int) else moved(positions, self.first)

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        most = None if self.end is None else max(self.end - self.first - start, 0)
        return itertools.islice(self.child.items(epoch, self.first + start), most)

    def word(self) -> str:
        return f"skip({self.first})" if self.end is None else f"take({self.end - self.first})"


@dataclass(eq=False)
class Shard(Reordered):
    """Every `number`-th element, from number `index` on."""

    number: int
    index: int

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.child.length
        if length is not None and length != math.inf:
            self.length = len(range(self.index, int(length), self.number))

    def origin(self, epoch: int, positions: Any) -> tuple[int, Any]:
        inside = positions if isinstance(positions, int) else as_array(positions)
        return epoch, inside * self.number + self.index

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        return itertools.islice(self.child.items(epoch, start * self.number + self.index), 0, None, self.number)

    def word(self) -> str:
        return f"shard({self.number}, {self.index})"
