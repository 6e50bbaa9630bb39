"""Arrays cut into equal parts along their axes, one for each logical device of a replica: pure index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy


def part_of(array: Any, partition_dimensions: Sequence[int], index: int) -> Any:
    """Return a view of one part of an array that is cut into equal parts along its axes.  Local.

    `partition_dimensions` say how many parts to cut each axis into; `index` is one of the parts, numbered in C order.
    """
    cell = numpy.unravel_index(index, tuple(partition_dimensions)) if len(partition_dimensions) else ()
    lengths = [length // parts for length, parts in zip(array.shape, partition_dimensions, strict=True)]
    return array[tuple(slice(at * length, (at + 1) * length) for at, length in zip(cell, lengths, strict=True))]


def check_partition(shape: Sequence[int], partition_dimensions: Sequence[int], logical_devices: int) -> None:
    """Raise ValueError unless an array of `shape` can be cut into one equal part for each logical device.  Local."""
    parts = list(partition_dimensions)
    if len(parts) != len(shape):
        raise ValueError(
            f"Length of `partition_dimensions` must equal the rank of the tensor: got {parts} for a tensor of shape "
            f"{tuple(shape)}"
        )
    if any(count < 1 for count in parts):
        raise ValueError(f"`partition_dimensions` must be 1 or more along each dimension, got {parts}")
    for dimension, (length, count) in enumerate(zip(shape, parts, strict=True)):
        if length % count:
            raise ValueError(
                f"dimension {dimension} of a tensor of shape {tuple(shape)} must be divisible by "
                f"`partition_dimensions[{dimension}]`, which is {count}"
            )
    if math.prod(parts) != logical_devices:
        raise ValueError(
            f"The product of `partition_dimensions` must be the number of logical devices of a replica "
            f"({logical_devices}), got {parts} with the product {math.prod(parts)}"
        )
