"""`Float16` and `BFloat16`: floats of 16 bits on the wire, with a power of two in common, so that nothing overflows."""

from __future__ import annotations

import math

import numpy

from mpidist.compression.base import Compression

#: The scale goes in front of the values.
_HEADER_BYTES = 8

#: The largest power of two by which values of a dtype are scaled: it and its inverse are exact, normal numbers.
_MOST_SCALE = {4: 126, 8: 1022}

#: Of how many values bfloat16 codes are made at a time: what is made on the way stays in cache.
_BLOCK = 1 << 14


class _ShortFloats(Compression):
    """Floats of 16 bits, each the value times a power of two that all values of a code have in common.

    Parameters
    ----------
    error_feedback : bool
        Whether what rounding loses is added to the values of the next call.
    """

    def __init__(self, error_feedback: bool = False) -> None:
        self.error_feedback = bool(error_feedback)

    #: The bits of a number's digits, the one before the point included.
    _precision: int

    def code_bytes(self, elements: int, dtype: numpy.dtype) -> int:
        """Return 2 bytes a value, and 8."""
        return _HEADER_BYTES + 2 * elements

    def encode(self, values: numpy.ndarray, code: numpy.ndarray) -> None:
        """Write the scale, and the scaled values rounded to nearest, ties to even."""
        limit, exponent = _MOST_SCALE[values.itemsize], _exponent(values)
        scale = min(max(self._scale_of(exponent), -limit), limit)
        if exponent == numpy.finfo(values.dtype).maxexp:
            # those that would be rounded up to infinity are the largest that 16 bits have
            top = math.ldexp(2.0 - 2.0 ** (1 - self._precision), exponent - 1)
            values = numpy.where(numpy.isfinite(values), numpy.clip(values, -top, top), values)
        code[:_HEADER_BYTES].view(numpy.int64)[0] = scale
        self._round(values, 2.0**scale, code[_HEADER_BYTES:])

    def decode(self, code: numpy.ndarray, values: numpy.ndarray) -> None:
        """Write the values: those rounded, without their scale."""
        scale = int(code[:_HEADER_BYTES].view(numpy.int64)[0])
        self._widen(code[_HEADER_BYTES:], 2.0**-scale, values)

    def _scale_of(self, exponent: int) -> int:
        """Return by which power of two values below 2 ** exponent are scaled."""
        raise NotImplementedError

    def _round(self, values: numpy.ndarray, factor: float, code: numpy.ndarray) -> None:
        raise NotImplementedError

    def _widen(self, code: numpy.ndarray, factor: float, values: numpy.ndarray) -> None:
        raise NotImplementedError


class Float16(_ShortFloats):
    """IEEE float16 on the wire: half the bytes of float32, a quarter of those of float64.

    All values of a code (a rank's share of the packed list, and the same share of the sums) are scaled by one power of
    two, so that the largest lies between 2 ** 14 and 2 ** 15.  So no value overflows, whatever its size, and gradients
    that float16 would flush to zero are kept.  The error of a value x is at most ``2 ** -11 * abs(x)``, or ``2 ** -39``
    of the largest value where that is more (for largest values above ``2 ** -111``).  Infinities and NaNs stay what
    they are.

    Parameters
    ----------
    error_feedback : bool
        Whether what rounding loses is added to the values of the next call.  Then the all-reduce has a `state_dict`.
    """

    _precision = 11

    def _scale_of(self, exponent: int) -> int:
        return 15 - exponent

    def _round(self, values: numpy.ndarray, factor: float, code: numpy.ndarray) -> None:
        halves = code.view(numpy.float16)
        numpy.multiply(values, factor, out=halves, dtype=values.dtype, casting="unsafe")

    def _widen(self, code: numpy.ndarray, factor: float, values: numpy.ndarray) -> None:
        numpy.multiply(code.view(numpy.float16), factor, out=values, dtype=values.dtype)


class BFloat16(_ShortFloats):
    """bfloat16 on the wire: the range of float32 with 8 bits of precision; it needs no other package.

    The error of a value x is at most ``2 ** -7.99 * abs(x)``, or ``2 ** -134`` where that is more.  Values beyond
    bfloat16's range (float64, or the very largest float32) are scaled by a power of two, so none overflows.  Infinities
    and NaNs stay what they are.

    Parameters
    ----------
    error_feedback : bool
        Whether what rounding loses is added to the values of the next call.  Then the all-reduce has a `state_dict`.
    """

    _precision = 8

    def _scale_of(self, exponent: int) -> int:
        return 0 if -100 <= exponent <= 127 else -exponent

    def _round(self, values: numpy.ndarray, factor: float, code: numpy.ndarray) -> None:
        short = code.view(numpy.uint16)
        for first in range(0, values.size, _BLOCK):
            with numpy.errstate(invalid="ignore"):  # said of NaNs
                block = values[first : first + _BLOCK] * values.dtype.type(factor)
                block = block.astype(numpy.float32, copy=False)
            block[numpy.isnan(block)] = numpy.nan  # the one NaN that rounding does not turn into another number
            bits = block.view(numpy.uint32)
            bits += 0x7FFF + ((bits >> 16) & 1)
            short[first : first + _BLOCK] = bits >> 16

    def _widen(self, code: numpy.ndarray, factor: float, values: numpy.ndarray) -> None:
        short = code.view(numpy.uint16)
        for first in range(0, values.size, _BLOCK):
            bits = short[first : first + _BLOCK].astype(numpy.uint32) << 16
            numpy.multiply(bits.view(numpy.float32), factor, out=values[first : first + _BLOCK], dtype=values.dtype)


def _exponent(values: numpy.ndarray) -> int:
    """Return the least e with all finite values between -(2 ** e) and 2 ** e; 0 where all are 0."""
    largest = max(float(values.max()), -float(values.min()))
    if not math.isfinite(largest):
        finite = values[numpy.isfinite(values)]
        largest = float(numpy.abs(finite).max()) if finite.size else 0.0
    return math.frexp(largest)[1]
