"""`Agreement`: the comparison of data sets between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.mismatch import fact
from mpidist.errors import CollectiveMismatchError
from mpidist.input import structure
from mpidist.input.dataset import Dataset
from mpidist.input.files import FileRows
from mpidist.input.mapping import Filter
from mpidist.input.options import AutoShardPolicy
from mpidist.input.sources import Arrays, Foreign, Generated
from mpidist.input.stage import Stage

#: Arrays (name, dtype, shape), and facts in the same form.
Facts = list[tuple[str, Any, tuple[int, ...]]]

#: Checksums cover about so many bytes of all arrays together, and parts of at least so many rows.
_MOST_BYTES = 1 << 18
_LEAST_ROWS = 16

#: The most files whose rows a message lists.
_MOST_FILES = 8

#: The end of every message about data sets that differ.
ADVICE = (
    "Every rank must make the same data set, of all rows (give random generators a seed that does not depend on the "
    "rank), and gets its own part of each batch out of it; for data that differ by rank there is "
    "`distribute_datasets_from_function`"
)


class Agreement:
    """The ranks that share a data set: they compare it and exchange notes about it."""

    def __init__(self, communicator: Communicator | None = None, timeout_seconds: float | None = None) -> None:
        self._communicator = communicator if communicator is not None and communicator.size > 1 else None
        self._timeout_seconds = timeout_seconds

    @property
    def needed(self) -> bool:
        """Whether there is another rank."""
        return self._communicator is not None

    def compare(self, name: str, facts: Facts, advice: str = ADVICE) -> None:
        """Raise CollectiveMismatchError on all ranks unless they have the same facts.  Collective."""
        if self._communicator is None:
            return
        try:
            self._communicator.check(self._communicator.call(name, facts), self._timeout_seconds)
        except CollectiveMismatchError as error:
            raise CollectiveMismatchError(f"{error}. {advice}") from None

    def largest(self, values: numpy.ndarray) -> numpy.ndarray:
        """Return the element-wise maximum over all ranks, in place.  Collective."""
        if self._communicator is not None:
            self._communicator.all_reduce(values, "max", timeout_seconds=self._timeout_seconds)
        return values

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        """Return the payload of every rank, in rank order.  Collective."""
        if self._communicator is None:
            return [payload]
        return self._communicator.exchange(payload, what, self._timeout_seconds)


# -- what is compared once ---------------------------------------------------------------------------------------------


def described(dataset: Any) -> Facts:
    """Return the arrays of a data set, with all their rows, and its facts, for `Agreement.compare`.  Local."""
    if not isinstance(dataset, Dataset):
        return [fact("type", type(dataset).__name__)]
    policy = dataset.options().experimental_distribute.auto_shard_policy
    facts = [
        fact("type", "Dataset"),
        *([] if policy is AutoShardPolicy.AUTO else [fact("auto_shard_policy", policy.name)]),
        fact("batch size", dataset.batch_size),
    ]
    if policy in (AutoShardPolicy.OFF, AutoShardPolicy.HINT):  # each rank may have rows of its own
        return facts
    facts += [fact("drop_remainder", dataset.drop_remainder), fact("order of the rows", _order(dataset._stage))]
    sources = list(dataset._stage.sources())
    titles = [f" of source {number}" for number in range(len(sources))] if len(sources) > 1 else [""]
    named = list(zip(titles, sources, strict=True))
    tensors = [tensor for title, source in named for tensor in _tensors(title, source)]
    most_bytes = _MOST_BYTES // max(len(tensors), 1)
    return [*tensors, *facts, *(each for title, source in named for each in _contents(title, source, most_bytes))]


def _order(stage: Stage) -> str:
    words = stage.words()
    if words and words[-1].startswith("batch("):  # it has facts of its own
        words.pop()
    return ", ".join(words) or "as they are"


def _tensors(title: str, source: Stage) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield the arrays of a source by name, with all their rows."""
    if isinstance(source, Arrays):
        for path, leaf in _sorted_paths(source.arrays):
            yield f"array {path}".rstrip() + title, leaf.dtype, leaf.shape
    elif isinstance(source, FileRows):
        for path, spec in _sorted_paths(source.spec()):
            yield f"array {path}".rstrip() + title, spec.dtype, (int(source.length or 0), *spec.shape)


def _contents(title: str, source: Stage, most_bytes: int) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield facts about the data of a source: checksums of some rows, the names of files."""
    if isinstance(source, FileRows):
        rows = [table.rows for table in source.tables]
        shown = ", ".join(map(str, rows[:_MOST_FILES])) + (", ..." if len(rows) > _MOST_FILES else "")
        yield fact(f"files{title}", f"{len(rows)} with {shown} rows")
    for path, leaf in _sorted_paths(_some_rows(source)):
        # bytes that are addresses, or padding between fields, mean nothing on other ranks
        if not leaf.dtype.hasobject and not leaf.dtype.names:
            name = f"checksum of the data in array {path}".rstrip() + title
            yield fact(name, f"{checksum(leaf, most_bytes):#010x}")


def _some_rows(source: Stage) -> Any:
    if isinstance(source, Arrays):
        return source.arrays
    if isinstance(source, FileRows) and source.length:
        return source.gather(0, _spaced(int(source.length), _LEAST_ROWS))
    return ()


def _sorted_paths(value: Any) -> list[tuple[str, Any]]:
    return sorted(structure.paths(value), key=lambda item: item[0])


def checksum(array: Any, most_bytes: int) -> int:
    """Return the CRC-32 of rows of an array, the same ones for every array of its shape and dtype.  Local."""
    sample = _sample(array, most_bytes) if array.size and array.nbytes else array
    return zlib.crc32(numpy.ascontiguousarray(arrays.on_host(sample)).tobytes())


def _sample(array: Any, most_bytes: int) -> Any:
    row_bytes = max(array.nbytes // len(array), 1)
    rows = _spaced(len(array), max(most_bytes // row_bytes, _LEAST_ROWS))
    if row_bytes * len(rows) <= most_bytes:
        return array[rows]
    elements = _spaced(array[0].size, most_bytes // len(rows) // array.dtype.itemsize)
    return arrays.namespace(array).stack([array[int(row)].reshape(-1)[elements] for row in rows])


def _spaced(length: int, most: int) -> numpy.ndarray:
    """Return up to `most` of the numbers below `length`, one at least, evenly spaced, the first and last among them."""
    count = min(length, max(most, 1))
    return numpy.arange(count) * (length - 1) // max(count - 1, 1)


# -- what is compared at every step ------------------------------------------------------------------------------------


def watched(stage: Stage) -> list[Generated | Foreign | Filter]:
    """Return the stages of which only reading tells whether ranks have the same.  Local."""
    found = [stage] if isinstance(stage, (Generated, Foreign, Filter)) else []
    return sum(map(watched, stage.children), found)
