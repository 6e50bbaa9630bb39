"""What the ranks must have alike in a data set: the facts that are compared before they train on it."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.mismatch import fact
from mpidist.input.dataset import Dataset

#: Bytes of the data that the checksums are over, all arrays together; of long rows a part, but of so many rows.
_MOST_BYTES = 1 << 18
_LEAST_ROWS = 16

#: What to do about data sets that differ.
ADVICE = (
    "Every rank must make the same data set, of all rows (give random generators a seed that does not depend on the "
    "rank), and gets its own part of each batch out of it; for data that differ by rank there is "
    "`distribute_datasets_from_function`"
)


def described(dataset: Any) -> list[tuple[str, Any, tuple[int, ...]]]:
    """Return what `Communicator.call` takes to compare data sets: arrays with all their rows, and facts.  Local."""
    if not isinstance(dataset, Dataset):
        return [fact("type", type(dataset).__name__)]
    named = sorted(_paths("", dataset.arrays), key=lambda item: item[0])
    tensors = [(f"array {path}".rstrip(), leaf.dtype, leaf.shape) for path, leaf in named]
    order = ", ".join(dataset.order) or "as they are"
    return [
        *tensors,
        fact("type", "Dataset"),
        fact("batch size", dataset.batch_size),
        fact("drop_remainder", dataset.drop_remainder),
        fact("order of the rows", order),
        *_checksums(named),
    ]


def _checksums(named: list[tuple[str, Any]]) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    for path, leaf in named:
        # bytes that are addresses, or padding between fields, mean nothing on other ranks
        if not leaf.dtype.hasobject and not leaf.dtype.names:
            value = checksum(leaf, _MOST_BYTES // len(named))
            yield fact(f"checksum of the data in array {path}".rstrip(), f"{value:#010x}")


def checksum(array: Any, most_bytes: int) -> int:
    """Return the CRC-32 of rows of an array, the same ones for every array of its shape and dtype.  Local.

    Parameters
    ----------
    array : array, shape (rows, ...)
    most_bytes : int
        Short arrays are taken whole; of longer ones evenly spaced rows, and of long rows evenly spaced elements, so
        that the sum is over about so many bytes, but over one element at least.
    """
    sample = _sample(array, most_bytes) if array.size else array
    host = arrays.as_host(sample) if arrays.is_device(sample) else sample
    return zlib.crc32(arrays.byte_view(numpy.ascontiguousarray(host)).data)


def _sample(array: Any, most_bytes: int) -> Any:
    row_bytes = array.nbytes // len(array)
    rows = _spaced(len(array), max(most_bytes // row_bytes, _LEAST_ROWS))
    if row_bytes * len(rows) <= most_bytes:
        return array[rows]
    elements = _spaced(array[0].size, most_bytes // len(rows) // array.dtype.itemsize)
    return arrays.namespace(array).stack([array[int(row)].reshape(-1)[elements] for row in rows])


def _spaced(length: int, most: int) -> numpy.ndarray:
    """Return up to `most` of the numbers below `length`, one at least, evenly spaced, the first and last among them."""
    count = min(length, max(most, 1))
    return numpy.arange(count) * (length - 1) // max(count - 1, 1)


def _paths(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (place, array) for everything in nested tuples and dicts."""
    if isinstance(value, (dict, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(f"{prefix}/{key}" if prefix else str(key), item)
    else:
        yield prefix, value
