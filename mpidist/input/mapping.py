"""The user's functions: `Map` every element, `Filter` them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from mpidist.errors import InputError
from mpidist.input import structure
from mpidist.input.node import Derived, Item, Node, Positions, cut
from mpidist.input.sharding import WHOLE, Part
from mpidist.input.sources import explained, name_of


@dataclass(frozen=True, eq=False)
class Map(Derived):
    """What a function makes of every element.

    Parameters
    ----------
    child : Node
    function : callable
        A tuple's items are its arguments; anything else is the only one.
    threads : int
        How many rows of a batch are mapped at the same time.
    by_rows : bool
        Whether of a batch it may be given some rows only.
    """

    child: Node
    function: Callable[..., Any]
    threads: int = 1
    by_rows: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("by_row", self.child.by_row)
        # its threads end when nobody refers to it any more
        threaded = self.threads > 1 and not self.batched
        self._set("_pool", ThreadPoolExecutor(self.threads, "mpidist-map") if threaded else None)

    def at(self, epoch: int, position: int, part: Part = WHOLE) -> Any:
        """Return a mapped element; only the part of a batch where the function works by rows."""
        return self._mapped(partial(self.child.at, epoch, position), partial(self.place, epoch, position), part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        """Return mapped rows, in order; with threads, several are mapped at the same time."""
        if self.batched:
            return super().gather(epoch, positions)
        columns = self.child.gather(epoch, positions)

        def mapped(number: int) -> Any:
            row = structure.map_leaves(lambda leaf: leaf[number], columns)
            return self._call(row, lambda: self.place(epoch, int(positions[number])))

        pool: Executor | None = self.pool()
        numbers = range(len(positions))
        return structure.stack([mapped(n) for n in numbers] if pool is None else list(pool.map(mapped, numbers)))

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield items that are mapped when they are asked for."""
        for number, item in enumerate(self.child.items(epoch, start), start):
            yield partial(self._mapped, item, partial("element {}".format, number))

    def batches_from(self, epoch: int, offset: int) -> Iterator[tuple[int, Item]]:
        """Yield the child's batches, mapped when they are asked for."""
        if not self.by_row:
            yield from super().batches_from(epoch, offset)
            return
        for end, item in self.child.batches_from(epoch, offset):
            yield end, partial(self._mapped, item, partial(self._batch_before, end))

    def _batch_before(self, end: int) -> str:
        return f"batch {self.step_of(end - 1)}"

    def order(self, batch_size: bool = True) -> list[str]:
        """Return the child's: the function decides nothing about the order."""
        return self.child.order(batch_size)

    def _mapped(self, item: Item, place: Callable[[], str], part: Part = WHOLE) -> Any:
        if self.by_rows and self.batched:
            return structure.to_arrays(self._call(item(part), place))
        mapped = self._call(item(), place)
        return cut(structure.to_arrays(mapped), part) if self.batched else mapped

    def _call(self, element: Any, place: Callable[[], str]) -> Any:
        try:
            return self.function(*element) if type(element) is tuple else self.function(element)
        except Exception as error:
            raise InputError(f"map({name_of(self.function)}) of {place()} failed: {explained(error)}") from error

    def spec(self) -> Any:
        """Return what the first element is mapped to."""
        return Node.spec(self)

    def pool(self) -> Executor | None:
        """Return its threads, or the child's."""
        return self._pool or self.child.pool()  # type: ignore[attr-defined]

    def word(self) -> str:
        """Return it with the name of the function."""
        return f"map({name_of(self.function)})"


@dataclass(frozen=True, eq=False)
class Filter(Derived):
    """The elements of which a function says True; a stream, since only reading tells which they are.

    Parameters
    ----------
    child : Node
    predicate : callable
    """

    child: Node
    predicate: Callable[..., Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("length", None)
        self._set("indexed", False)

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the elements kept; those before `start` are read and passed over."""
        return itertools.islice(self._kept(epoch), start, None)

    def _kept(self, epoch: int) -> Iterator[Item]:
        for number, item in enumerate(self.child.items(epoch)):
            element = item()
            try:
                keep = bool(self.predicate(*element) if type(element) is tuple else self.predicate(element))
            except Exception as error:
                name = name_of(self.predicate)
                place = self.child.place(epoch, number) if self.child.indexed else f"element {number}"
                raise InputError(f"filter({name}) of {place} failed: {explained(error)}") from error
            if keep:
                yield partial(cut, element) if self.batched else partial(_given, element)

    def place(self, epoch: int, position: int) -> str:
        """Return the number among the elements kept."""
        return f"element {position}"

    def word(self) -> str:
        """Return it with the name of the function."""
        return f"filter({name_of(self.predicate)})"


def _given(element: Any, part: Part = WHOLE) -> Any:
    return element
