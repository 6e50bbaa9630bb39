"""The all-reduce of lists of which some ranks have not all arrays: what is None counts as zeros."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpidist.collectives.persistent import Bound
from mpidist.collectives.reductions.adjustment import Zeros
from mpidist.collectives.reductions.lists import BoundList
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


class OptionalList(Bound):
    """The all-reduce of lists like one list, in which any array may be None.

    Which arrays are there goes along with the reduction, as one more array of the list.

    Parameters
    ----------
    bind : callable
        ``bind(examples)`` returns the all-reduce of lists like `examples`.
    examples : sequence of array
        The list with all of its arrays.
    op : str
        ``"sum"`` or ``"mean"``.
    """

    def __init__(
        self, ranks: Communicator, bind: Callable[[Sequence[Any]], BoundList], examples: Sequence[Any], op: str
    ) -> None:
        self._zeros = Zeros(examples, op)
        self._all = bind([*examples, self._zeros.counts])
        self._given: list[Any] = []
        self.nbytes = self._all.nbytes
        super().__init__(ranks, self._all.call)

    def enter(self, given: Sequence[Any]) -> None:
        """Begin work on the arrays that are there.  Local."""
        self._all.enter([each for each in given if each is not None])

    def fill(self, given: Sequence[Any]) -> bool:
        """Return whether this is for such a list.  Local."""
        self.enter(given)  # what marks those that are there is of the call before, too
        self._given = self._zeros.filled(given)
        return self._all.fill(self._given)

    def move(self, watch: Watch, given: Sequence[Any]) -> list[Any]:
        """Move the values, and return the results: None where all ranks had None."""
        filled, self._given = self._given, []
        return self._zeros.emptied(self._all.move(watch, filled))

    def forget(self) -> None:
        """Keep no arrays.  Local."""
        self._given = []
        self._all.forget()
