"""`Compression`, what a stage of wire compression is."""

from __future__ import annotations

import abc
from typing import Any

import numpy

from mpidist.errors import quoted


class Compression(abc.ABC):
    """How values are coded for the wire; subclass it to write a stage of your own.

    A stage has settings and no state, so one stage may serve any number of all-reduces.  Its code has a length that
    follows from the number of values alone.  All methods are Local.

    Attributes
    ----------
    is_gathered : bool
        How codes become a sum.  False: each rank adds up a share of the values, and codes the sum again for the way
        back; twice the code of all values crosses the wire, at any number of ranks.  True: each rank gets the codes of
        all values from all ranks and adds up all of them; nothing is coded twice.  For codes that are a small part of
        the values.
    error_feedback : bool
        Whether what a code loses of the values is kept, and added to the values of the next call.

    Examples
    --------
    One bit a value, its sign, with the mean magnitude (8 bytes):

    >>> class Signs(Compression):
    ...     error_feedback = True
    ...
    ...     def code_bytes(self, elements, dtype):
    ...         return 8 + -(-elements // 8)
    ...
    ...     def encode(self, values, code):
    ...         code[:8].view("f8")[0] = numpy.abs(values).mean()
    ...         code[8:] = numpy.packbits(values > 0)
    ...
    ...     def decode(self, code, values):
    ...         bits = numpy.unpackbits(code[8:], count=values.size)
    ...         values[:] = (2.0 * bits - 1) * code[:8].view("f8")[0]
    """

    is_gathered: bool = False
    error_feedback: bool = False

    @abc.abstractmethod
    def code_bytes(self, elements: int, dtype: numpy.dtype) -> int:
        """Return the length in bytes of the code of so many values (1 or more), the same on all ranks."""

    @abc.abstractmethod
    def encode(self, values: numpy.ndarray, code: numpy.ndarray) -> None:
        """Write the code of `values`.

        A value that is not finite must be decoded to one that is not finite, or raise an error here: else an overflow
        would go unseen.

        Parameters
        ----------
        values : array, shape (elements,), float32 or float64
            Unchanged.
        code : array of uint8, shape (code_bytes,)
            Begins at a multiple of 8 bytes.  All of it is sent, so all of it has to be written.
        """

    @abc.abstractmethod
    def decode(self, code: numpy.ndarray, values: numpy.ndarray) -> None:
        """Write the values of a code to `values`, of shape (elements,); the same bits on every rank."""

    def add(self, code: numpy.ndarray, total: numpy.ndarray) -> None:
        """Add the values of a code to `total`, of shape (elements,)."""
        values = numpy.empty_like(total)
        self.decode(code, values)
        total += values

    def __repr__(self) -> str:
        """Return the stage with its settings, which must be alike on all ranks."""
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(vars(self).items()))
        return f"{type(self).__name__}({settings})"


def require_stage(compression: Any) -> None:
    """Raise TypeError unless this is a stage.  Local."""
    if not isinstance(compression, Compression):
        raise TypeError(
            f"compression must be a mpidist.compression.Compression or None, got {quoted(compression)}; "
            "pass an instance, such as mpidist.compression.Float16()"
        )
