"""The all-reduce by which all others are tested: gather everything, and add in rank order."""

from __future__ import annotations

from typing import Any

import numpy

from mpidist.arrays import reduction, wire_dtype


def all_reduce(ranks: Any, buffer: Any, op: str = "sum") -> None:
    """Reduce an array over all ranks, in place, adding in rank order.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    ranks : Communicator
    buffer : numpy.ndarray, modified in place
        16-bit floats are summed in float32 and rounded once.
    op : str
        ``"sum"``, ``"min"``, ``"max"`` or ``"prod"``.
    """
    total, *others = ranks.all_gather(buffer[None]).astype(wire_dtype(buffer.dtype))
    for values in others:
        total = reduction(op, numpy)(total, values)
    buffer[...] = total
