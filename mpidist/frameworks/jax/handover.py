"""`Handover`: host arrays become arrays of JAX, in memory that nobody writes while JAX refers to it.

To hand over one array takes about as long as to copy 128 KiB of it.  So short arrays lie one after the other, and are
handed over as one that a compiled function cuts; long ones are taken over by JAX where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import Any, NamedTuple

import jax
import numpy

from mpidist.frameworks.jax.leaf import Leaf
from mpidist.frameworks.jax.memory import ResultMemory

#: Arrays of fewer bytes are handed over together.
_SHORT_BYTES = 1 << 17


class _Group(NamedTuple):
    """Short arrays of one dtype for one place: their positions, where each begins, and what cuts them apart."""

    positions: list[int]
    bounds: list[tuple[int, int]]
    cut: Callable[[Any], list[Any]]


class Handover:
    """Results of some leaves on their way to JAX.  All `leaves` are `in_jax`; `dtypes` are those of the results."""

    def __init__(self, leaves: Sequence[Leaf], dtypes: Sequence[Any]) -> None:
        self._shapes = [leaf.shape for leaf in leaves]
        short: dict[Any, list[int]] = {}
        for position, (leaf, dtype) in enumerate(zip(leaves, dtypes, strict=True)):
            if 0 < prod(leaf.shape) * numpy.dtype(dtype).itemsize < _SHORT_BYTES and _is_one_device(leaf.placement):
                short.setdefault((numpy.dtype(dtype), leaf.placement), []).append(position)
        groups = {key: positions for key, positions in short.items() if len(positions) > 1}
        self._groups = [_group(positions, self._shapes) for positions in groups.values()]
        grouped = {position for positions in groups.values() for position in positions}
        self._long = [position for position in range(len(leaves)) if position not in grouped]
        signatures: list[tuple[Any, tuple[int, ...]]] = [
            (dtype, (group.bounds[-1][1],)) for (dtype, _), group in zip(groups, self._groups, strict=True)
        ]
        signatures += [(numpy.dtype(dtypes[position]), self._shapes[position]) for position in self._long]
        self._memory = ResultMemory(signatures)
        self._placements = [place for _, place in groups] + [leaves[position].placement for position in self._long]

    def of(self, results: Sequence[Any]) -> list[Any]:
        """Return copies of results, as arrays of JAX.  Local."""
        targets = self._memory.cut(self._memory.whole())
        count = len(self._groups)
        for flat, group in zip(targets, self._groups, strict=False):
            for position, (first, last) in zip(group.positions, group.bounds, strict=True):
                numpy.copyto(flat[first:last], results[position].reshape(-1), casting="unsafe")
        for position, target in zip(self._long, targets[count:], strict=True):
            numpy.copyto(target, results[position], casting="unsafe")
        return self._handed_over(targets, count)

    def _handed_over(self, targets: list[Any], count: int) -> list[Any]:
        leaves: list[Any] = [None] * len(self._shapes)
        for group, flat, place in zip(self._groups, targets[:count], self._placements, strict=False):
            with jax.enable_x64(True) if _is_wide(flat) else nullcontext():
                cut = group.cut(flat if place is None else jax.device_put(flat, place))
            for position, part in zip(group.positions, cut, strict=True):
                leaves[position] = part
        for position, array in zip(self._long, put(targets[count:], self._placements[count:]), strict=True):
            leaves[position] = array
        return leaves


def put(arrays: list[Any], placements: list[Any]) -> list[Any]:
    """Return arrays, which nobody writes any more, as arrays of JAX.  Local.

    Each has its placement; None leaves it to JAX.
    """
    if not arrays:
        return []
    if any(map(_is_wide, arrays)):
        with jax.enable_x64(True):
            return jax.device_put(arrays, placements)
    return jax.device_put(arrays, placements)


def _is_wide(array: Any) -> bool:
    """Return whether JAX, as it is set, would make float32 of float64, or the like."""
    return jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype


def _is_one_device(placement: Any) -> bool:
    return placement is None or len(placement.device_set) == 1


def _group(positions: list[int], shapes: Sequence[tuple[int, ...]]) -> _Group:
    ends = numpy.cumsum([prod(shapes[position]) for position in positions]).tolist()
    bounds = list(zip([0, *ends[:-1]], ends, strict=True))
    parts = [(*pair, shapes[position]) for pair, position in zip(bounds, positions, strict=True)]
    return _Group(positions, bounds, jax.jit(lambda flat: [flat[a:b].reshape(shape) for a, b, shape in parts]))
