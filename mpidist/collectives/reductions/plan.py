"""The fusion plan: which tensor lies where.  Pure: no arrays, no communication.

Tensors are taken in order, dtype by dtype, into *buckets*: a bucket is closed when it has come to `bytes_per_pack`.
Each bucket is one reduction.  Tensors of one dtype are fused, also where others stand between them in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy

from mpidist.arrays import check_reducible, reduction_dtypes

#: What a tensor is to a plan: (name, dtype, shape); the name may be empty.
Signature = tuple[str, Any, tuple[int, ...]]


@dataclass(frozen=True)
class Bucket:
    """One fused reduction.

    Values are reduced and sent in `dtype`, and given back in `result`.  `tensors` are positions in the list; `offsets`
    say where each begins, in elements, with one more for the end.
    """

    dtype: numpy.dtype
    result: numpy.dtype
    tensors: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def elements(self) -> int:
        """The number of elements of all its tensors."""
        return self.offsets[-1]

    @property
    def nbytes(self) -> int:
        """Its size on the wire, in bytes."""
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Plan:
    """How a list of tensors is reduced."""

    op: str
    signatures: tuple[Signature, ...]
    buckets: tuple[Bucket, ...]

    @property
    def reduction(self) -> str:
        """What is done on the wire: a mean is a sum, multiplied once at the end."""
        return "sum" if self.op == "mean" else self.op

    @property
    def nbytes(self) -> int:
        """The size of all buckets on the wire, in bytes."""
        return sum(bucket.nbytes for bucket in self.buckets)


def build(signatures: Sequence[Signature], op: str, bytes_per_pack: int) -> Plan:
    """Return the plan for tensors of these signatures.

    `bytes_per_pack`: a bucket is closed when it holds so many bytes or more; a tensor is never cut.
    UnsupportedDtypeError: a tensor's dtype has no such reduction.
    """
    by_dtype: dict[Any, list[int]] = {}
    for position, (_, dtype, _) in enumerate(signatures):
        check_reducible(dtype, "sum" if op == "mean" else op)
        by_dtype.setdefault(numpy.dtype(dtype), []).append(position)
    buckets: list[Bucket] = []
    for dtype, positions in by_dtype.items():
        buckets += _fill(positions, dtype, signatures, op, bytes_per_pack)
    return Plan(op, tuple(signatures), tuple(buckets))


def _fill(
    positions: list[int], dtype: numpy.dtype, signatures: Sequence[Signature], op: str, bytes_per_pack: int
) -> list[Bucket]:
    wire, result = reduction_dtypes(dtype, op)
    buckets, members, offsets = [], [], [0]
    for position in positions:
        members.append(position)
        offsets.append(offsets[-1] + prod(signatures[position][2]))
        if offsets[-1] * wire.itemsize >= bytes_per_pack:
            buckets.append(Bucket(wire, result, tuple(members), tuple(offsets)))
            members, offsets = [], [0]
    if members:
        buckets.append(Bucket(wire, result, tuple(members), tuple(offsets)))
    return buckets
