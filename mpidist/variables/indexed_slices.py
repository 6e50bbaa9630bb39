"""`IndexedSlices`: some rows of an array, such as the gradient of an embedding of which a batch touched few rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import ArrayLike

from mpidist import arrays


class IndexedSlices:
    """Some rows of a larger array, as values and the numbers of the rows.

    It stands for an array of zeros with these rows.  A row that is named twice has the sum of its values.
    Local.

    Parameters
    ----------
    values : array, shape (k, ...)
        The rows.
    indices : array of int, shape (k,)
        Their numbers in the larger array, from 0.
    dense_shape : sequence of int, optional
        The shape of the larger array; without it, only what knows the array can tell.

    Attributes
    ----------
    values, indices : array
    dense_shape : tuple of int or None

    Raises
    ------
    TypeError
        The row numbers are not integers.
    ValueError
        Values, numbers and shape do not fit together, or a row is outside of the shape.
    """

    def __init__(self, values: ArrayLike, indices: ArrayLike, dense_shape: Sequence[int] | None = None) -> None:
        self.values: numpy.ndarray = arrays.to_array(values)
        self.indices: numpy.ndarray = arrays.to_array(indices)
        if self.indices.size == 0:  # an empty list is an array of floats
            self.indices = self.indices.astype(numpy.int64)
        self.dense_shape = None if dense_shape is None else tuple(int(length) for length in dense_shape)
        if self.indices.dtype.kind not in "iu":
            raise TypeError(f"indices of rows must be integers, got {self.indices.dtype}")
        if self.indices.ndim != 1 or self.values.shape[:1] != self.indices.shape:
            raise ValueError(
                "IndexedSlices needs a vector of row numbers and as many rows, got indices of shape "
                f"{self.indices.shape} and values of shape {self.values.shape}"
            )
        if self.dense_shape is not None:
            self.check(self.dense_shape)

    @property
    def dtype(self) -> numpy.dtype[Any]:
        """The dtype of the values."""
        return self.values.dtype

    def check(self, dense_shape: tuple[int, ...]) -> None:
        """Raise ValueError unless these are rows of an array of shape `dense_shape`.  Local."""
        if self.dense_shape is not None and self.dense_shape != dense_shape:
            raise ValueError(f"rows of an array of shape {self.dense_shape} are no rows of one of shape {dense_shape}")
        if not dense_shape or self.values.shape[1:] != dense_shape[1:]:
            raise ValueError(f"rows of shape {self.values.shape[1:]} are no rows of an array of shape {dense_shape}")
        if self.indices.size and not 0 <= int(self.indices.min()) <= int(self.indices.max()) < dense_shape[0]:
            raise ValueError(
                f"row numbers from {int(self.indices.min())} to {int(self.indices.max())} are outside of an array of "
                f"shape {dense_shape}"
            )

    def with_values(self, values: ArrayLike) -> IndexedSlices:
        """Return the same rows with other values.  Local."""
        return IndexedSlices(values, self.indices, self.dense_shape)

    def coalesced(self) -> IndexedSlices:
        """Return the same with every row named once, in ascending order; 16-bit floats are summed in float32.  Local.

        The same rows in the same order have the same bits on all ranks, in one kind of memory.
        """
        values, indices = arrays.summed_rows(self.values, arrays.on_host(self.indices))
        return IndexedSlices(values, arrays.in_memory_of(values, indices), self.dense_shape)

    def to_dense(self, dense_shape: Sequence[int] | None = None) -> numpy.ndarray:
        """Return the larger array as a new one, zeros included.  Local.

        Parameters
        ----------
        dense_shape : sequence of int, optional
            Where it is not known already.

        Raises
        ------
        ValueError
            The shape is not known, or these are no rows of it.
        """
        shape = self.dense_shape if dense_shape is None else tuple(dense_shape)
        if shape is None:
            raise ValueError("IndexedSlices without dense_shape: give the shape of the array that these are rows of")
        self.check(shape)
        dense = arrays.namespace(self.values).zeros(shape, dtype=self.values.dtype)
        rows = self.coalesced()
        dense[rows.indices] = rows.values
        return dense

    def __repr__(self) -> str:
        return f"IndexedSlices(values={self.values!r}, indices={self.indices!r}, dense_shape={self.dense_shape})"
