"""Elements kept in memory when they have been made once; and elements made ahead of time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy

from mpidist.input import structure
from mpidist.input.node import Derived, Item, Node, Positions
from mpidist.input.sharding import WHOLE, Part


@dataclass(frozen=True, eq=False)
class Cache(Derived):
    """The elements of the child's epoch 0, kept: of an indexed child those that this rank has asked for.

    Parameters
    ----------
    child : Node
    """

    child: Node

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("by_row", self.child.by_row and self.child.indexed)
        # place -> element; (place, part) of a batch -> it and the rows of the whole; None -> all items of a stream
        self._set("_kept", {})

    def at(self, epoch: int, position: int, part: Part = WHOLE) -> Any:
        """Return a copy of an element."""
        key, kept = (position, part), self._kept  # type: ignore[attr-defined]
        if not self.batched:
            return _copy(structure.map_leaves(lambda leaf: leaf[0], self.gather(epoch, range(position, position + 1))))
        if key not in kept:
            element = self.child.at(0, position, part)
            kept[key] = element, part.rows
        return _taken(kept[key], part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        """Return copies of rows; those that are not kept yet are read together."""
        if self.batched:
            return super().gather(epoch, positions)
        kept, wanted = self._kept, list(map(int, positions))  # type: ignore[attr-defined]
        missing = [position for position in dict.fromkeys(wanted) if position not in kept]
        if missing:
            rows = self.child.gather(0, numpy.array(missing))
            kept.update(
                (position, structure.map_leaves(lambda leaf: leaf[row], rows))  # noqa: B023 - used at once
                for row, position in enumerate(missing)
            )
        return structure.stack([kept[position] for position in wanted])

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the items, each made once; an epoch that was walked to its end is kept."""
        kept = self._kept  # type: ignore[attr-defined]
        if None in kept:
            yield from kept[None][start:]
            return
        items: list[Item] = []
        for item in self.child.items(0):
            items.append(_Once(item))
            if len(items) > start:
                yield items[-1]
        kept[None] = items

    def batches_from(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        """Yield the batches; those that do not begin with the epoch may be cut otherwise, and are made anew."""
        if not self.by_row:
            return super().batches_from(epoch, offset)
        made = self.child.batches_from(0, offset)
        return made if offset else ((end, partial(self.at, epoch, n)) for n, (end, _) in enumerate(made))

    def word(self) -> str:
        """Return the method that made it."""
        return "cache()"


class _Once:
    """An item that is made once for every part of it, and given out as copies."""

    def __init__(self, item: Item) -> None:
        self._item = item
        self._made: dict[Part, tuple[Any, int | None]] = {}

    def __call__(self, part: Part = WHOLE) -> Any:
        if part not in self._made:
            element = self._item() if part is WHOLE else self._item(part)
            self._made[part] = element, part.rows
        return _taken(self._made[part], part)


def _taken(kept: tuple[Any, int | None], part: Part) -> Any:
    """Return a copy of what was kept for a part, which gets to know of how many rows it is."""
    element, rows = kept
    if rows is not None:
        part.of(rows)
    return _copy(element)


def _copy(element: Any) -> Any:
    return structure.map_leaves(lambda leaf: leaf.copy() if hasattr(leaf, "copy") else leaf, element)


@dataclass(frozen=True, eq=False)
class Prefetch(Derived):
    """The elements, of which the data set's iterators make some ahead of time in a thread.

    Parameters
    ----------
    child : Node
    count : int
    """

    child: Node
    count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("by_row", self.child.by_row)
        self._set("ahead", max(self.count, self.child.ahead))

    def at(self, epoch: int, position: int, part: Part = WHOLE) -> Any:
        """Return the child's."""
        return self.child.at(epoch, position, part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        """Return the child's."""
        return self.child.gather(epoch, positions)

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the child's."""
        return itertools.chain(self.child.items(epoch, start))

    def batches_from(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        """Yield the child's."""
        return self.child.batches_from(epoch, offset)
