"""Which of several ways is the quickest in this launch: found out in the first real steps, alike on all ranks."""

from __future__ import annotations

import numpy


class Trial:
    """Takes turns among some ways and remembers the best time of each.

    How caches are shared between the cores that ranks run on is only known once they run, and it decides how long a
    segment should be.  Every way gives the same values, so nothing is lost by trying.

    Parameters
    ----------
    ways : int

    Attributes
    ----------
    best_seconds : array, shape (ways,), float64
        This rank's best time of each way; the ranks' maxima decide.
    """

    #: How often each way is tried: the first time, memory is touched for the first time.
    ROUNDS = 5

    def __init__(self, ways: int) -> None:
        self.best_seconds = numpy.full(ways, numpy.inf)
        self._turns = 0

    @property
    def way(self) -> int:
        """The way to try next."""
        return self._turns % len(self.best_seconds)

    @property
    def is_over(self) -> bool:
        """Whether every way was tried often enough."""
        return self._turns >= self.ROUNDS * len(self.best_seconds)

    def record(self, seconds: float) -> None:
        """Take the time of the way that was tried, and go on to the next."""
        way = self.way
        self.best_seconds[way] = min(self.best_seconds[way], seconds)
        self._turns += 1
