"""Which of several ways is the quickest in this launch: found out in the first real steps, alike on all ranks."""

from __future__ import annotations

from typing import Any

import numpy

#: So many calls come before the trial: those in which the memory of results is touched for the first time.
_WARM_UP = 2

#: How often each way is tried in one of the two heats; less often where ranks know the ways from another trial.
_ROUNDS, _FEW_ROUNDS = 2, 1

#: Ways that take so many times as long as the best one in the first heat take no part in the second; and none in a
#: trial if they took so many times as long in an earlier one, in another mode of the cores.
_SLOW, _HOPELESS = 1.5, 3.0


class Trial:
    """Takes turns among some ways and remembers the times of each, in two heats.

    How caches are shared between the cores that ranks run on is only known once they run, and it decides how long a
    segment should be.  Every way gives the same values, so nothing is lost by trying.

    Where two lists of tensors are reduced in turn, each way gets one and the other alternately.

    Parameters
    ----------
    ways : int
    known : array of float64, shape (ways,), optional
        What each took in an earlier trial, the same on all ranks: this one is short.
    """

    def __init__(self, ways: int, known: Any = None) -> None:
        self._known = numpy.full(ways, numpy.inf) if known is None else known
        self._rounds = _ROUNDS if known is None else _FEW_ROUNDS
        self._skipped = _WARM_UP if known is None else 0
        self._times: list[list[float]] = [[] for _ in range(ways)]
        self._ways = list(range(ways)) if known is None else _within(known, _HOPELESS)
        self._turns = [0] * self._skipped + self._heat()
        self._made = 0
        self._is_second = False

    def _heat(self) -> list[int]:
        """Return whose turn it is, call by call: of an even number of ways, each round begins with another one."""
        ways = self._ways
        shift = 1 if len(ways) % 2 == 0 else 0
        return [ways[(place + shift * turn) % len(ways)] for turn in range(self._rounds) for place in range(len(ways))]

    @property
    def way(self) -> int:
        """The way to try next."""
        return self._turns[min(self._made, len(self._turns) - 1)]

    @property
    def is_over(self) -> bool:
        """Whether a heat is over, and `judge` is due."""
        return self._made >= len(self._turns)

    @property
    def seconds(self) -> Any:
        """This rank's median time of each way, array of float64; the ranks' maxima decide.

        Not the best time: caches may change hands in the middle, and the best of all ways would be from another time.
        Of two times in the middle the median is the lower one, and so it is of one list where there are two.
        """
        pairs = zip(self._times, self._known, strict=True)
        return numpy.array([sorted(times)[(len(times) - 1) // 2] if times else known for times, known in pairs])

    def record(self, seconds: float) -> None:
        """Take the time of the way that was tried, and go on to the next."""
        if self._made >= self._skipped:
            self._times[self.way].append(seconds)
        self._made += 1

    def judge(self, times: Any) -> bool:
        """Take the maximum of all ranks' `seconds`; return whether that decides, and begin the second heat if not."""
        near = set(_within(times, _SLOW))
        self._ways = [way for way in self._ways if way in near]
        if self._is_second or len(self._ways) < 2:
            return True
        self._turns, self._made, self._skipped, self._is_second = self._heat(), 0, 0, True
        return False


def _within(times: Any, factor: float) -> list[int]:
    """Return the ways that take less than so many times the best one."""
    return [way for way, seconds in enumerate(times) if seconds < factor * min(times)]
