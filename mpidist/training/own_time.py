"""`OwnTime`: how long a replica works by itself in an epoch, and which one takes the longest."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy

#: A replica is slow from so many times the time of the others on; less is noise.
_SLOW = 1.1


class SlowReplica(NamedTuple):
    """The replica with the longest time of its own, and how many times the median of the others that is.

    Attributes
    ----------
    replica : int
    times : float
        1.1 or more: less is noise.
    """

    replica: int
    times: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> SlowReplica | None:
        """Return the slow one of the replicas; None where none is slow.  Local.

        Parameters
        ----------
        seconds : sequence of float
            The own time of each replica.
        """
        longest = int(numpy.argmax(seconds))
        others = [*seconds[:longest], *seconds[longest + 1 :]]
        median = float(numpy.median(others)) if others else 0.0
        is_slow = median > 0 and seconds[longest] >= _SLOW * median
        return cls(longest, seconds[longest] / median) if is_slow else None


class OwnTime:
    """Seconds between the calls of all ranks: to read a batch, and to compute gradients.

    Where ranks agree on each batch, all of them read for as long as the slowest.  All methods are Local.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Begin an epoch."""
        self.seconds, self._since = 0.0, self._clock()

    def pause(self) -> None:
        """Be called before a call of all ranks."""
        self.seconds += self._clock() - self._since

    def go_on(self) -> None:
        """Be called after a call of all ranks."""
        self._since = self._clock()
