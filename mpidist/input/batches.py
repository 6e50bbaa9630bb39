"""Rows to batches, and batches to rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpidist.input import structure
from mpidist.input.node import ArraySpec, Derived, Item, Node, force
from mpidist.input.sharding import WHOLE, Part


@dataclass(frozen=True, eq=False)
class Batch(Derived):
    """Batches of `size` elements, the last of an epoch possibly smaller.

    Parameters
    ----------
    child : Node
    size : int
    drop : bool
        Whether a smaller last batch is left out.
    """

    child: Node
    size: int
    drop: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        length = self.child.length
        if length is not None and length != math.inf:
            self._set("length", int(length) // self.size if self.drop else -(-int(length) // self.size))
        self._set("batched", True)
        self._set("by_row", True)
        self._set("batch_size", self.size)
        self._set("drop_remainder", self.drop)

    def at(self, epoch: int, position: int, part: Part = WHOLE) -> Any:
        """Return a batch; only the rows of the part are read."""
        return self._from(epoch, position * self.size, part)

    def _from(self, epoch: int, first: int, part: Part = WHOLE) -> Any:
        rows = int(min(self.size, (self.child.length or 0) - first))
        mine = part.of(rows)
        if mine:
            return self.child.gather(epoch, range(first + mine.start, first + mine.stop))
        return structure.rows(self.child.gather(epoch, range(first, first + 1)), mine)

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the batches; of those before `start` nothing is made."""
        return (item for _, item in self.batches_from(epoch, start * self.size))

    def batches_from(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        """Yield the batches from a row on; of the rows before it nothing is made."""
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
        """Return the first row of a batch; behind the last one the number of rows, those left out too."""
        length = self.child.length
        return step * self.size if length in (None, math.inf) or step < self.length else int(length)  # type: ignore

    def step_of(self, offset: int) -> int:
        """Return the batch that has this row."""
        return offset // self.size

    def _joined(self, chunk: Sequence[Item], part: Part = WHOLE) -> Any:
        mine = part.of(len(chunk))
        elements = force(chunk[mine.start : mine.stop] if mine else chunk[:1], self.child.pool())
        joined = structure.stack(elements)
        return joined if mine else structure.rows(joined, mine)

    def spec(self) -> Any:
        """Return what batches are; the number of rows is None unless it never varies."""
        rows = self.size if self.drop else None
        return structure.map_leaves(lambda leaf: ArraySpec((rows, *leaf.shape), leaf.dtype), self.child.spec())

    def place(self, epoch: int, position: int) -> str:
        """Return the number of the batch."""
        return f"batch {position}"

    def word(self) -> str:
        """Return it with its size."""
        return f"batch({self.size}{', drop_remainder' if self.drop else ''})"

    def order(self, batch_size: bool = True) -> list[str]:
        """Return the child's, with the batch size if asked for."""
        return [*self.child.order(), *([self.word()] if batch_size else [])]


@dataclass(frozen=True, eq=False)
class Unbatch(Derived):
    """The rows of the child's batches, one by one; a stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("length", None), ("indexed", False), ("batched", False), ("batch_size", None)):
            self._set(name, value)
        self._set("drop_remainder", False)

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the rows; those before `start` are read and passed over."""
        return itertools.islice(self._rows(epoch), start, None)

    def _rows(self, epoch: int) -> Iterator[Item]:
        for item in self.child.items(epoch):
            batch = item()
            for row in range(structure.rows_of(batch)):
                yield partial(_row, batch, row)

    def spec(self) -> Any:
        """Return what rows are."""
        return structure.map_leaves(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), self.child.spec())

    def place(self, epoch: int, position: int) -> str:
        """Return the number of the element."""
        return f"element {position}"

    def word(self) -> str:
        """Return the method that made it."""
        return "unbatch()"


def _row(batch: Any, row: int) -> Any:
    return structure.map_leaves(lambda leaf: leaf[row], batch)


def rebatched(batches: Iterable[Any], sizes: Iterable[int]) -> Iterator[Any]:
    """Yield the rows of batches in batches of other sizes, until there are no rows left; a size may be 0.  Local.

    Parameters
    ----------
    batches : iterable of nested arrays
    sizes : iterable of int
        Without an end, such as a cycle with a size above 0.
    """
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
