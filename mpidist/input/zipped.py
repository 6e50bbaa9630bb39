"""Several data sets side by side, and one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from mpidist.input import structure
from mpidist.input.node import Item, Length, Node, Positions, as_array, gather_by
from mpidist.input.sharding import WHOLE, Part


class Zip(Node):
    """Elements that are structures of the elements of several nodes; as many as the shortest has.

    Parameters
    ----------
    nodes : nested tuples and dicts of Node
    """

    def __init__(self, nodes: Any) -> None:
        self.nodes = nodes
        self.children = tuple(structure.leaves(nodes))
        if not self.children:
            raise ValueError("zip needs at least one data set")
        lengths = [child.length for child in self.children]
        self.indexed = all(child.indexed for child in self.children)
        self.length = None if None in lengths else min(lengths)  # type: ignore[type-var]
        sizes = {child.batch_size for child in self.children}
        self.batched = all(child.batched for child in self.children) and len(sizes) == 1
        self.batch_size = sizes.pop() if self.batched else None
        self.drop_remainder = self.batched and any(child.drop_remainder for child in self.children)
        self.ahead = max(child.ahead for child in self.children)

    def at(self, epoch: int, position: int, part: Part = WHOLE) -> Any:
        """Return the elements at one position."""
        return self._each(lambda node: node.at(epoch, position, part) if node.batched else node.at(epoch, position))

    def gather(self, epoch: int, positions: Positions) -> Any:
        """Return the rows at these positions."""
        return self._each(lambda node: node.gather(epoch, positions))

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the items until one of the nodes is out of them."""
        for items in zip(*(child.items(epoch, start) for child in self.children), strict=False):
            yield partial(self._made, items)

    def _made(self, items: tuple[Item, ...], part: Part = WHOLE) -> Any:
        of = dict(zip(map(id, self.children), items, strict=True))
        return self._each(lambda node: of[id(node)]() if part is WHOLE else of[id(node)](part))

    def _each(self, function: Callable[[Node], Any]) -> Any:
        return structure.map_leaves(function, self.nodes)

    def spec(self) -> Any:
        """Return those of the nodes."""
        return self._each(lambda node: node.spec())

    def words(self) -> list[str]:
        """Return what is done to the elements of each."""
        inside = (f"{path}: {', '.join(node.words()) or 'as it is'}" for path, node in structure.paths(self.nodes))
        return [f"zip({'; '.join(inside)})"]

    def order(self, batch_size: bool = True) -> list[str]:
        """Return all that decides the order of each."""
        inside = (f"{path}: {', '.join(node.order())}" for path, node in structure.paths(self.nodes))
        return [f"zip({'; '.join(inside)})"]

    def rebuilt(self, change: Callable[[Node], Node]) -> Node:
        """Return the tree with other sources."""
        return Zip(self._each(lambda node: node.rebuilt(change)))


class Concatenate(Node):
    """The elements of one node, and then those of another.

    Parameters
    ----------
    first, second : Node
    """

    def __init__(self, first: Node, second: Node) -> None:
        self.children = (first, second)
        self.indexed = first.indexed and second.indexed
        self.length = _sum(first.length, second.length)
        self.batched = first.batched and second.batched
        self.batch_size = first.batch_size if first.batch_size == second.batch_size else None
        self.drop_remainder = first.drop_remainder and second.drop_remainder and self.batch_size is not None
        self.ahead = max(first.ahead, second.ahead)

    def _origin(self, position: int) -> tuple[Node, int]:
        first, second = self.children
        length = first.length or 0
        return (first, position) if position < length else (second, position - int(length))

    def at(self, epoch: int, position: int, part: Part = WHOLE) -> Any:
        """Return an element of one of the two."""
        node, inside = self._origin(position)
        return node.at(epoch, inside, part)

    def gather(self, epoch: int, positions: Positions) -> Any:
        """Return elements of the two."""
        first, second = self.children
        if first.length == math.inf:
            return first.gather(epoch, positions)
        length = int(first.length or 0)
        positions = as_array(positions)
        in_second = (positions >= length).astype(int)
        inside = positions - length * in_second
        return gather_by(in_second, lambda group, at: (first, second)[group].gather(epoch, inside[at]))

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the items of the first, and then of the second."""
        first, second = self.children
        seen = min(start, int(first.length)) if first.length not in (None, math.inf) else 0
        for item in first.items(epoch, seen):
            seen += 1
            if seen > start:
                yield item
        yield from second.items(epoch, max(start - seen, 0))

    def spec(self) -> Any:
        """Return that of the first."""
        return self.children[0].spec()

    def words(self) -> list[str]:
        """Return what is done to the elements of each."""
        inside = "; ".join(", ".join(child.words()) or "as it is" for child in self.children)
        return [f"concatenate({inside})"]

    def order(self, batch_size: bool = True) -> list[str]:
        """Return all that decides the order of each."""
        return [f"concatenate({'; '.join(', '.join(child.order()) for child in self.children)})"]

    def place(self, epoch: int, position: int) -> str:
        """Return how one of the two calls it."""
        node, inside = self._origin(position)
        return node.place(epoch, inside)

    def rebuilt(self, change: Callable[[Node], Node]) -> Node:
        """Return the tree with other sources."""
        return Concatenate(*(child.rebuilt(change) for child in self.children))


def _sum(first: Length, second: Length) -> Length:
    return None if first is None or second is None else first + second
