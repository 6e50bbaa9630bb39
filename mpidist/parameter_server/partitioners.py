"""Into how many shards a variable is cut: functions of its shape and dtype.  All Local."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


class Partitioner:
    """Base of the partitioners: callables that `ParameterServerStrategy` asks about every new variable."""

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return how many parts to cut each axis into.

        Parameters
        ----------
        shape : sequence of int
        dtype : dtype
        axis : int
            The axis to cut; strategies cut the first only.

        Raises
        ------
        NotImplementedError
            By this base class.
        """
        raise NotImplementedError


class FixedShardsPartitioner(Partitioner):
    """As many shards for every variable, but never more than it has rows.

    Parameters
    ----------
    num_shards : int
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = num_shards

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return how many parts to cut each axis into; ValueError without such an axis."""
        return _along(shape, axis, min(self._num_shards, _length(shape, axis)))


class MinSizePartitioner(Partitioner):
    """As many shards as there may be, each of about so many bytes or more.

    As in TensorFlow the number of shards is rounded up, so a shard may be a little smaller.

    Parameters
    ----------
    min_shard_bytes : int
    max_shards : int
    bytes_per_string : int
        What an element counts that is no number.

    Raises
    ------
    ValueError
        A number that is not positive.
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        if min_shard_bytes < 1:
            raise ValueError(f"Argument `min_shard_bytes` must be positive. Received: {min_shard_bytes}")
        if max_shards < 1:
            raise ValueError(f"Argument `max_shards` must be positive. Received: {max_shards}")
        _check_string_bytes(bytes_per_string)
        self._min_shard_bytes = min_shard_bytes
        self._max_shards = max_shards
        self._bytes_per_string = bytes_per_string

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return how many parts to cut each axis into; ValueError without such an axis."""
        length = _length(shape, axis)
        total = math.prod(shape) * _element_bytes(dtype, self._bytes_per_string)
        shards = math.ceil(total / self._min_shard_bytes)
        return _along(shape, axis, max(1, min(length, self._max_shards, shards)))


class MaxSizePartitioner(Partitioner):
    """As few shards as there may be, each of so many bytes at most; a row is never cut.

    Parameters
    ----------
    max_shard_bytes : int
    max_shards : int, optional
        The most shards of a variable, even if they are larger then; None and 0 are no limit.
    bytes_per_string : int
        What an element counts that is no number.

    Raises
    ------
    ValueError
        A number that is not positive.
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"Argument `max_shard_bytes` must be positive. Received {max_shard_bytes}")
        if max_shards and max_shards < 1:
            raise ValueError(f"Argument `max_shards` must be positive. Received {max_shards}")
        _check_string_bytes(bytes_per_string)
        self._max_shard_bytes = max_shard_bytes
        self._max_shards = max_shards
        self._bytes_per_string = bytes_per_string

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return how many parts to cut each axis into; ValueError without such an axis."""
        length = _length(shape, axis)
        row_bytes = _element_bytes(dtype, self._bytes_per_string) * math.prod([*shape[:axis], *shape[axis + 1 :]])
        rows = max(1, self._max_shard_bytes // max(row_bytes, 1))
        shards = math.ceil(length / rows)
        return _along(shape, axis, min(shards, self._max_shards) if self._max_shards else shards)


def _length(shape: Sequence[int], axis: int) -> int:
    if not 0 <= axis < len(shape):
        raise ValueError(f"Cannot partition variable along axis {axis} when shape is only {tuple(shape)}")
    return shape[axis]


def _along(shape: Sequence[int], axis: int, count: int) -> list[int]:
    """Return `count` for one axis, and 1 for the others."""
    return [count if each == axis else 1 for each in range(len(shape))]


def _element_bytes(dtype: Any, bytes_per_string: int) -> int:
    dtype = numpy.dtype(dtype)
    return bytes_per_string if dtype.kind in "OSU" else dtype.itemsize


def _check_string_bytes(bytes_per_string: int) -> None:
    if bytes_per_string < 1:
        raise ValueError(f"Argument `bytes_per_string` must be positive. Received: {bytes_per_string}")
