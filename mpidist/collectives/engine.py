"""`Engine`: what reduces lists of tensors over some ranks.  The bound object of a list is found, or made, and called.

The result lives where it was reduced: the tensors that the caller gets are views of a bucket's buffer.  The caller owns
them.  A set of buffers is used again only when nobody refers to any view of it any more, so that a training loop, which
drops its gradients every step, allocates nothing after the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from mpidist.arrays import empty
from mpidist.collectives.call import Call
from mpidist.collectives.early_buckets import EarlyPlan
from mpidist.collectives.early_sums import EarlySums, early_plan, is_free
from mpidist.collectives.mismatch import OrdersDiffer
from mpidist.collectives.persistent import UNLIKE, Bound
from mpidist.collectives.reductions.adjustment import AS_IT_IS, Adjustment, Zeros
from mpidist.collectives.reductions.in_place import bind_in_place
from mpidist.collectives.reductions.lists import BoundList, Question, bind_list
from mpidist.collectives.reductions.plan import Signature
from mpidist.collectives.reductions.results import Packed
from mpidist.collectives.reductions.update import FusedUpdate
from mpidist.collectives.ways import selection

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: Of how many lengths the last list is known, and for how many operations and deadlines.
_KEPT_LENGTHS, _KEPT_DEADLINES = 256, 64

#: ``repeat(tensors, names)`` reduces a list like one that was reduced before; None, and nothing done, for another one.
Repeat = Callable[..., list[Any] | None]


def no_repeat(tensors: Sequence[Any], names: tuple[str, ...] | None = None) -> None:
    """Know of no list."""


class Engine:
    """The all-reduces of lists of tensors over some ranks, under one set of options.

    Lists come back as new arrays, or as they were packed; are reduced in place; or update parameters on the way.
    `Communicator.engine` keeps the engines of its ranks; what they bind is in its table of bindings.

    `bytes_per_pack` is the size of a fused unit, 0 for the default; the deadline is for calls that name none.
    """

    def __init__(
        self,
        ranks: Communicator,
        bytes_per_pack: int = 0,
        algorithm: str | None = None,
        timeout_seconds: float | None = None,
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._ranks = ranks
        self._bytes_per_pack = bytes_per_pack
        self._algorithm = algorithm
        self._recent: dict[tuple[str, float | None, bool], Recent] = {}

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
        return self.recent(op, timeout_seconds).reduce(tensors, names)

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
        return self.recent(op, timeout_seconds, is_packed=True).reduce(tensors, names)

    def recent(self, op: str, timeout_seconds: float | None = None, is_packed: bool = False) -> Recent:
        """Return the lists that were reduced last by this operation, with this deadline.  Local."""
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        key = op, seconds, is_packed
        if key not in self._recent:
            if len(self._recent) >= _KEPT_DEADLINES:
                self._recent.clear()
            question = Question(op, None, self._bytes_per_pack, self._algorithm, is_packed)
            self._recent[key] = Recent(self._ranks, question, seconds)
        return self._recent[key]

    def bind(
        self,
        tensors: Sequence[Any],
        op: str = "sum",
        timeout_seconds: float | None = None,
        adjustment: Adjustment = AS_IT_IS,
        names: Sequence[str] | None = None,
    ) -> Bound:
        """Return the all-reduce of lists like this one, however they lie in memory, to be called any number of times.

        Collective: every rank calls it in the same order.  Parameters and errors as for a call; nothing is reduced.
        The deadline is that of its calls, too.

        Parameters
        ----------
        tensors, op, timeout_seconds, names
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
        seconds = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        labels = None if names is None else tuple(names)
        question = Question(op, labels, self._bytes_per_pack, self._algorithm, False, prescale, postscale)
        zeros = Zeros(tensors, op) if none_as_zeros else None
        found = bind_list(self._ranks, tensors, question, seconds, in_memory_order=False, any_strides=True, zeros=zeros)
        found.timeout_seconds = seconds
        return found

    def bind_in_place(self, signatures: Sequence[Signature], op: str = "sum", kind: Any = None) -> Bound:
        """Return what reduces lists of arrays of these names, dtypes and shapes in place; see `bind_in_place`.

        Collective: every rank calls it in the same order.
        """
        return bind_in_place(self._ranks, signatures, op, self._algorithm, self.timeout_seconds, kind)

    def early_plan(self, signatures: Sequence[Signature], op: str, kind: Any = None) -> EarlyPlan | None:
        """Return the buckets of a list whose sums are begun early; None where they cannot be.  Local.

        They cannot where the user chose another algorithm, or asked for the same bits in every run: whether sums are
        begun early depends on times.  All ranks must agree before they `bind_early`.  `kind` as for `bind_in_place`.
        """
        settings = self._ranks.control.settings
        free = {selection.AUTO} if kind is None else {selection.AUTO, selection.NCCL}
        may_choose = {settings.algorithm, self._algorithm or selection.AUTO} <= free and not settings.deterministic
        return early_plan(self._ranks, signatures, op, kind) if may_choose else None

    def bind_early(self, early: EarlyPlan, number: int, more: Signature, flags: int) -> EarlySums | None:
        """Return the early sums of a list, see `EarlySums`; `more` tells the list from others.  Local.

        None where the berth of this number is taken.  MemoryError where the device has too little.
        """
        if not is_free(self._ranks, number, early.memory):
            return None
        call = Call(f"all_reduce({early.plan.op}) that was begun early", [*early.plan.signatures, more])
        found = EarlySums(self._ranks, early, number, call, flags)
        found.timeout_seconds = self.timeout_seconds
        return found

    def reduce_in_place(self, arrays: Sequence[Any], op: str = "sum", name: str = "") -> None:
        """Reduce a few arrays in place, each of this name; errors as for `bind_in_place`.

        Collective: every rank calls it in the same order.
        """
        key = ("in place", op, name, self._algorithm, *((type(each), each.dtype, each.shape) for each in arrays))
        self._ranks.bindings.call(key, self._bind_in_place_like, (arrays, op, name), arrays, self.timeout_seconds)

    def _bind_in_place_like(self, arrays: Sequence[Any], op: str, name: str) -> Bound:
        kind = empty(0, arrays[0].dtype, arrays[0])  # of the list's; nothing keeps the list by it
        return self.bind_in_place([(name, each.dtype, each.shape) for each in arrays], op, kind)

    def update(self, in_one_copy: bool = False) -> FusedUpdate | None:
        """Return what sums gradients and updates parameters in one pass, None where the settings forbid it.  Local.

        `in_one_copy`: the parameters are arrays that all ranks see.
        """
        if not self._ranks.control.settings.sharded_updates:
            return None
        return FusedUpdate(self._ranks, self._algorithm, self.timeout_seconds, in_one_copy)


class Recent:
    """The lists that were reduced last by one operation, by length: the list that comes next is mostly like one.

    Calling it is collective, and does nothing but return None for a list that is like none of them.  With `is_packed`
    results are given as they were packed.
    """

    def __init__(self, ranks: Communicator, question: Question, timeout_seconds: float | None) -> None:
        self._ranks, self._question, self._timeout_seconds = ranks, question, timeout_seconds
        self._in_shared_memory = ranks.in_shared_memory
        self._use = ranks.bindings.use
        self._last: dict[int, ref[BoundList]] = {}

    def __call__(self, tensors: Sequence[Any], names: tuple[str, ...] | None = None) -> list[Any] | None:
        """Reduce gradient buffers, or a list like the last one of its length; None, and nothing done, for another one.

        Collective: every rank calls it in the same order.  Parameters and errors as for a call of `Engine`.
        """
        if self._in_shared_memory and len(tensors):
            buffers = self._in_shared_memory.get(id(tensors[0]))
            if buffers is not None and buffers.holds(tensors):
                results = buffers.reduced(self._question.op, self._timeout_seconds)
                if not self._question.is_packed:
                    return results
                return [Packed((at,), (0, each.size), each.reshape(-1)) for at, each in enumerate(results)]
        last = self._last.get(len(tensors))
        bound = None if last is None else last()
        if bound is None or bound.question.names != names:
            return None
        try:
            results = bound.attempt(tensors, self._timeout_seconds)
        except OrdersDiffer:  # on all ranks
            return self._anew(tensors, names, in_memory_order=False)
        if results is UNLIKE:
            return None
        self._use(bound)
        return results

    def reduce(self, tensors: Sequence[Any], names: Sequence[str] | None) -> list[Any]:
        """Reduce any list; parameters and errors as for a call of `Engine`.  Collective."""
        labels = None if names is None else tuple(names)
        results = self(tensors, labels)
        if results is not None:
            return results
        bound = self._ranks.bindings.find(self._question._replace(names=labels).key(tensors))
        if bound is not None:
            self._remember(bound, len(tensors))
            results = self(tensors, labels)
        # Who takes its tensors in the order of their axes once does so for good: ranks then agree whatever they get.
        return self._anew(tensors, labels, in_memory_order=bound is None) if results is None else results

    def _anew(self, tensors: Sequence[Any], names: tuple[str, ...] | None, in_memory_order: bool) -> list[Any]:
        """Reduce a list that is like none, or whose tensors lie in memory otherwise on other ranks."""
        question = self._question._replace(names=names)
        bound = bind_list(self._ranks, tensors, question, self._timeout_seconds, in_memory_order)
        bound.key = question.key(tensors)
        self._remember(bound, len(tensors))
        results = self(tensors, names)
        assert results is not None  # it was bound for these
        return results

    def _remember(self, bound: BoundList, length: int) -> None:
        """Take note that the next list of that length is mostly like this one; nothing here keeps it."""
        if len(self._last) >= _KEPT_LENGTHS:
            self._last.clear()
        self._last[length] = ref(bound)
