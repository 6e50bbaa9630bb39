"""Whether the way that was chosen is still the one to take: the others are tried for one call now and then."""

from __future__ import annotations

from typing import Any

import numpy

#: What part of all time may be spent on ways that turn out slower, for all of them together.
_SHARE = 0.015

#: At most so many calls pass until a way is tried again, however slow it was.
_LONGEST = 2048

#: A way that takes less than this part of the time of the chosen one is taken from now on; at first the quickest one,
#: if it takes less than this part of the time of the first one.  That, which is what is taken where none is tried, is
#: taken again as soon as one call of it is quicker than the best of a window: times of so few calls on a machine that
#: others use, too, are no better than that.  With what looking around costs, it is at most 1.1 times the best.
_BETTER = 0.93

#: When the chosen way takes so many times as long as it used to, the machine has changed; and so it has when another
#: way is taken.  Then all ways but those that took so many times as long are tried at once, if that was so many calls
#: ago: it costs more than their share.
_SLOW, _HOPELESS, _CALM = 1.4, 2.0, 512


class Lookout:
    """Keeps to a way, and looks at each of the others as often as that is cheap.

    A way that takes r times as long as the chosen one costs r - 1 of its calls when it is tried.  It is tried so
    seldom that this is its part of `_SHARE`: one that is nearly as quick often, one that is far slower hardly ever.

    Calls make windows: some by the chosen way, of which the quickest counts, or one by another that is due.  Pure: what
    the ranks of a job are told to do depends on `judge`'s arguments alone, and on how many calls they made.

    Parameters
    ----------
    seconds : array of float64
        What each way took, the same on all ranks; the first one's is the one to beat.
    window : int
        How many calls by the chosen way are watched together.

    Attributes
    ----------
    way : int
        Which one to take now.
    seconds : array of float64, shape (1,)
        What it took this rank in this window.  The ranks' maximum decides.
    """

    def __init__(self, seconds: Any, window: int) -> None:
        self._seconds = numpy.array(seconds, dtype=float)
        self._window = window
        quickest = int(self._seconds.argmin())
        self._take(quickest if self._seconds[quickest] < _BETTER * self._seconds[0] else 0)
        self._calm = 0
        self._begin(self._chosen)

    def _take(self, way: int) -> None:
        """Take a way from now on."""
        self._chosen, self._usual = way, float(self._seconds[way])
        self._least = self._usual
        self._waits = self._pauses(self._seconds)
        self._waits[way] = numpy.inf

    def _pauses(self, seconds: Any) -> Any:
        """Return after how many calls ways that take so long may be tried: between two of them is a window."""
        cost, others = seconds / self._seconds[self._chosen] - 1, len(self._seconds) - 1
        return numpy.clip(cost * others / _SHARE, self._window * others, _LONGEST)

    def _begin(self, way: int) -> None:
        """Begin a window."""
        self.way, self._left = way, self._window if way == self._chosen else 1
        self.seconds = numpy.array([numpy.inf])

    @property
    def is_over(self) -> bool:
        """Whether the window is over, and `judge` is due."""
        return self._left <= 0

    def record(self, seconds: float) -> None:
        """Take the time of a call."""
        self.seconds[0] = min(self.seconds[0], seconds)
        self._left -= 1

    def judge(self, times: Any) -> None:
        """Take the maximum of all ranks' `seconds` of a window, and begin the next."""
        seconds = float(times[0])
        before, self._seconds[self.way] = self._seconds[self.way], seconds
        if self.way == self._chosen:
            self._waits -= self._window
            self._calm -= self._window
            if seconds > _SLOW * self._usual:
                self._usual = seconds
                self._look_around()
            self._usual = min(self._usual, seconds)
            self._least = min(self._least, seconds)
        elif seconds < (_BETTER if self.way else 1.0) * self._seconds[self._chosen]:
            self._seconds[self._chosen] = self._least  # what it took last may have been bad luck: look again soon
            self._take(self.way)
            self._look_around()
        else:
            self._waits[self.way] = self._pauses(min(before, seconds))  # once may have been bad luck
        next_one = int(self._waits.argmin())
        self._begin(next_one if self._waits[next_one] <= 0 else self._chosen)

    def _look_around(self) -> None:
        """Let ways be tried before it is their time: the machine has changed.

        Neighbours are of one kind, so the way that is furthest from the chosen one comes first.
        """
        if self._calm <= 0:
            near = self._seconds < _HOPELESS * self._seconds[self._chosen]
            near[self._chosen] = False
            self._waits[near] = -abs(numpy.arange(len(near)) - self._chosen)[near]
            self._calm = _CALM
