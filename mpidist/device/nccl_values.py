"""What NCCL is given in place of some values, so that its results are the host's; arrays of any library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy

#: What stands for integers of 16 bits, which NCCL does not have: sums and products of both wrap to the same 16 bits.
WIDER = {"int16": "int32", "uint16": "uint32"}


@contextmanager
def standing_in(values: Any, op: str) -> Iterator[Any]:
    """Give what is reduced in place of a flat array inside the block; the array has the results behind it.

    Memory is made, used and given back in the order of the current stream.
    """
    if values.dtype.name in WIDER:
        wide = values.astype(WIDER[values.dtype.name])
        yield wide
        values[...] = wide
    elif values.dtype.kind == "f" and op in ("min", "max"):  # by NCCL they would lose NaN
        integers = values.view(f"i{values.itemsize}")
        nans = (1 << numpy.finfo(values.dtype).nmant) - 1  # so many of each sign, at both ends
        to_one_end = nans if op == "min" else -nans  # those beyond the other end wrap to this one
        _turn(integers)
        integers += to_one_end
        yield integers
        integers -= to_one_end
        _turn(integers)
    else:
        yield values


def _turn(integers: Any) -> None:
    """Make bits of floats integers in the order of the floats, in place, or those integers the bits again.

    Bits but that of the sign are in the order of sizes: with the sign, they are turned round.
    """
    turned = integers >> 8 * integers.itemsize - 1  # all bits of those with the sign
    turned &= numpy.iinfo(integers.dtype).max
    integers ^= turned
