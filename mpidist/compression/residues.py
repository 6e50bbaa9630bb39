"""`CodeResidues`: what coding has lost of some values, for the next call."""

from __future__ import annotations

from typing import Any

import numpy


class CodeResidues:
    """What the codes of earlier calls have lost of values of one length and dtype.

    A call that comes to nothing leaves it as it was: what is new counts only from `keep` on.  `kept` is added to the
    values of the next call.
    """

    def __init__(self, elements: int, dtype: Any) -> None:
        self.kept = numpy.zeros(elements, dtype)
        self._next = numpy.zeros(elements, dtype)

    def add_to(self, values: numpy.ndarray) -> None:
        """Add what was lost to the values of this call.  Local."""
        values += self.kept

    def note(self, values: numpy.ndarray, decoded: numpy.ndarray) -> None:
        """Take note of what the code of `values` has lost.  Local."""
        with numpy.errstate(invalid="ignore"):  # infinity less infinity, in a call that nothing is kept of
            numpy.subtract(values, decoded, out=self._next)

    def keep(self) -> None:
        """Let what was noted count.  Local."""
        self.kept, self._next = self._next, self.kept
