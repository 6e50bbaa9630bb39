"""Sources in memory and of Python's making: arrays, a range of numbers, generators, and anybody's batches."""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy

from mpidist import arrays
from mpidist.errors import InputError
from mpidist.input import structure
from mpidist.input.node import ArraySpec, Item, Node, Positions, as_array, cut
from mpidist.input.sharding import WHOLE, Part

#: Of every array, and of every list, so many values go into a checksum; and what else does.
_MOST_CHECKED, _PLAIN = 64, (bool, int, float, str, bytes)

_AGAIN = "for several epochs give something that can be iterated again, such as a list or a DataLoader"


class Arrays(Node):
    """The rows of arrays in memory.

    Parameters
    ----------
    arrays : array, or nested tuples and dicts of arrays
        All with the same first dimension.
    """

    def __init__(self, arrays: Any) -> None:
        self.arrays = structure.to_arrays(arrays)
        shapes = [leaf.shape for leaf in structure.leaves(self.arrays)]
        if not shapes or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(f"a data set needs arrays with one common first dimension; got the shapes {shapes}")
        self.length = shapes[0][0]

    def gather(self, epoch: int, positions: Positions) -> Any:
        """Return copies of these rows."""
        if isinstance(positions, range):
            wanted = slice(positions.start, positions.stop)
            return structure.map_leaves(lambda leaf: leaf[wanted].copy(), self.arrays)
        return structure.map_leaves(lambda leaf: leaf[positions], self.arrays)

    def at(self, epoch: int, position: int, part: Part = WHOLE) -> Any:
        """Return a copy of a row."""
        return structure.map_leaves(lambda leaf: leaf[position].copy(), self.arrays)

    def spec(self) -> Any:
        """Return what the rows are."""
        return structure.map_leaves(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), self.arrays)

    def place(self, epoch: int, position: int) -> str:
        """Return the number of the row."""
        return f"row {position}"


class Range(Node):
    """The numbers of a range, as int64; without an end where `stop` is None."""

    def __init__(self, start: int, stop: int | None, step: int) -> None:
        self.start, self.step = start, step
        self.length = math.inf if stop is None else len(range(start, stop, step))

    def gather(self, epoch: int, positions: Positions) -> Any:
        """Return the numbers."""
        return self.start + self.step * as_array(positions)

    def spec(self) -> Any:
        """Return that of a number."""
        return ArraySpec((), numpy.dtype(numpy.int64))


class Generated(Node):
    """What a function's iterable gives; the function is called again for every epoch.

    Parameters
    ----------
    generator_fn : callable
    args : tuple
    signature : nested ArraySpec or None
        What the elements are to be made.

    Attributes
    ----------
    seen : int
        A checksum of what was read in this epoch, from its beginning: ranks must have the same.
    """

    indexed = False

    def __init__(
        self, generator_fn: Callable[..., Iterable[Any]], args: tuple[Any, ...] = (), signature: Any = None
    ) -> None:
        self.generator_fn, self.args, self.signature = generator_fn, args, signature
        self.seen = 0

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the elements; those before `start` are generated and passed over."""
        elements = iter(self.generator_fn(*self.args))
        self.seen = 0
        for number in itertools.count():
            try:
                element = next(elements)
            except StopIteration:
                return
            except Exception as error:
                raise InputError(
                    f"the generator {name_of(self.generator_fn)} failed at element {number}: {explained(error)}"
                ) from error
            self.seen = checksum_of(element, self.seen)
            if number >= start:
                yield partial(self._converted, element, number)

    def _converted(self, element: Any, number: int, part: Part = WHOLE) -> Any:
        if self.signature is None:
            return structure.to_arrays(element)
        try:
            found = structure.map_leaves(lambda spec, leaf: numpy.asarray(leaf, spec.dtype), self.signature, element)
            structure.map_leaves(_require_shape, self.signature, found)
        except (ValueError, TypeError) as error:
            name = name_of(self.generator_fn)
            raise InputError(f"element {number} of the generator {name} is not as its signature: {error}") from error
        return found

    def spec(self) -> Any:
        """Return the signature, or what the first element is."""
        return super().spec() if self.signature is None else self.signature


class Foreign(Node):
    """Batches that somebody else makes: any iterable of them, begun anew for every epoch.

    Parameters
    ----------
    batches : iterable
        A list, a PyTorch DataLoader, ...; lists of arrays inside a batch are taken as tuples.

    Attributes
    ----------
    seen : int
        As of `Generated`.
    """

    indexed = False
    batched = True

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self.length = length_of(batches)
        self.seen = 0
        self._begun = False

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        """Yield the batches; those before `start` are passed over."""
        self.seen = 0
        if isinstance(self.batches, Iterator):
            if self._begun:
                raise InputError(f"a {type(self.batches).__name__} can be walked through once, and it was: {_AGAIN}")
            self._begun = True
        for number, batch in enumerate(self.batches):
            converted = self._converted(batch, number)
            self.seen = checksum_of(converted, self.seen)
            if number >= start:
                yield partial(cut, converted)

    def _converted(self, batch: Any, number: int) -> Any:
        try:
            converted = structure.from_batch(batch)
            structure.rows_of(converted)
        except (TypeError, ValueError) as error:
            kind = type(self.batches).__name__
            raise InputError(f"batch {number} of a {kind} is no batch of rows: {error}") from error
        return converted

    def spec(self) -> Any:
        """Return what the first batch is."""
        if isinstance(self.batches, Iterator):
            raise TypeError(f"a {type(self.batches).__name__} does not tell what it will give: it has no element_spec")
        return super().spec()


def checksum_of(element: Any, start: int = 0) -> int:
    """Return the CRC-32 of some values of every array of an element: enough to tell one element from another."""
    if isinstance(element, dict):
        element = tuple(element.values())
    if isinstance(element, (list, tuple)):
        for item in element[:: _stride(len(element))]:
            start = checksum_of(item, start)
        return start
    if arrays.is_foreign(element):
        element = arrays.to_array(element)
    if not arrays.is_known(element):
        return zlib.crc32(repr(element).encode(), start) if isinstance(element, _PLAIN) else start
    if element.dtype.names:  # between fields there may be anything
        return checksum_of([element[name] for name in element.dtype.names], start)
    flat = element.reshape(-1) if element.flags.c_contiguous else element.flat
    some = flat[:: _stride(element.size)]
    if element.dtype.hasobject:
        return checksum_of(some.tolist(), start)
    return zlib.crc32((arrays.as_host(some) if arrays.is_device(some) else some).tobytes(), start)


def _stride(length: int) -> int:
    """Return the step by which to look at about `_MOST_CHECKED` values; odd, so that it strays through the columns."""
    return length // _MOST_CHECKED | 1


def _require_shape(spec: ArraySpec, array: Any) -> None:
    if len(spec.shape) != array.ndim or any(n not in (None, m) for n, m in zip(spec.shape, array.shape, strict=True)):
        raise ValueError(f"its shape is {array.shape}, expected {spec.shape}")


def length_of(batches: Iterable[Any]) -> int | None:
    """Return the number of batches, where the iterable tells."""
    try:
        return len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def explained(error: BaseException) -> str:
    """Return how a message shows the cause of a failure."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def name_of(function: Any) -> str:
    """Return how a message calls a function of the user's."""
    return getattr(function, "__qualname__", type(function).__name__)
