"""`Zip`: data sets side by side.  `Concatenate`: one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy

from mpidist.input import structure
from mpidist.input.sharding import WHOLE, RowPart
from mpidist.input.stage import Item, Positions, Stage, as_array, gather_by


class Zip(Stage):
    """Elements that are structures of the elements of several stages; as many as the shortest has."""

    def __init__(self, stages: Any) -> None:
        self.stages = stages
        self.children = tuple(structure.leaves(stages))
        if not self.children:
            raise ValueError("zip needs at least one data set")
        lengths = [child.length for child in self.children]
        self.indexed = all(child.indexed for child in self.children)
        self.length = None if None in lengths else min(lengths)  # type: ignore[type-var]
        sizes = {child.batch_size for child in self.children}
        self.batched = all(child.batched for child in self.children) and len(sizes) == 1
        self.batch_size = sizes.pop() if self.batched else None
        self.drop_remainder = self.batched and any(child.drop_remainder for child in self.children)

    def at(self, epoch: int, position: int, part: RowPart = WHOLE) -> Any:
        parts = (part,) if self.batched else ()
        return self._side_by_side([stage.at(epoch, position, *parts) for stage in self.children])

    def gather(self, epoch: int, positions: Positions) -> Any:
        return self._each(lambda stage: stage.gather(epoch, positions))

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        for items in zip(*(child.items(epoch, start) for child in self.children), strict=False):
            yield partial(self._made, items)

    def _made(self, items: tuple[Item, ...], part: RowPart = WHOLE) -> Any:
        return self._side_by_side([item() if part is WHOLE else item(part) for item in items])

    def _side_by_side(self, elements: list[Any]) -> Any:
        """Return the elements of the stages in one; ValueError if they are batches of different numbers of rows."""
        if self.batched:
            has_rows = [each for each in elements if any(map(numpy.ndim, structure.leaves(each)))]
            lengths = list(map(structure.first_length, has_rows))
            if len({*lengths}) > 1:
                raise ValueError(
                    f"batches side by side have {lengths} rows; zip the rows and make batches of them: "
                    "`Dataset.zip(...).batch(...)`"
                )
        left = iter(elements)
        return self._each(lambda stage: next(left))

    def _each(self, function: Callable[[Stage], Any]) -> Any:
        return structure.map_leaves(function, self.stages)

    def spec(self) -> Any:
        return self._each(lambda stage: stage.spec())

    def words(self) -> list[str]:
        inside = (f"{path}: {', '.join(stage.words()) or 'as it is'}" for path, stage in structure.paths(self.stages))
        return [f"zip({'; '.join(inside)})"]

    def order(self, batch_size: bool = True) -> list[str]:
        inside = (f"{path}: {', '.join(stage.order())}" for path, stage in structure.paths(self.stages))
        return [f"zip({'; '.join(inside)})"]

    def rebuilt(self, change: Callable[[Stage], Stage]) -> Stage:
        return Zip(self._each(lambda stage: stage.rebuilt(change)))


class Concatenate(Stage):
    """The elements of one stage that ends, and then those of another."""

    def __init__(self, first: Stage, second: Stage) -> None:
        self.children = (first, second)
        self.indexed = first.indexed and second.indexed
        self.length = None if first.length is None or second.length is None else first.length + second.length
        self.batched = first.batched and second.batched
        self.batch_size = first.batch_size if first.batch_size == second.batch_size else None
        self.drop_remainder = first.drop_remainder and second.drop_remainder and self.batch_size is not None
        if self.indexed and first.length and second.length:
            _require_alike(*(structure.map_leaves(structure.dtype_name, child.spec()) for child in self.children))

    def _origin(self, position: int) -> tuple[Stage, int]:
        first, second = self.children
        length = first.length or 0
        return (first, position) if position < length else (second, position - int(length))

    def at(self, epoch: int, position: int, part: RowPart = WHOLE) -> Any:
        stage, inside = self._origin(position)
        return stage.at(epoch, inside, part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        first, second = self.children
        length = int(first.length or 0)
        positions = as_array(positions)
        in_second = (positions >= length).astype(int)
        inside = positions - length * in_second
        return gather_by(in_second, lambda group, at: (first, second)[group].gather(epoch, inside[at]))

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        first, second = self.children
        seen = min(start, int(first.length or 0))
        for item in first.items(epoch, seen):
            seen += 1
            if seen > start:
                yield item
        yield from second.items(epoch, max(start - seen, 0))

    def spec(self) -> Any:
        return self.children[0].spec()

    def words(self) -> list[str]:
        inside = "; ".join(", ".join(child.words()) or "as it is" for child in self.children)
        return [f"concatenate({inside})"]

    def order(self, batch_size: bool = True) -> list[str]:
        return [f"concatenate({'; '.join(', '.join(child.order()) for child in self.children)})"]

    def place(self, epoch: int, position: int) -> str:
        stage, inside = self._origin(position)
        return stage.place(epoch, inside)

    def rebuilt(self, change: Callable[[Stage], Stage]) -> Stage:
        return Concatenate(*(child.rebuilt(change) for child in self.children))


def _require_alike(first: Any, second: Any) -> None:
    """Raise TypeError where the names of dtypes differ: each rank would have the dtypes of its own rows."""
    if first != second:
        raise TypeError(
            f"concatenate needs elements of one structure and dtype, got {first} and then {second}; "
            "convert one of the two with `map`"
        )
