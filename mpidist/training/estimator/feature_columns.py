"""`numeric_column`: which entry of the features a linear model reads, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from mpidist import arrays

__all__ = ["NumericColumn", "numeric_column"]


@dataclass(frozen=True)
class NumericColumn:
    """Numbers of one feature; made by `numeric_column`.

    Attributes
    ----------
    key : str
    shape : tuple of int
    dtype : numpy.dtype
    normalizer_fn : callable or None
    """

    key: str
    shape: tuple[int, ...]
    dtype: Any
    normalizer_fn: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        """The key."""
        return self.key

    @property
    def size(self) -> int:
        """Numbers of each row."""
        return int(numpy.prod(self.shape, dtype=int))

    def read(self, features: Any) -> numpy.ndarray:
        """Return the numbers, shape (rows, size).  Local.

        Raises
        ------
        ValueError
            The features have no such entry, or one of another shape or dtype.
        TypeError
            It is a masked array, whose mask would be lost.
        """
        if not isinstance(features, dict) or self.key not in features:
            has = sorted(features) if isinstance(features, dict) else f"a {type(features).__name__}"
            raise ValueError(f"Feature {self.key} is not in features dictionary: the features are {has}")
        found = features[self.key]
        if self.normalizer_fn is not None:
            found = self.normalizer_fn(found)
        array = numpy.asarray(arrays.plain(found))
        if array.dtype.kind not in "biuf":
            raise ValueError(f"numeric column {self.key!r} needs numbers, got an array of {array.dtype}")
        if array.ndim < 1 or (array.shape[1:] or (1,)) != self.shape:
            raise ValueError(
                f"numeric column {self.key!r} needs rows of shape {self.shape}, got an array of shape {array.shape}"
            )
        array = array.reshape(len(array), self.size)
        return array.astype(self.dtype, copy=False) if self.dtype.kind == "f" else array  # a normalizer makes floats


def numeric_column(
    key: str,
    shape: int | tuple[int, ...] = (1,),
    default_value: Any = None,
    dtype: Any = "float32",
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> NumericColumn:
    """Return a column of numbers for linear models.  Local.

    Parameters
    ----------
    key : str
        Of the features, which are a dict.
    shape : int or tuple of int
        Of one row.
    default_value
        None: nothing is parsed here, so nothing is missing.
    dtype : dtype
        Of floats or integers.  A model has float64 weights if one of its columns is float64, else float32.  Integers do
        not cut off what `normalizer_fn` returns.
    normalizer_fn : callable, optional
        Gets the array of a batch, and returns what to use in its place.

    Raises
    ------
    TypeError
        The key is no str, or the normalizer no function.
    ValueError
        The shape is not of positive numbers, the dtype is of something else than numbers, or there is a default value.
    """
    if not isinstance(key, str):
        raise TypeError(f"key must be a string, got {key!r}")
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(f"shape must be positive integers, got {shape!r}")
    kind = numpy.dtype(dtype)
    if kind.kind not in "iuf":
        raise ValueError(f"dtype must be convertible to float, got {dtype!r}")
    if default_value is not None:
        raise ValueError(
            f"default_value is for parsing, which is not done here: fill in what is missing; got {default_value!r}"
        )
    if normalizer_fn is not None and not callable(normalizer_fn):
        raise TypeError(f"normalizer_fn must be a callable, got {normalizer_fn!r}")
    return NumericColumn(key, sizes, kind, normalizer_fn)
