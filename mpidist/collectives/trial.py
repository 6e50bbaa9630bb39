"""Which of several ways is the quickest in this launch: found out in the first real steps, alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

#: So many calls come before the trial: those in which the memory of results is touched for the first time, of which a
#: plan keeps three; an even number, for two lists in turn.
_WARM_UP = 4

#: How often each way is tried in one of the two heats; less often where there was a trial in another mode of the cores.
_ROUNDS, _FEW_ROUNDS = 2, 1

#: Ways that take so many times as long as the best one in the first heat take no part in the second.
_SLOW = 1.5


class Trial:
    """Takes turns among some ways and remembers the times of each, in two heats.

    In the first heat each family of ways, which differ in the size of segments only, is stood for by its first one.
    What is slow in one mode of the cores may be the quickest in another, so each mode tries all families.

    How caches are shared between the cores that ranks run on is only known once they run, and it decides how long a
    segment should be.  Every way gives the same values, so nothing is lost by trying.

    Where two lists of tensors are reduced in turn, each way gets one and the other alternately.

    Parameters
    ----------
    families : sequence of hashable
        Of which family each way is.
    is_short : bool
        Whether there was a trial of these ways in another mode.
    """

    def __init__(self, families: Sequence[Any], is_short: bool = False) -> None:
        #: By way, the first one of its family.
        self._first = [families.index(family) for family in families]
        self._rounds = _FEW_ROUNDS if is_short else _ROUNDS
        self._skipped = 0 if is_short else _WARM_UP
        self._times: list[list[float]] = [[] for _ in families]
        self._ways = sorted(set(self._first))
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

        A way that has not been tried has the time of the first one of its family.
        Not the best time: caches may change hands in the middle, and the best of all ways would be from another time.
        Of two times in the middle the median is the lower one, and so it is of one list where there are two.
        """
        chosen = [self._times[way] or self._times[first] for way, first in enumerate(self._first)]
        return numpy.array([sorted(times)[(len(times) - 1) // 2] for times in chosen])

    def record(self, seconds: float) -> None:
        """Take the time of the way that was tried, and go on to the next."""
        if self._made >= self._skipped:
            self._times[self.way].append(seconds)
        self._made += 1

    def judge(self, times: Any) -> bool:
        """Take the maximum of all ranks' `seconds`; return whether that decides, and begin the second heat if not.

        The first way of a short trial had its only call when the cores had just come to this mode: it gets another.
        """
        doubtful = 0 if self._rounds == _FEW_ROUNDS else None
        self._ways = [way for way, seconds in enumerate(times) if seconds < _SLOW * min(times) or way == doubtful]
        if self._is_second or len(self._ways) < 2:
            return True
        self._turns, self._made, self._skipped, self._is_second = self._heat(), 0, 0, True
        return False
