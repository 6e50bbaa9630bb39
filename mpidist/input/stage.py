"""`Stage`: a step of a data set.

A data set is a tree of stages, its sources at the leaves.  A stage answers one of two questions:

- an *indexed* stage, ``at(epoch, position)`` and ``gather(epoch, positions)``: the elements at these places of an
  epoch.  Arrays, HDF5 files, lines of text are indexed, and so is everything made of them by index arithmetic:
  shuffles, repetitions, batches.  A rank reads its own rows and no others, and a run resumes without reading what it
  has seen.
- a *stream*, ``items(epoch, start)``: one element after the other, from element number `start` on.  Generators are
  streams, and everything behind a filter.

An *item* is a promise of an element: ``item(part)`` reads and maps it, and of a batch only the rows of `part`.  So
ranks that must walk through the same stream compute only what is theirs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy

from mpidist.input import structure
from mpidist.input.sharding import WHOLE, RowPart

#: ``item(part)`` returns the element, of a batch the rows of the part; without a part all of it.
Item = Callable[..., Any]

#: Places in an epoch: a range for those that follow each other, else an array of int64.
Positions = range | numpy.ndarray

#: Number of elements of an epoch: `math.inf` without an end, None where only iterating tells.
Length = int | float | None


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array of an element; None in the shape is a size that varies.

    Parameters
    ----------
    shape : tuple of (int or None)
    dtype : numpy.dtype
    """

    shape: tuple[int | None, ...]
    dtype: Any


class Stage:
    """Elements, epoch by epoch; see the module's text.

    `indexed`: `at` and `gather` work.  `batched`: elements are batches, which can be cut into parts, of `batch_size`
    rows as far as that is known; with `drop_remainder` each has so many.  `by_row`: the offset of a batch is the number
    of its first row, and so the same whatever the batch size; elsewhere it is the number of the batch.
    """

    length: Length = None
    indexed: bool = True
    batched: bool = False
    batch_size: int | None = None
    drop_remainder: bool = False
    by_row: bool = False
    children: tuple[Stage, ...] = ()

    def at(self, epoch: int, position: int, part: RowPart = WHOLE) -> Any:
        """Return one element, of a batch the rows of `part`."""
        return cut(structure.row(self.gather(epoch, range(position, position + 1)), 0), part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        """Return elements joined along a new first axis; `positions` has one at least."""
        return structure.stack([self.at(epoch, int(position)) for position in positions])

    def items(self, epoch: int, start: int = 0) -> Iterator[Item]:
        """Yield the items of an epoch, from number `start` on."""
        if not self.indexed:
            yield from self.stream(epoch, start)
            return
        end = itertools.count(start) if self.length == math.inf else range(start, int(self.length or 0))
        for position in end:
            yield partial(self.at, epoch, position)

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the items where there is no index."""
        raise NotImplementedError(type(self).__name__)

    def batches_from(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        """Yield every batch of an epoch from an offset on, after the offset of the batch that follows it."""
        return enumerate(self.items(epoch, offset), offset + 1)

    def offset_of(self, step: int) -> int:
        """Return the offset of a batch by its number; behind the last one that of the end."""
        return step

    def step_of(self, offset: int) -> int:
        """Return the number of the batch that has the row at this offset."""
        return offset

    def spec(self) -> Any:
        """Return the `ArraySpec` of every array of an element."""
        first = next(self.items(0), None)
        if first is None:
            raise ValueError("a data set without elements has no element_spec here: nothing tells what they would be")
        found = structure.map_leaves(spec_of, structure.to_arrays(first()))
        rows = self.batch_size if self.drop_remainder else None
        return with_rows(found, rows) if self.batched else found

    def words(self) -> list[str]:
        """Return the operations on the elements of the sources, in order."""
        return []

    def order(self, batch_size: bool = True) -> list[str]:
        """Return all that decides which rows come in which order, from the sources on; the batch size if asked for."""
        raise NotImplementedError(type(self).__name__)

    def place(self, epoch: int, position: int) -> str:
        """Return the name of an element for messages."""
        return f"element {position}"

    def pool(self) -> Executor | None:
        """Return the threads that are to force the items of a batch together."""
        return None

    def sources(self) -> Iterator[Stage]:
        """Yield the leaves of the tree."""
        if not self.children:
            yield self
        for child in self.children:
            yield from child.sources()

    def rebuilt(self, change: Callable[[Stage], Stage]) -> Stage:
        """Return the tree with ``change(source)`` in place of every source."""
        return change(self)


@dataclass(eq=False)
class Derived(Stage):
    """A stage that has its elements from one other stage, and by default is like it."""

    child: Stage

    def __post_init__(self) -> None:
        for name in ("length", "indexed", "batched", "batch_size", "drop_remainder"):
            setattr(self, name, getattr(self.child, name))
        self.children = (self.child,)

    def spec(self) -> Any:
        return self.child.spec()

    def words(self) -> list[str]:
        return [*self.child.words(), *filter(None, [self.word()])]

    def word(self) -> str:
        """Return the operation of this stage."""
        return ""

    def order(self, batch_size: bool = True) -> list[str]:
        return [*self.child.order(batch_size), *filter(None, [self.word()])]

    def offset_of(self, step: int) -> int:
        return self.child.offset_of(step) if self.by_row else step

    def step_of(self, offset: int) -> int:
        return self.child.step_of(offset) if self.by_row else offset

    def place(self, epoch: int, position: int) -> str:
        return self.child.place(epoch, position)

    def pool(self) -> Executor | None:
        return self.child.pool()

    def rebuilt(self, change: Callable[[Stage], Stage]) -> Stage:
        return replace(self, child=self.child.rebuilt(change))


class Reordered(Derived):
    """Elements of the child at other positions, which `origin` gives."""

    def origin(self, epoch: int, positions: Any) -> tuple[int, Any]:
        """Return the child's epoch and the positions there; `positions` is an int or an array."""
        raise NotImplementedError(type(self).__name__)

    def at(self, epoch: int, position: int, part: RowPart = WHOLE) -> Any:
        there, origin = self.origin(epoch, position)
        return self.child.at(there, int(origin), part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        return self.child.gather(*self.origin(epoch, positions))

    def place(self, epoch: int, position: int) -> str:
        there, origin = self.origin(epoch, position)
        return self.child.place(there, int(origin))


# -- what stages share -------------------------------------------------------------------------------------------------


def cut(batch: Any, part: RowPart = WHOLE) -> Any:
    """Return the rows of a batch that belong to a part, without a copy."""
    return batch if part.num_replicas == 1 else structure.rows(batch, part.of(structure.rows_of(batch)))


def force(items: Sequence[Item], pool: Executor | None) -> list[Any]:
    """Return the elements of items, in order; with a pool its threads make them."""
    return [item() for item in items] if pool is None else list(pool.map(lambda item: item(), items))


def gather_by(groups: numpy.ndarray, fetch: Callable[[int, Any], Any]) -> Any:
    """Return elements in the order asked for, of which `fetch` returns those of one group at some places together."""
    if (groups == groups[0]).all():
        return fetch(int(groups[0]), slice(None))
    order = numpy.argsort(groups, kind="stable")
    places = numpy.split(order, numpy.flatnonzero(numpy.diff(groups[order])) + 1)
    joined = structure.concatenate([fetch(int(groups[where[0]]), where) for where in places])
    if (order[1:] > order[:-1]).all():
        return joined
    inverse = numpy.argsort(order)
    return structure.map_leaves(lambda leaf: leaf[inverse], joined)


def as_array(positions: Positions) -> numpy.ndarray:
    """Return positions as an array."""
    return numpy.arange(positions.start, positions.stop) if isinstance(positions, range) else positions


def moved(positions: Positions, distance: int) -> Positions:
    """Return positions, all moved by a distance."""
    if isinstance(positions, range):
        return range(positions.start + distance, positions.stop + distance)
    return positions + distance


def spec_of(array: Any) -> ArraySpec:
    """Return shape and dtype of an array; of strings, only that they are strings."""
    array = structure.leaf_array(array)
    is_text = array.dtype.kind in "US"
    return ArraySpec(tuple(array.shape), numpy.dtype(array.dtype.kind) if is_text else array.dtype)


def row_spec(batch: Any) -> Any:
    """Return the specs of a row of a batch, or of the specs of a batch."""
    return structure.map_leaves(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), batch)


def shown(spec: Any) -> str:
    """Return the arrays of an element for messages: ``float32[2], label: int64[]``."""
    named = structure.paths(structure.map_leaves(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", spec))
    return ", ".join(f"{name}: {text}" if name.strip("0123456789") else text for name, text in named)


def with_rows(spec: Any, rows: int | None) -> Any:
    """Return the specs of a batch with another number of rows."""
    return structure.map_leaves(lambda leaf: ArraySpec((rows, *leaf.shape[1:]), leaf.dtype), spec)
