"""`Cache`: elements that are made once, and kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy

from mpidist.input import structure
from mpidist.input.sharding import WHOLE, RowPart
from mpidist.input.stage import Derived, Item, Positions


@dataclass(eq=False)
class Cache(Derived):
    """The elements of the child's epoch 0, kept: of an indexed child those that this rank has asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.by_row = self.child.by_row and self.child.indexed
        # position -> element; of a batch -> `_SharedItem`; None -> all items of a stream
        self._kept: dict[Any, Any] = {}

    def at(self, epoch: int, position: int, part: RowPart = WHOLE) -> Any:
        if not self.batched:
            return super().at(epoch, position, part)
        if position not in self._kept:
            self._kept[position] = _SharedItem(partial(self.child.at, 0, position))
        return self._kept[position](part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        if self.batched:
            return super().gather(epoch, positions)
        kept, wanted = self._kept, list(map(int, positions))
        missing = [position for position in dict.fromkeys(wanted) if position not in kept]
        if missing:
            rows = self.child.gather(0, numpy.array(missing))
            kept.update((position, structure.row(rows, number)) for number, position in enumerate(missing))
        return structure.stack([kept[position] for position in wanted])

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        if None in self._kept:
            yield from self._kept[None][start:]
            return
        items: list[Item] = []
        for item in self.child.items(0):
            items.append(_SharedItem(item))
            if len(items) > start:
                yield items[-1]
        self._kept[None] = items

    def batches_from(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        if not self.by_row:
            return super().batches_from(epoch, offset)
        made = self.child.batches_from(0, offset)
        return made if offset else ((end, partial(self.at, epoch, n)) for n, (end, _) in enumerate(made))

    def word(self) -> str:
        return "cache()"


class _SharedItem:
    """An item that is made once for every part of it, and given out as copies."""

    def __init__(self, item: Item) -> None:
        self._item = item
        self._made: dict[RowPart, tuple[Any, int | None]] = {}

    def __call__(self, part: RowPart = WHOLE) -> Any:
        if part not in self._made:
            element = self._item() if part is WHOLE else self._item(part)
            self._made[part] = element, part.rows
        element, rows = self._made[part]
        if rows is not None:
            part.of(rows)  # a part that measures gets to know of how many rows it is
        return structure.copied(element)
