"""The user's functions: `Map` every element, `Filter` them."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpidist.errors import InputError
from mpidist.input import structure, walks
from mpidist.input.sharding import WHOLE, RowPart
from mpidist.input.sources import explained, name_of
from mpidist.input.stage import Derived, Item, Positions, Stage, cut, force


@dataclass(eq=False)
class Map(Derived):
    """What a function makes of every element."""

    function: Callable[..., Any]
    threads: int = 1
    by_rows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.by_row = self.child.by_row
        # its threads end when nobody refers to it any more
        threaded = self.threads > 1 and not self.batched
        self._pool = ThreadPoolExecutor(self.threads, "mpidist-map") if threaded else None

    def at(self, epoch: int, position: int, part: RowPart = WHOLE) -> Any:
        return self._mapped(partial(self.child.at, epoch, position), partial(self.place, epoch, position), part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        if self.batched:
            return super().gather(epoch, positions)
        columns = self.child.gather(epoch, positions)

        def mapped(number: int) -> Any:
            return self._call(structure.row(columns, number), lambda: self.place(epoch, int(positions[number])))

        return structure.stack(force([partial(mapped, number) for number in range(len(positions))], self.pool()))

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        for number, item in enumerate(self.child.items(epoch, start), start):
            yield partial(self._mapped, item, partial("element {}".format, number))

    def batches_from(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        if not self.by_row:
            yield from super().batches_from(epoch, offset)
            return
        for end, item in self.child.batches_from(epoch, offset):
            yield end, partial(self._mapped, item, partial("batch {}".format, self.step_of(end - 1)))

    def order(self, batch_size: bool = True) -> list[str]:
        return self.child.order(batch_size)

    def _mapped(self, item: Item, place: Callable[[], str], part: RowPart = WHOLE) -> Any:
        if self.by_rows and self.batched:
            return structure.to_arrays(self._call(item(part), place))
        mapped = self._call(item(), place)
        return cut(structure.to_arrays(mapped), part) if self.batched else mapped

    def _call(self, element: Any, place: Callable[[], str]) -> Any:
        return _called("map", self.function, element, place)

    def spec(self) -> Any:
        return Stage.spec(self)

    def pool(self) -> Executor | None:
        return self._pool or self.child.pool()

    def word(self) -> str:
        return f"map({name_of(self.function)})"


@dataclass(eq=False)
class Filter(Derived):
    """The elements of which a function says True; a stream, since only reading tells which they are."""

    predicate: Callable[..., Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.length = None
        self.indexed = False

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        return itertools.islice(self._kept(epoch), start, None)

    def _kept(self, epoch: int) -> Iterator[Item]:
        walk, kept = walks.current(), 0  # a checksum of the numbers of the elements kept
        for number, item in enumerate(self.child.items(epoch)):
            element, stage = item(), self.child if self.child.indexed else self
            if _called("filter", self.predicate, element, partial(stage.place, epoch, number)):
                kept = zlib.crc32(number.to_bytes(8, "little"), kept)
                walk.note(self, walks.Read(checksum=kept))
                yield partial(cut, element) if self.batched else partial(_given, element)

    def place(self, epoch: int, position: int) -> str:
        return f"element {position}"

    def word(self) -> str:
        return f"filter({name_of(self.predicate)})"


def maps_rows(stage: Stage) -> bool:
    """Return whether a function works row by row in an indexed stage: a rank then calls it for rows of its own only."""
    if isinstance(stage, Map) and (stage.by_rows or not stage.batched):
        return stage.indexed
    return any(map(maps_rows, stage.children))


def maps_batches(stage: Stage) -> bool:
    """Return whether a function works on whole batches, which may have another number of rows afterwards."""
    return (isinstance(stage, Map) and stage.batched and not stage.by_rows) or any(map(maps_batches, stage.children))


def _called(kind: str, function: Callable[..., Any], element: Any, place: Callable[[], str]) -> Any:
    """Return the result of a user's function on an element; InputError names both if it fails."""
    try:
        result = function(*element) if type(element) is tuple else function(element)
        return bool(result) if kind == "filter" else result
    except Exception as error:
        raise InputError(f"{kind}({name_of(function)}) of {place()} failed: {explained(error)}") from error


def _given(element: Any, part: RowPart = WHOLE) -> Any:
    return element
