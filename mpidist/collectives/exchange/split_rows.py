"""`SplitRows`: an all_to_all that is bound to how many rows each rank gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.collectives.exchange import plain
from mpidist.collectives.handle import Handle
from mpidist.collectives.persistent import Bound


class SplitRows:
    """A bound all_to_all with splits for the calls that give none.

    Parameters
    ----------
    bound : Bound
        It takes an array and its splits as a tuple.
    splits : sequence of int
    size : int
        Number of ranks.

    Raises
    ------
    ValueError
        There is not one split a rank, or one is negative.
    """

    def __init__(self, bound: Bound, splits: Sequence[int], size: int) -> None:
        self._bound, self._splits = bound, plain.checked_splits(sum(splits), splits, size)

    @property
    def timeout_seconds(self) -> float | None:
        """For calls that name none."""
        return self._bound.timeout_seconds

    @timeout_seconds.setter
    def timeout_seconds(self, value: float | None) -> None:
        self._bound.timeout_seconds = value

    def __call__(self, given: Any, timeout_seconds: float | None = None) -> Any:
        """Carry it out.  Collective: every rank calls it in the same order; parameters and errors as for `Bound`."""
        return self._bound(self._with_splits(given), timeout_seconds)

    def start(self, given: Any, timeout_seconds: float | None = None) -> Handle:
        """Start it.  Collective: every rank calls it in the same order; parameters and errors as for `Bound`."""
        return self._bound.start(self._with_splits(given), timeout_seconds)

    def _with_splits(self, given: Any) -> Any:
        return given if type(given) is tuple else (given, self._splits)
