"""Lists of tensors reduced over all ranks: the bound object of a list is found, or made, and called.

The result lives where it was reduced: the tensors that the caller gets are views of a bucket's buffer.  The caller owns
them.  A set of buffers is used again only when nobody refers to any view of it any more, so that a training loop, which
drops its gradients every step, allocates nothing after the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

from mpidist.collectives.adjustment import AS_IT_IS, Adjustment
from mpidist.collectives.lists import BoundList, Packed, Question, bind_list
from mpidist.collectives.mismatch import OrdersDiffer
from mpidist.collectives.optional_lists import OptionalList
from mpidist.collectives.persistent import UNLIKE, Bound
from mpidist.collectives.plan_cache import PlanCache
from mpidist.collectives.ranks import Ranks

#: Of how many lengths the last list is known.
_KEPT_LENGTHS = 256


class FusedAllReduce:
    """All-reduce of lists of tensors, fused.

    Parameters
    ----------
    ranks : Ranks
    bytes_per_pack : int
        Size in bytes of a fused unit, 0 for the default.
    algorithm : str, optional
        As in `Communicator.all_reduce`.
    plans : PlanCache, optional
        For those who keep bound objects in common; by default its own.
    """

    def __init__(
        self, ranks: Ranks, bytes_per_pack: int = 0, algorithm: str | None = None, plans: PlanCache | None = None
    ) -> None:
        self.plans = PlanCache() if plans is None else plans
        self._ranks = ranks
        self._bytes_per_pack = bytes_per_pack
        self._algorithm = algorithm
        # By length, operation and form of the results: the list that comes next is mostly like the last one.
        self._last: dict[tuple[int, str, bool], ref[BoundList]] = {}

    def __call__(
        self,
        tensors: Sequence[Any],
        op: str = "sum",
        names: Sequence[str] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Any]:
        """Return the tensors reduced over all ranks, as new arrays that are the caller's.

        Collective: every rank calls it in the same order, with tensors of the same shapes and dtypes.

        Parameters
        ----------
        tensors : sequence of arrays
            Of any shapes and dtypes, contiguous or not; unchanged.
        op : str
            ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
        names : sequence of str, optional
            For messages; must be the same on all ranks.
        timeout_seconds : float, optional

        Returns
        -------
        list of arrays
            The mean of integers is float64; other dtypes are kept.

        Raises
        ------
        CollectiveMismatchError, TransportTimeoutError, RankFailedError, UnsupportedDtypeError
        """
        results = self.again(tensors, op, names, timeout_seconds)
        return self._anew(tensors, op, names, timeout_seconds) if results is None else results

    def flat(
        self,
        tensors: Sequence[Any],
        op: str = "sum",
        names: Sequence[str] | None = None,
        timeout_seconds: float | None = None,
    ) -> list[Packed]:
        """Return the reduced tensors as they were packed, dtype by dtype; parameters and errors as for a call.

        Collective: every rank calls it in the same order.
        """
        results = self.again(tensors, op, names, timeout_seconds, is_packed=True)
        return self._anew(tensors, op, names, timeout_seconds, is_packed=True) if results is None else results

    def again(
        self,
        tensors: Sequence[Any],
        op: str = "sum",
        names: Sequence[str] | None = None,
        timeout_seconds: float | None = None,
        is_packed: bool = False,
    ) -> list[Any] | None:
        """Reduce gradient buffers, or a list like the last one of its length; parameters and errors as for a call.

        Collective: every rank calls it in the same order.  None, and nothing is done, for another list.
        """
        if self._ranks.in_shared_memory:
            buffers = self._buffers(tensors)
            if buffers is not None:
                results = buffers.all_reduce(op, timeout_seconds)
                return [_alone(*each) for each in enumerate(results)] if is_packed else results
        last = self._last.get((len(tensors), op, is_packed))
        bound = None if last is None else last()
        if bound is None or bound.names != (names if names is None else list(names)):
            return None
        try:
            results = bound.attempt(tensors, timeout_seconds)
        except OrdersDiffer:  # on all ranks
            return self._bind(tensors, bound.question, timeout_seconds, in_memory_order=False)
        if results is UNLIKE:
            return None
        self.plans.use(bound)
        return results

    def bound(
        self,
        tensors: Sequence[Any],
        op: str = "sum",
        timeout_seconds: float | None = None,
        adjustment: Adjustment = AS_IT_IS,
    ) -> Bound:
        """Return the all-reduce of lists like this one, however they lie in memory, to be called any number of times.

        Collective: every rank calls it in the same order.  Parameters and errors as for a call; nothing is reduced.
        The deadline is that of its calls, too.

        Parameters
        ----------
        tensors, op, timeout_seconds
            As for a call.
        adjustment : Adjustment
            Factors, and whether an array that is None counts as zeros.

        Raises
        ------
        ValueError
            A factor that is 0 or not finite; arrays that may be None, and an operation other than sum and mean.
        UnsupportedDtypeError
            A factor for arrays of whole numbers.
        """
        prescale, postscale, none_as_zeros = adjustment
        question = Question(op, None, self._bytes_per_pack, self._algorithm, False, prescale, postscale)

        def bind(examples: Sequence[Any]) -> BoundList:
            return bind_list(self._ranks, examples, question, timeout_seconds, in_memory_order=False, any_strides=True)

        found: Bound = OptionalList(self._ranks, bind, tensors, op) if none_as_zeros else bind(tensors)
        found.timeout_seconds = timeout_seconds
        return found

    def _buffers(self, tensors: Sequence[Any]) -> Any:
        """Return the gradient buffers that these tensors are, if they are."""
        found = self._ranks.in_shared_memory.get(id(tensors[0])) if len(tensors) else None
        return found if found is not None and found.holds(tensors) else None

    def _anew(
        self,
        tensors: Sequence[Any],
        op: str,
        names: Sequence[str] | None,
        timeout_seconds: float | None,
        is_packed: bool = False,
    ) -> list[Any]:
        """Reduce a list that is not like the last one."""
        labels = None if names is None else tuple(names)
        question = Question(op, labels, self._bytes_per_pack, self._algorithm, is_packed)
        bound = self.plans.find(question.key(tensors))
        if bound is not None:
            self._remember(bound, len(tensors))
            results = self.again(tensors, op, names, timeout_seconds, is_packed)
            if results is not None:
                return results
        # Who takes its tensors in the order of their axes once does so for good: ranks then agree whatever they get.
        return self._bind(tensors, question, timeout_seconds, in_memory_order=bound is None)

    def _remember(self, bound: BoundList, length: int) -> None:
        """Take note that the next list of that length is mostly like this one."""
        if len(self._last) >= _KEPT_LENGTHS:
            self._last.clear()
        self._last[length, bound.question.op, bound.question.is_packed] = ref(bound)

    def _bind(
        self, tensors: Sequence[Any], question: Question, timeout_seconds: float | None, in_memory_order: bool
    ) -> list[Any]:
        """Bind an all-reduce to lists like this one, and reduce it."""
        bound = bind_list(self._ranks, tensors, question, timeout_seconds, in_memory_order)
        bound.key = question.key(tensors)
        self._remember(bound, len(tensors))  # which keeps it for the call below only
        results = self.again(tensors, question.op, question.names, timeout_seconds, question.is_packed)
        assert results is not None  # it was bound for these
        return results


def _alone(position: int, tensor: Any) -> Packed:
    """Return a reduced tensor that lies by itself."""
    return Packed((position,), (0, tensor.size), tensor.reshape(-1))
