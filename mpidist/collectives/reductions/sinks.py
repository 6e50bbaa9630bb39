"""Where results of bound reductions go: into new arrays that are the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.collectives.kept_memory import KeptMemory
from mpidist.collectives.reductions.adjustment import Zeros
from mpidist.collectives.reductions.intake import ListIntake
from mpidist.collectives.reductions.plan import Plan
from mpidist.collectives.reductions.results import ResultSet

#: How many sets of buffers a list keeps for another turn, the latest ones; who holds on to more results gets new memory
#: for each.
_KEPT_SETS = 3


class ResultSink:
    """Results in new arrays.

    With `is_packed` they are handed out as they were packed.  `zeros` stood in for tensors that are None.
    """

    def __init__(self, plan: Plan, like: ListIntake, is_packed: bool, zeros: Zeros | None = None) -> None:
        self._plan, self._like, self._is_packed, self._zeros = plan, like, is_packed, zeros
        self._memory, self._nbytes = KeptMemory(_KEPT_SETS), plan.nbytes
        self.free = self._memory.free

    def place(self, tensors: Sequence[Any]) -> ResultSet:
        """Return buffers to whose results nobody refers.  Local."""
        results = self._memory.take(self._nbytes)
        if results is not None:
            return results
        like = self._plan, self._like.kind, self._like.sources.orders
        if self._zeros is None:
            return self._memory.keep(ResultSet(*like, is_packed=self._is_packed))
        return self._memory.keep(_OptionalResults(self._zeros, *like))


class _OptionalResults(ResultSet):
    """Results of lists in which tensors may be None."""

    def __init__(self, zeros: Zeros, *like: Any) -> None:
        super().__init__(*like)
        self._zeros = zeros

    def hand_out(self) -> list[Any]:
        """Return the results, None where all ranks had None."""
        return self._zeros.emptied(super().hand_out())
