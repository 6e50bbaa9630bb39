"""`Batch`: rows to batches.  `Unbatch`: batches to rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpidist.input import structure
from mpidist.input.sharding import WHOLE, RowPart
from mpidist.input.stage import ArraySpec, Derived, Item, force, row_spec


@dataclass(eq=False)
class Batch(Derived):
    """Batches of `size` elements, the last of an epoch possibly smaller."""

    size: int
    drop: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.child.length
        if length is not None and length != math.inf:
            self.length = int(length) // self.size if self.drop else -(-int(length) // self.size)
        self.batched = self.by_row = True
        self.batch_size, self.drop_remainder = self.size, self.drop

    def at(self, epoch: int, position: int, part: RowPart = WHOLE) -> Any:
        return self._from(epoch, position * self.size, part)

    def _from(self, epoch: int, first: int, part: RowPart = WHOLE) -> Any:
        rows = int(min(self.size, (self.child.length or 0) - first))
        mine = part.of(rows)
        if mine:
            return self.child.gather(epoch, range(first + mine.start, first + mine.stop))
        return structure.rows(self.child.gather(epoch, range(first, first + 1)), mine)

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        return (item for _, item in self.batches_from(epoch, start * self.size))

    def batches_from(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        return self._indexed(epoch, offset) if self.child.indexed else self._streamed(epoch, offset)

    def _indexed(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        length = self.child.length or 0
        whole = length - self.size + 1 if self.drop else length  # a batch begins before it
        firsts = itertools.count(offset, self.size) if length == math.inf else range(offset, int(whole), self.size)
        for first in firsts:
            yield int(min(first + self.size, length)), partial(self._from, epoch, first)

    def _streamed(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        items = self.child.items(epoch, offset)
        while chunk := list(itertools.islice(items, self.size)):
            offset += len(chunk)
            if len(chunk) == self.size or not self.drop:
                yield offset, partial(self._joined, chunk)

    def offset_of(self, step: int) -> int:
        length = self.child.length
        return step * self.size if length in (None, math.inf) or step < self.length else int(length)  # type: ignore

    def step_of(self, offset: int) -> int:
        return offset // self.size

    def _joined(self, chunk: Sequence[Item], part: RowPart = WHOLE) -> Any:
        mine = part.of(len(chunk))
        elements = force(chunk[mine.start : mine.stop] if mine else chunk[:1], self.child.pool())
        joined = structure.stack(elements)
        return joined if mine else structure.rows(joined, mine)

    def spec(self) -> Any:
        rows = self.size if self.drop else None
        return structure.map_leaves(lambda leaf: ArraySpec((rows, *leaf.shape), leaf.dtype), self.child.spec())

    def place(self, epoch: int, position: int) -> str:
        return f"batch {position}"

    def word(self) -> str:
        return f"batch({self.size}{', drop_remainder' if self.drop else ''})"

    def order(self, batch_size: bool = True) -> list[str]:
        return [*self.child.order(), *([self.word()] if batch_size else [])]


@dataclass(eq=False)
class Unbatch(Derived):
    """The rows of the child's batches, one by one; a stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.length = self.batch_size = None
        self.indexed = self.batched = self.drop_remainder = False

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        return itertools.islice(self._rows(epoch), start, None)

    def _rows(self, epoch: int) -> Iterator[Item]:
        for item in self.child.items(epoch):
            batch = item()
            for row in range(structure.rows_of(batch)):
                yield partial(structure.row, batch, row)

    def spec(self) -> Any:
        return row_spec(self.child.spec())

    def place(self, epoch: int, position: int) -> str:
        return f"element {position}"

    def word(self) -> str:
        return "unbatch()"


def rebatched(batches: Iterable[Any], sizes: Iterable[int]) -> Iterator[Any]:
    """Yield the rows of batches in batches of other sizes, until there are no rows left; a size may be 0.  Local."""
    source = iter(batches)
    left: list[Any] = []
    for size in sizes:
        while sum(structure.rows_of(each) for each in left) < max(size, 1):
            batch = next(source, None)
            if batch is None:
                break
            left = [each for each in (*left, batch) if structure.rows_of(each)] or [batch]
        if not left or not (rows := structure.rows_of(joined := structure.concatenate(left))):
            return
        yield structure.rows(joined, range(min(size, rows)))
        left = [structure.rows(joined, range(size, rows))] if size < rows else []
