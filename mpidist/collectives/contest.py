"""Ways that take turns until it is known which to take in this launch, and the calls that stand for them meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.collectives.call import Call
from mpidist.collectives.lookout import Lookout
from mpidist.collectives.trial import Trial
from mpidist.collectives.ways import Way

#: So many calls are watched together; fewer from so many bytes on, where each takes long.
_WINDOW, _LONG_WINDOW, _LONG_BYTES = 16, 4, 1 << 25

#: What contests have in common of which one is enough: about the same size in bytes, and the same ways.
Kind = tuple[int, tuple[Way, ...]]


class Contest:
    """Some ways that take turns; then the first is taken, or one that is clearly quicker, and the others now and then.

    It goes on with every call of its kind, whatever list it is of and however that lies in memory: ranks may differ in
    the latter, and must come to the same way.  So times count by the byte.

    Where the cores come into several modes in turn, each mode has its own times and its own choice.  The mode is known
    only when a call has begun: what is needed before that is for the ways of all modes.

    Parameters
    ----------
    ways : sequence of Way
    nbytes : int
        About how many bytes a call has.
    modes : int
        How many modes there are.

    Attributes
    ----------
    ways : list of Way
    modes : int
    mode : int
        The one of this call, below `modes`; to be set alike on all ranks.
    """

    def __init__(self, ways: Sequence[Way], nbytes: int, modes: int = 1) -> None:
        self._window = _LONG_WINDOW if nbytes >= _LONG_BYTES else _WINDOW
        self.ways = list(ways)
        self.modes = modes if len(ways) > 1 else 1
        self.mode = 0
        self._families = [way.algorithm for way in ways]
        self._stages: list[Trial | Lookout] = [Trial(self._families) for _ in range(modes if len(ways) > 1 else 0)]

    @property
    def at(self) -> int:
        """Which way to take now, in this mode."""
        return self._stages[self.mode].way if self._stages else 0

    @property
    def turns(self) -> tuple[int, ...]:
        """Which ways the next call may take, each once."""
        return tuple(dict.fromkeys(stage.way for stage in self._stages)) if self._stages else (0,)

    @property
    def is_open(self) -> bool:
        """Whether ways take turns still, in this mode."""
        return bool(self._stages) and isinstance(self._stages[self.mode], Trial)

    @property
    def is_due(self) -> bool:
        """Whether ranks must compare their times before the next call: at the same one on all."""
        return bool(self._stages) and self._stages[self.mode].is_over

    def record(self, seconds: float, nbytes: int) -> None:
        """Take the time of the way that was taken for so many bytes, and go on to the next.  Local."""
        if self._stages:
            self._stages[self.mode].record(seconds / nbytes)

    def times(self) -> Any:
        """Return this rank's times of a byte to compare, array of float64.  Local."""
        return self._stages[self.mode].seconds

    def settle(self, times: Any) -> None:
        """Choose by the greatest times of all ranks, the same on all.  Local."""
        stage = self._stages[self.mode]
        if isinstance(stage, Lookout):
            stage.judge(times)
        elif stage.judge(times):
            self._stages[self.mode] = Lookout(times, self._window)
            for mode, other in enumerate(self._stages):
                if isinstance(other, Trial):
                    self._stages[mode] = Trial(self._families, is_short=True)


class Calls:
    """The calls that a contest's turns stand for: what ranks must have in common is every way that may be taken.

    Parameters
    ----------
    contest : Contest
    describe : callable
        ``describe(label)`` returns the call by a way, or ways, of that label.
    """

    def __init__(self, contest: Contest, describe: Callable[[str], Call]) -> None:
        self._ways, self._describe = contest.ways, describe
        self._calls: dict[tuple[int, ...], Call] = {}

    def __getitem__(self, turns: tuple[int, ...]) -> Call:
        """Return the call for such turns.  Local."""
        if turns not in self._calls:
            self._calls[turns] = self._describe(" or ".join(self._ways[at].label for at in turns))
        return self._calls[turns]


class Contests:
    """The contests of a world; the same on all ranks."""

    def __init__(self) -> None:
        self._found: dict[Kind, Contest] = {}

    def of(self, ways: Sequence[Way], nbytes: int, modes: int = 1) -> Contest:
        """Return the contest of these ways for a unit of `nbytes`, one for all units of about that size.  Local."""
        kind = nbytes.bit_length(), tuple(ways)
        if kind not in self._found:
            self._found[kind] = Contest(ways, nbytes, modes)
        return self._found[kind]
