"""`Dataset`: rows of arrays in memory, shuffled, repeated and batched by index arrays alone.

A data set never touches its rows: it computes which rows make up which batch, the same on every rank, and whoever
consumes it takes only the rows that he wants.  `rows_of_batches` is that stream of index arrays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy

from mpidist.arrays import to_array
from mpidist.input import structure

#: The stream of one epoch: index arrays, one for each pass over the rows (or, after `batch`, for each batch).
Stream = Iterator[numpy.ndarray]

#: Makes the stream of epoch number ``epoch``.
_StreamFn = Callable[[int], Stream]


@dataclass(frozen=True)
class ArraySpec:
    """Shape and dtype of one array of an element; None in the shape is a size that varies.

    Parameters
    ----------
    shape : tuple of (int or None)
    dtype : numpy.dtype
    """

    shape: tuple[int | None, ...]
    dtype: Any


@dataclass(frozen=True, eq=False)
class Dataset:
    """Rows of arrays, and the order in which they come.

    Made by `from_arrays`; every method returns a new data set and leaves this one as it is.  Iterating gives the
    global batches; `strategy.experimental_distribute_dataset` gives each replica its part of them.

    Attributes
    ----------
    arrays : array, or nested tuples and dicts of arrays
        The source; all have the same first dimension.
    batch_size : int or None
        Rows of a global batch; None before `batch`.
    drop_remainder : bool
    order : tuple of str
        What was done to the order of the rows, such as ``("shuffle(seed=1)", "repeat(2)")``.
    """

    arrays: Any
    batch_size: int | None = None
    drop_remainder: bool = False
    order: tuple[str, ...] = ()
    _length: int | None = 0
    _stream_fn: _StreamFn = field(default=lambda epoch: iter(()), repr=False)

    @classmethod
    def from_arrays(cls, arrays: Any) -> Dataset:
        """Return the data set whose elements are the rows of `arrays`.  Local.

        Parameters
        ----------
        arrays : array, or nested tuples and dicts of arrays
            NumPy or CuPy arrays, or what `numpy.asarray` takes, all with the same first dimension.  They are not
            copied, and not changed.

        Raises
        ------
        ValueError
            If there is no array, one is a scalar, or the first dimensions differ.
        """
        arrays = structure.map_leaves(to_array, arrays)
        shapes = [leaf.shape for leaf in structure.leaves(arrays)]
        if not shapes or any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(f"a data set needs arrays with one common first dimension; got the shapes {shapes}")
        rows = shapes[0][0]
        return cls(arrays, _length=rows, _stream_fn=lambda epoch: iter((numpy.arange(rows),)))

    from_tensor_slices = from_arrays

    @classmethod
    def from_tensors(cls, arrays: Any) -> Dataset:
        """Return the data set with one element, which is `arrays`.  Local."""
        return cls.from_arrays(structure.map_leaves(lambda leaf: to_array(leaf)[None], arrays))

    def shuffle(self, buffer_size: int | None = None, seed: int | None = None) -> Dataset:
        """Return the data set in another order every epoch, the same on all ranks.  Local.

        Parameters
        ----------
        buffer_size : int, optional
            Accepted for TensorFlow's sake: all rows take part in the shuffle, whatever it is.
        seed : int, optional
            Of the orders of all epochs.  None is the seed 0: without a word the orders are the same on all ranks, and
            again in the next run.
        """
        self._require_rows("shuffle")

        def stream_fn(epoch: int) -> Stream:
            for number, rows in enumerate(self._stream_fn(epoch)):
                yield numpy.random.default_rng((seed or 0, epoch, number)).permutation(rows)

        return replace(self, order=(*self.order, f"shuffle(seed={seed or 0})"), _stream_fn=stream_fn)

    def repeat(self, count: int | None = None) -> Dataset:
        """Return the data set `count` times over; None or a negative count is forever.  Local.

        A shuffle before it gives every repetition an order of its own.
        """
        forever = count is None or count < 0
        times = 0 if count is None else count
        endless = forever and self._length != 0
        length = None if self._length is None or endless else self._length * max(times, 0)

        def stream_fn(epoch: int) -> Stream:
            if length == 0:
                return
            first = epoch << 32 if forever else epoch * times
            for number in itertools.count(first) if forever else range(first, first + times):
                yield from self._stream_fn(number)

        order = (*self.order, f"repeat({'' if forever else count})")
        return replace(self, order=order, _length=length, _stream_fn=stream_fn)

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Return the data set in global batches of `batch_size` rows.  Local.

        Parameters
        ----------
        batch_size : int
            Rows over all replicas together.
        drop_remainder : bool
            Whether the last batch is left out when it has fewer rows.
        """
        self._require_rows("batch")
        if batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {batch_size}")
        rows = self._length
        length = None if rows is None else rows // batch_size if drop_remainder else -(-rows // batch_size)

        def stream_fn(epoch: int) -> Stream:
            return _cut(self._stream_fn(epoch), batch_size, drop_remainder)

        return Dataset(self.arrays, batch_size, drop_remainder, self.order, length, stream_fn)

    @property
    def element_spec(self) -> Any:
        """`ArraySpec` of every array of an element; the size of a batch is None unless remainders are dropped."""
        if self.batch_size is None:
            return structure.map_leaves(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), self.arrays)
        rows = self.batch_size if self.drop_remainder else None
        return self.batch_spec(rows)

    def batch_spec(self, rows: int | None) -> Any:
        """Return the `ArraySpec` of every array of a batch with `rows` rows.  Local."""
        return structure.map_leaves(lambda leaf: ArraySpec((rows, *leaf.shape[1:]), leaf.dtype), self.arrays)

    def rows_of_batches(self, epoch: int) -> Stream:
        """Yield the row numbers of every global batch of an epoch.  Local."""
        return self._stream_fn(epoch)

    def take_rows(self, rows: Any) -> Any:
        """Return these rows of all arrays, copied.  Local."""
        return structure.map_leaves(lambda leaf: leaf[rows], self.arrays)

    def __len__(self) -> int:
        """Return the number of elements: rows, or batches after `batch`; TypeError when it is infinite."""
        if self._length is None:
            raise TypeError("this data set repeats forever and has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for rows in self._stream_fn(0):
            if self.batch_size is None:
                yield from (self.take_rows(row) for row in rows)
            else:
                yield self.take_rows(rows)

    def _require_rows(self, method: str) -> None:
        if self.batch_size is not None:
            raise ValueError(f"`{method}` works on rows; call it before `batch`")


def _cut(passes: Stream, batch_size: int, drop_remainder: bool) -> Stream:
    """Yield batches of `batch_size` rows from passes of any length; batches straddle passes, as rows follow rows."""
    left: list[numpy.ndarray] = []
    for rows in passes:
        wanted = batch_size - sum(map(len, left))
        while len(rows) >= wanted:
            yield numpy.concatenate([*left, rows[:wanted]]) if left else rows[:wanted]
            rows, left, wanted = rows[wanted:], [], batch_size
        if len(rows):
            left.append(rows)
    if left and not drop_remainder:
        yield numpy.concatenate(left)
