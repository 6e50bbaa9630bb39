"""Which of several ways is the quickest in this launch: found out in the first real steps, alike on all ranks."""

from __future__ import annotations

from typing import Any

import numpy


class Trial:
    """Takes turns among some ways and remembers the times of each.

    How caches are shared between the cores that ranks run on is only known once they run, and it decides how long a
    segment should be.  Every way gives the same values, so nothing is lost by trying.

    Parameters
    ----------
    ways : int
    rounds : int
        How often each way is tried.
    """

    #: Enough where memory is touched for the first time in the first round, and where it was touched before.
    ROUNDS, FEW_ROUNDS = 5, 2

    def __init__(self, ways: int, rounds: int = ROUNDS) -> None:
        self._seconds = numpy.full((rounds, ways), numpy.inf)
        self._turns = 0

    @property
    def way(self) -> int:
        """The way to try next."""
        return self._turns % self._seconds.shape[1]

    @property
    def is_over(self) -> bool:
        """Whether every way was tried often enough."""
        return self._turns >= self._seconds.size

    @property
    def seconds(self) -> Any:
        """This rank's median time of each way, array of float64; the ranks' maxima decide.

        Not the best time: caches may change hands in the middle, and the best of all ways would be from another time.
        Of two times the median is the lower one.
        """
        return numpy.sort(self._seconds, axis=0)[(len(self._seconds) - 1) // 2]

    def record(self, seconds: float) -> None:
        """Take the time of the way that was tried, and go on to the next."""
        self._seconds.flat[self._turns] = seconds
        self._turns += 1
