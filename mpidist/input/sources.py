"""Sources in Python: `Arrays`, `Range`, `Generated` elements, and `Foreign` batches."""

from __future__ import annotations

import array
import copy
import itertools
import math
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy

from mpidist import arrays
from mpidist.errors import InputError
from mpidist.input import structure, walks
from mpidist.input.sharding import WHOLE, RowPart
from mpidist.input.stage import ArraySpec, Item, Positions, Stage, as_array, cut, row_spec, shown
from mpidist.input.walks import Read

#: A checksum covers about so many values of every array or list, and values of these types.
_MOST_CHECKED, _PLAIN = 64, (bool, int, float, str, bytes)

_AGAIN = "for several epochs give something that can be iterated again, such as a list or a DataLoader"


class Arrays(Stage):
    """The rows of arrays in memory."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = structure.to_arrays(arrays)
        shapes = [leaf.shape for leaf in structure.leaves(self.arrays)]
        if not shapes or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(f"a data set needs arrays with one common first dimension; got the shapes {shapes}")
        self.length = shapes[0][0]

    def gather(self, epoch: int, positions: Positions) -> Any:
        if isinstance(positions, range):
            wanted = slice(positions.start, positions.stop)
            return structure.map_leaves(lambda leaf: leaf[wanted].copy(), self.arrays)
        return structure.map_leaves(lambda leaf: leaf[positions], self.arrays)

    def at(self, epoch: int, position: int, part: RowPart = WHOLE) -> Any:
        return structure.copied(structure.row(self.arrays, position))

    def spec(self) -> Any:
        return row_spec(self.arrays)

    def order(self, batch_size: bool = True) -> list[str]:
        return [f"{self.length} rows of {shown(self.spec())}"]

    def place(self, epoch: int, position: int) -> str:
        return f"row {position}"


class Range(Stage):
    """The numbers of a range, as int64; without an end where `stop` is None."""

    def __init__(self, start: int, stop: int | None, step: int) -> None:
        self.start, self.step = start, step
        self.length = math.inf if stop is None else len(range(start, stop, step))

    def gather(self, epoch: int, positions: Positions) -> Any:
        return self.start + self.step * as_array(positions)

    def order(self, batch_size: bool = True) -> list[str]:
        rows = "numbers without an end" if self.length == math.inf else f"{self.length} rows"
        return [f"{rows} of a range from {self.start} by {self.step}"]

    def spec(self) -> Any:
        return ArraySpec((), numpy.dtype(numpy.int64))


class Generated(Stage):
    """What a function's iterable gives; the function is called again for every epoch."""

    indexed = False

    def __init__(
        self, generator_fn: Callable[..., Iterable[Any]], args: tuple[Any, ...] = (), signature: Any = None
    ) -> None:
        self.generator_fn, self.args, self.signature = generator_fn, args, signature
        self._walked: Any = None

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        elements = iter(self.generator_fn(*self.args))
        if elements is self._walked:
            raise InputError(
                f"the generator {name_of(self.generator_fn)} has returned the same {type(elements).__name__} again, of "
                "which elements were taken before: make a new one in the function, at every call"
            )
        self._walked, walk, seen = elements, walks.current(), 0
        for number in itertools.count():
            try:
                element = next(elements)
            except StopIteration:
                return
            except Exception as error:
                raise InputError(
                    f"the generator {name_of(self.generator_fn)} failed at element {number}: {explained(error)}"
                ) from error
            seen = checksum_of(element, seen)
            walk.note(self, Read(checksum=seen))
            if number >= start:
                yield partial(self._converted, structure.map_leaves(_kept, element), number)

    def _converted(self, element: Any, number: int, part: RowPart = WHOLE) -> Any:
        if self.signature is None:
            return structure.to_arrays(element)
        try:
            converted = structure.map_leaves(
                lambda spec, leaf: numpy.asarray(leaf, spec.dtype), self.signature, element
            )
            structure.map_leaves(_require_shape, self.signature, converted)
        except (ValueError, TypeError) as error:
            name = name_of(self.generator_fn)
            raise InputError(f"element {number} of the generator {name} is not as its signature: {error}") from error
        return converted

    def order(self, batch_size: bool = True) -> list[str]:
        return ["the elements of a generator"]

    def spec(self) -> Any:
        return super().spec() if self.signature is None else self.signature


class Foreign(Stage):
    """Batches that somebody else makes: any iterable of them, begun anew for every epoch."""

    indexed = False
    batched = True

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches
        self.length = length_of(batches)
        self._begun = False

    def stream(self, epoch: int, start: int) -> Iterator[Item]:
        batches, walk, read = self.batches, walks.current(), Read()
        expected = walk.expected
        if isinstance(batches, Iterator):
            if self._begun:
                raise InputError(f"a {type(batches).__name__} can be walked through once, and it was: {_AGAIN}")
            self._begun = True
        is_told = _tell_epoch(batches, epoch)
        number = -1
        for number, batch in enumerate(batches):
            if number == start and expected is not None:
                _check_passed(batches, start, expected, read, is_told)
            converted = self._converted(batch, number)
            read = Read(read.rows + structure.first_length(converted), checksum_of(converted, read.checksum))
            walk.note(self, read)
            if number >= start:
                yield partial(self._cut, converted, number)
        if number + 1 < start:
            raise InputError(
                f"{start} batches were seen when the position was saved, and this {type(batches).__name__} has only "
                f"{number + 1} now; go on with the batches that it had"
            )

    def _converted(self, batch: Any, number: int) -> Any:
        try:
            return structure.from_batch(batch)
        except (TypeError, ValueError) as error:
            raise self._no_batch(number, error) from error

    def _cut(self, converted: Any, number: int, part: RowPart = WHOLE) -> Any:
        if part is WHOLE:  # an element of a rank's own need not have rows
            return converted
        try:
            structure.rows_of(converted)
        except ValueError as error:
            raise self._no_batch(number, error) from error
        return cut(converted, part)

    def _no_batch(self, number: int, error: Exception) -> InputError:
        return InputError(f"batch {number} of a {type(self.batches).__name__} is no batch of rows: {error}")

    def order(self, batch_size: bool = True) -> list[str]:
        count = "" if self.length is None else f"{self.length} "
        size = getattr(self.batches, "batch_size", None)
        rows = f" of {size} rows" if isinstance(size, int) else ""
        return [f"{count}batches{rows} of a {type(self.batches).__name__}"]

    def spec(self) -> Any:
        if isinstance(self.batches, Iterator):
            raise TypeError(f"a {type(self.batches).__name__} does not tell what it will give: it has no element_spec")
        return super().spec()


def _tell_epoch(batches: Any, epoch: int) -> bool:
    """Call ``set_epoch(epoch)`` of a loader and its samplers; return whether there is one."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    owners = [batches, getattr(batches, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    setters = {id(owner): owner.set_epoch for owner in owners if callable(getattr(owner, "set_epoch", None))}
    for set_epoch in setters.values():
        set_epoch(epoch)
    return bool(setters)


def _check_passed(batches: Any, count: int, expected: Read, found: Read, is_told: bool) -> None:
    """Refuse batches of other sizes than those seen before a position; warn if they are, or may be, other rows."""
    kind = type(batches).__name__
    if found.rows != expected.rows:
        raise InputError(
            f"the first {count} batches had {expected.rows} rows when the position was saved, and those of this {kind} "
            f"have {found.rows} now; go on with the batch size that it had, or at the beginning of an epoch"
        )
    if found.checksum == expected.checksum and (found.checksum or is_told):
        return
    how = "gives other batches now" if found.checksum else "may give other batches now (they cannot be compared)"
    warnings.warn(
        f"a {kind} {how} than the {count} that were seen of this epoch: rows may come again, or be left out. Give it "
        "a sampler with `set_epoch`, which is told the epoch, or shuffle with a generator that is seeded by the epoch",
        RuntimeWarning,
        stacklevel=2,
    )


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
    return zlib.crc32(arrays.on_host(some).tobytes(), start)


def _stride(length: int) -> int:
    """Return the step by which to look at about `_MOST_CHECKED` values; odd, so that it strays through the columns."""
    return length // _MOST_CHECKED | 1


def _kept(leaf: Any) -> Any:
    """Return a copy of what the generator may write to when it goes on: many fill one buffer again and again."""
    if isinstance(leaf, (*_PLAIN, numpy.generic)):
        return leaf
    if isinstance(leaf, list):
        return [_kept(item) for item in leaf]
    if arrays.is_foreign(leaf):
        leaf = arrays.to_array(leaf)
    return copy.copy(leaf) if isinstance(leaf, array.array) or arrays.is_known(leaf) else leaf


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
    """Return the text of an error for a message."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def name_of(function: Any) -> str:
    """Return the name of a user's function for a message."""
    # a ufunc of an older NumPy has the short name only
    return getattr(function, "__qualname__", getattr(function, "__name__", type(function).__name__))
