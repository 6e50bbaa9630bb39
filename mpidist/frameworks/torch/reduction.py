"""When the gradients of a model are reduced: at the end of the backward pass, once a step.  `Overlap` may begin before.

So whatever comes between ``backward()`` and ``step()`` (clipping, unscaling, the user's own looking) finds the reduced
gradients, as it would in one process.  A replica that makes no backward pass joins the others in its step.

`GradientOrigins` knows where gradients come from.  Three things happen to them:

- A pass ends: all is reduced, unless more passes are awaited, or the pass was another loss's.
- A step begins: what is local is reduced.  So are the user's own gradients, where no pass was made.  What was reduced
  before counts once, and not at all where other replicas have new ones.
- What the user has changed between those two is taken only where one meaning is left, else it is an error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NoReturn
from weakref import WeakMethod, WeakSet

import numpy
import torch

from mpidist.collectives.early_buckets import EarlyPlan
from mpidist.collectives.early_sums import EarlySums
from mpidist.compression import Compression
from mpidist.errors import CollectiveMismatchError, listed, quoted
from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch import crossing, cuda
from mpidist.frameworks.torch.backward import PassWatch
from mpidist.frameworks.torch.comparison import StepComparison, check_equal
from mpidist.frameworks.torch.gradients import NOTES, GradientList
from mpidist.frameworks.torch.join import GRADIENTS, LOSS, WEIGHTED, Joining
from mpidist.frameworks.torch.marks import MarkState, digest_of
from mpidist.frameworks.torch.origins import GradientOrigins
from mpidist.frameworks.torch.overlap import Overlap, StepTimes, bound_early, planned
from mpidist.frameworks.torch.ownership import Ownership
from mpidist.frameworks.torch.row_parts import RowParts
from mpidist.frameworks.torch.tensors import Named, are_same, check_memory, trainable
from mpidist.frameworks.torch.unowned_parameters import UnownedParameters

#: What a replica tells the others with its gradients: its number of steps, modulo this, and of what kind these are.
_PHASES = NOTES - 8
_NOT_LEFT, _LEFT, _CHANGED, _MIXED, _TOUCHED, _OWN, _UNOWNED, _INSIDE = range(_PHASES, NOTES)

#: What users may ask for: sums begin in the backward pass where that is a gain, or never.
_OVERLAPS = ("auto", "none")


#: So often a replica is ready to begin sums in the pass, and another one is not, until it gives up.
_MOST_REFUSALS = 10


@dataclass(frozen=True)
class _Given:
    """What a replica gives to a reduction."""

    #: What was done to gradients that were reduced before, where there are no others.  They count only where no replica
    #: has others.
    left: MarkState = MarkState.CLEARED
    #: Passes have added to gradients that were reduced before.
    is_mixed: bool = False
    #: The user has changed what the passes gave.
    is_touched: bool = False
    #: The user's own gradients, of no pass.
    is_own: bool = False
    #: Among them are some that were reduced before, and perhaps changed in place.
    is_again: bool = False
    #: Nothing that counts: a step was to be made inside of a pass.
    is_inside: bool = False
    #: Nothing: this replica has run out of rows, and follows others.
    is_joined: bool = False

    @property
    def is_aside(self) -> bool:
        """Whether gradients are given only when it is known that they count."""
        return self.is_touched or self.left in (MarkState.CHANGED, MarkState.KEPT)


class GradientReduction:
    """Reduces the gradients of some parameters.

    ``named()`` returns the (name, parameter) pairs that there are now, in the same order on all ranks.  Gradients of
    `passes` backward passes are accumulated before they are reduced.  With `staging` ``"host"`` tensors of a device
    pass through host memory.  `overlap` ``"none"``: no reduction is begun in the backward pass.

    `parts` is told how many rows the loss of this replica is the mean of; then the next mean over replicas, of which
    all say it, is weighted by rows.  `is_held`: gradients are only accumulated for now.  `is_skipped`: steps take the
    gradients as they are for now.  There is `joining` where replicas may run out of rows.  `overlap` begins to reduce
    gradients in the backward pass, and `has_overlapped` tells that the last reduction was begun there.  `comparison` is
    what else is compared with each reduction, where no replica runs out of rows.  `ownership` tells whose each is.
    """

    def __init__(
        self,
        replicas: Replicas,
        named: Callable[[], Sequence[Named]],
        op: str,
        owner: str,
        passes: int = 1,
        staging: str | None = None,
        sparse_as_dense: bool = False,
        compression: Compression | None = None,
        overlap: str = "auto",
        *,
        comparison: StepComparison,
    ) -> None:
        if overlap not in _OVERLAPS:
            raise ValueError(f"overlap={overlap!r}: it is one of {', '.join(map(repr, _OVERLAPS))}")
        if compression is not None and not isinstance(compression, Compression):
            raise TypeError(
                f"compression={quoted(compression)}: pass None, or a stage such as mpidist.compression.Float16(); an "
                "operation is passed as op="
            )
        self.parts = RowParts(replicas, owner)
        self.is_held = self.is_skipped = False
        self.joining: Joining | None = None
        self.replicas, self.op, self.owner, self.comparison = replicas, op, owner, comparison
        self._named, self._staging = named, staging
        self._unowned: list[UnownedParameters] = []
        self.accumulate(passes)
        self._sparse_as_dense, self.compression = sparse_as_dense, compression
        self._list: GradientList | None = None
        self._sparse: frozenset[int] = frozenset()
        calls = WeakMethod(self.before_backward), WeakMethod(self.begin_backward), WeakMethod(self.end_backward)
        self._watch = PassWatch(*calls)
        self.ownership = Ownership(owner, named, self._watch.watch)
        self.origins = GradientOrigins(op == "sum" and replicas.size > 1)
        self.steps = 0  # by optimizers, since the beginning or the last `join`
        self._stepped: WeakSet[Any] = WeakSet()  # the optimizers that made a step since the last reduction
        self._all_stepped = False  # or all are taken for such, as this replica has followed others
        self._last: tuple[str, float | None] = (op, None)
        self._crossed = crossing.count()
        self._number = replicas.next_number()
        self._may_overlap = overlap != "none"
        self._planned: tuple[Any, EarlyPlan | None] = None, None
        self._refusals = 0
        self._early: EarlySums | None = None  # of the plan, until all ranks have agreed
        self.overlap: Overlap | None = None
        self.has_overlapped = False
        self._bind(trainable(named()))

    def _bind(self, named: Sequence[Named]) -> GradientList:
        """Return the list of these parameters, whose gradients nobody else reduces from now on."""
        check_memory(named, self._staging)
        self.ownership.take(named)
        self.ownership.watch()
        if self._list is not None and [name for name, _ in named] != self._list.names:
            self._sparse = frozenset()  # numbers of another list
        waiting = None if self._list is None else self._list.waiting()
        self._list = self._list_of(named, self.compression, waiting)
        self._times = StepTimes()
        self.origins.bind(self._list.parameters)
        return self._list

    def _list_of(self, named: Sequence[Named], compression: Compression | None, waiting: Any = None) -> GradientList:
        names, parameters = [name for name, _ in named], [each for _, each in named]
        owner, kinds = f"of {self.owner} {self._number}", (self._sparse, self._sparse_as_dense)
        return GradientList(self.replicas, names, parameters, *kinds, compression, owner, self._staging, waiting)

    def look_after(self, modules: Sequence[torch.nn.Module]) -> None:
        """Find parameters, from now on, that come into these modules and that nobody reduces.  Local."""
        prefixes = [f"{number}." for number in range(len(modules))] if len(modules) > 1 else [""]
        self._unowned = [UnownedParameters(*each) for each in zip(modules, prefixes, strict=False)]

    def listed(self) -> list[Named]:
        """Return the named parameters whose gradients are reduced.  Local."""
        assert self._list is not None
        return list(zip(self._list.names, self._list.parameters, strict=True))

    def _current(self) -> GradientList:
        """Return the list of the parameters as they are now: some may have been added, frozen, or cast."""
        now, bound = trainable(self._named()), self._list
        assert bound is not None
        parameters = [each for _, each in now]
        if are_same(parameters, bound.parameters) and are_same([each.dtype for each in parameters], bound.dtypes):
            return bound
        if new := [pair for pair in now if not self.ownership.has_taken(pair[1])]:
            check_equal(self.replicas, self.owner, new)
        return self._bind(now)

    def adopt(self) -> None:
        """Reduce, from now on, the gradients of the parameters that there are now.  Collective."""
        self.ownership.watch()
        self._current()

    def compress(self, compression: Compression | None) -> None:
        """Code gradients so from now on, the same on all ranks.  Local."""
        self.compression = compression
        self._bind(self.listed())

    def accumulate(self, passes: int) -> None:
        """Reduce gradients after so many backward passes each from now on.  Local."""
        if passes < 1:
            raise ValueError(f"backward_passes_per_step={passes}: it is 1 or more")
        self._passes = passes

    # -- when ---------------------------------------------------------------------------------------------------------

    def before_backward(self, parameter: torch.Tensor) -> bool:
        """Look whether gradients were cleared before the pass that is about to give this parameter's.

        Returns whether that is reduced here.
        """
        if not self.ownership.has_taken(parameter):
            if not self.ownership.has(parameter):
                return False
            now = [each for _, each in trainable(self._named())]
            if not are_same(now, self.origins.parameters):
                self.origins.bind(now)
        self.origins.look(self._watch.is_open)
        return True

    def begin_backward(self) -> None:
        """Take note of the first gradient of a pass."""
        if self.origins.begin():
            self.parts.clear()

    def end_backward(self) -> None:
        """Reduce the gradients if this was the last pass before a step."""
        origins = self.origins
        origins.passes += 1
        self.parts.note()
        is_mixed = origins.is_mixed()
        # added to those of a step that was made: of another loss, if they are set to zero next; else step() raises
        is_foreign = is_mixed and self.op == "sum" and self._is_stepped(None)
        if self.is_held or origins.passes < self._passes or is_foreign:
            origins.mark()
        else:
            self.reduce(_Given(is_mixed=is_mixed), is_at_end=not is_mixed)

    def _gives_all(self) -> bool:
        """Return whether the pass that is going on gives all that is reduced at its end, as it is.  Local."""
        is_other = self.is_held or self._passes > 1 or self.parts.said is not None or self.joining is not None
        return not (is_other or self.origins.passes or self.origins.is_mixed())

    def before_step(self, optimizer: Any, is_asked: bool = False) -> None:
        """Reduce what an optimizer would take that is not reduced yet; others may have made a backward pass.

        Collective.  Gradients that were reduced before count once.  An `optimizer` of None is any.  `is_asked`: the
        user says that the gradients are to be reduced, whatever was done to them.
        """
        if self.is_skipped and not is_asked:
            return
        if self._is_inside():
            self.reduce(_Given(is_inside=True))  # which raises
        origins, is_mixed = self.origins, self.origins.is_mixed(optimizer)
        if origins.has_local:
            # a GradScaler has looked for infinities among gradients of this replica
            is_touched = origins.are_changed(optimizer) or getattr(optimizer, "found_inf", None) is not None
            is_complete = origins.passes > 0 and not self._watch.is_open
            self.reduce(_Given(is_mixed=is_mixed, is_touched=is_touched and is_complete and not is_asked))
        elif origins.is_new or self._is_stepped(optimizer) or (is_mixed and self.op == "sum"):
            left = MarkState.REPLACED if origins.is_new else origins.left(optimizer)
            is_own = left in (MarkState.REPLACED, MarkState.CHANGED) and not is_asked
            # with an optimizer's own gradients, or none, go those of others
            is_alone = self.joining is None or left in (MarkState.KEPT, MarkState.CHANGED)
            is_again = not is_alone and origins.left() in (MarkState.KEPT, MarkState.CHANGED)
            self.reduce(_Given(left, is_mixed, is_own=is_own, is_again=is_again))

    def is_concerned(self, optimizer: Any) -> bool:
        """Return whether an optimizer takes what nobody reduces, or, in a pass, what is reduced here.  Local."""
        is_inside = not self.is_skipped and self._is_inside() and self.ownership.are_changed_by(optimizer)
        return is_inside or len(self._unowned_of(optimizer)) > 0

    def _is_inside(self) -> bool:
        """Return whether a pass is going on whose gradients are to be reduced at its end.  Local."""
        return self.replicas.size > 1 and self._watch.is_inside()

    def before_other(self, optimizer: Any) -> None:
        """Raise on all replicas as a step of an optimizer that is not distributed concerns this.  Collective."""
        if unowned := self._unowned_of(optimizer):
            self._refuse(unowned)
        self.before_step(optimizer)

    def _unowned_of(self, optimizer: Any) -> list[str]:
        """Return what to say of an optimizer's parameters that nobody reduces."""
        taken = {id(each) for group in optimizer.param_groups for each in group["params"]} if self._unowned else set()
        return [told for each in self._unowned if (told := each.found(taken))]

    def _is_stepped(self, optimizer: Any) -> bool:
        return self._all_stepped or (len(self._stepped) > 0 if optimizer is None else optimizer in self._stepped)

    def after_step(self, optimizer: Any) -> None:
        """Take note that an optimizer has made its step.  Collective where parameters were found to differ before."""
        self.steps += 1
        self._stepped.add(optimizer)
        if self.is_skipped:
            self._are_reduced()
        if self.joining is None:
            self.comparison.note(optimizer)
            self.comparison.settle()
        self.origins.take(optimizer)

    def _are_reduced(self, is_twice: bool = False) -> None:
        """Take the gradients for reduced.  Local."""
        self.origins.are_reduced(is_twice)
        self._watch.is_open = False
        self.parts.forget()

    def reduce(self, given: _Given = _Given(), is_at_end: bool = False) -> None:
        """Reduce the gradients, whatever has been done before.  Collective.

        `is_at_end` says that a pass has given all of them.
        """
        if self.joining is not None and not given.is_joined:
            is_again = self.op == "mean" and (given.is_again or self.origins.is_mixed_in_part)
            self.joining.announce(GRADIENTS if self.parts.said is None else WEIGHTED, is_again)
        bound, rows, compared = self._current(), self.parts.said, None if self.joining else self.comparison
        if compared is not None:
            compared.compare_parameters()
        is_own = given.is_own and not given.is_aside and self.op == "sum" and self.replicas.size > 1
        digest = digest_of(bound.parameters) if is_own else b""
        aside = _put_aside(bound.parameters) if given.is_aside and self.replicas.size > 1 else []
        op, scale = self._last = self._weight()
        notes, is_given = bound.notes, self.origins.has_local
        unowned = [told for each in self._unowned if (told := each.found())]
        self._tell(notes, given, len(digest) > 0, len(unowned) > 0)
        with torch.no_grad():
            sparse = self._reduced(bound, op, scale, compared, is_at_end)
        if compared is not None:
            compared.are_compared()
        if notes[_INSIDE]:
            self._refuse_inside(given.is_inside)
        if notes[_UNOWNED]:
            self._refuse(unowned)
        if notes[_TOUCHED]:
            self._take_touched(aside, given.is_touched)
        self._stepped.clear()
        self._all_stepped = False
        self._are_reduced(self.op == "sum")
        if sparse != self._sparse:
            self._sparse = self._sparse | sparse
            self._bind(self.listed())
            self.origins.mark()
        if numpy.count_nonzero(notes) > 2:
            self._judge(notes, given.is_joined)
            if notes[_OWN]:
                self._judge_own(digest or (b"passes" if is_given else b""))
        if aside and not notes[_NOT_LEFT]:
            _put_back(aside)
            if notes[_CHANGED] and not given.is_joined:  # perhaps the user's own, put in the place of those
                self.parts.said = rows
                self.reduce(_Given(is_own=given.is_own, is_again=True))
            self.origins.mark()

    def _reduced(
        self, bound: GradientList, op: str, scale: float | None, compared: StepComparison | None, is_at_end: bool
    ) -> frozenset[int]:
        """Take what was begun in the backward pass, or reduce all now; return the numbers of sparse gradients.

        Collective.
        """
        is_all = is_at_end and op == self.op and scale is None and self.joining is None
        is_timed = self._is_timed(bound)
        begun, overlap = self._now(bound) if is_timed else None, self.overlap
        self.has_overlapped = False
        if overlap is not None:
            self.has_overlapped = overlap.reduce(is_all, bound, self._times.gained(), compared)
            if overlap.is_over:
                self.overlap = None
                self._may_overlap &= overlap.gradients is not bound
            if self.has_overlapped:
                if is_timed:
                    self._times.note(True, begun, self._now(bound))
                return frozenset()
            compared = None  # with that call
        early = self._early_sums(bound) if self.overlap is None else None
        bound.keeps_apart[0] = early is None
        sparse = bound.reduce(op, scale, compared)
        if is_timed and is_all and overlap is None:
            self._times.note(False, begun, self._now(bound))
        else:
            self._times.interrupt()
        if early is not None and not bound.keeps_apart[0]:
            self._early = None
            self.overlap = Overlap(self.replicas, bound, early, WeakMethod(self._gives_all))
        elif early is not None:
            self._refusals += 1
            if self._refusals > _MOST_REFUSALS:  # the memory is for something else
                self._may_overlap, self._early = False, None
        return sparse

    def _is_timed(self, bound: GradientList) -> bool:
        """Return whether the time of this reduction may tell something.  Local."""
        has_plan = self._planned[0] is not bound or self._planned[1] is not None
        return self._may_overlap and bound.is_plain and has_plan and self._times.are_open and self.replicas.size > 1

    def _now(self, bound: GradientList) -> Any:
        """Return the time where gradients are reduced."""
        return cuda.now(bound.parameters[0]) if bound.on_device else perf_counter()

    def _early_sums(self, bound: GradientList) -> EarlySums | None:
        """Return what sums in backward passes; None where that cannot be, or is no gain.  Local."""
        if not (self._may_overlap and bound.is_plain and self._passes == 1 and self.joining is None):
            return None
        if not self._times.may_gain():
            return None
        if self._planned[0] is not bound:
            self._planned, self._early = (bound, planned(self.replicas, bound, self.op)), None
        plan = self._planned[1]
        if plan is not None and self._early is None:
            try:
                self._early = bound_early(self.replicas, bound, plan, self._number)
            except MemoryError:  # of the device: sums after the pass take none
                self._may_overlap = False
        return self._early

    def _tell(self, notes: Any, given: _Given, is_own: bool, is_unowned: bool) -> None:
        """Set what this replica tells the others.  Local."""
        notes.fill(0)
        if given.is_joined:
            return
        notes[self.steps % _PHASES] = 1
        notes[_NOT_LEFT if given.is_touched or not given.is_aside else _LEFT] = 1
        notes[_CHANGED] = given.left is MarkState.CHANGED
        notes[_MIXED] = given.is_mixed
        notes[_TOUCHED] = given.is_touched and self.replicas.size > 1
        notes[_OWN] = is_own
        notes[_UNOWNED] = is_unowned
        notes[_INSIDE] = given.is_inside

    def join(self, joining: Joining | None) -> None:
        """Have replicas run out of rows from now on, or no more.  Local."""
        self.joining = joining
        if joining is None:
            self.steps, self.origins.is_whole = 0, self.op == "sum"
        else:
            self.origins.overlook_none()

    def follow(self, is_weighted: bool) -> None:
        """Take part in the others' reduction, with no rows.  Collective."""
        assert self.joining is not None
        self.parts.forget()
        self.parts.said = 0.0 if is_weighted else None
        self.reduce(_Given(MarkState.KEPT, is_joined=True))

    def catch_up(self, root: int, followers: Sequence[int]) -> None:
        """Give followers the gradients of rank `root`, no follower, as if they had done to them what that did since.

        Collective.  RuntimeError, on all ranks, where the others have changed gradients in place, and not alike, or
        have added to them what is not reduced.
        """
        origins, bound = self.origins, self._current()
        has_passes = origins.has_local
        present = 0 if has_passes else sum(each.grad is not None for each in bound.parameters)
        own = {
            "is_due": has_passes or self._is_stepped(None),
            "has_passes": has_passes,
            "is_mixed": has_passes and origins.is_mixed_in_part,
            "left": None if has_passes else origins.left().name,
            "gradients": f"{present} {digest_of(bound.parameters).decode()}" if present else None,
        }
        raw = self.replicas.communicator.exchange(json.dumps(own).encode(), "gradients behind join()")
        told = [json.loads(each) for each in raw]
        last, others = told[root], [each for rank, each in enumerate(told) if rank not in followers]
        self._all_stepped, left = last["is_due"], last["left"]
        is_alike, is_kept = all(each == last for each in others), left == MarkState.KEPT.name
        is_mixed = any(each["is_mixed"] for each in others)
        if is_kept and not is_mixed and any(each["has_passes"] for each in others):
            return  # they have what the last has
        if is_mixed or (not is_alike and (is_kept or left == MarkState.CHANGED.name)):
            raise RuntimeError(
                f"{self.owner}: gradients were changed in place since they were reduced, to other values on other "
                "ranks, or passes under no_sync() have added to them, when join() ended, and rank "
                f"{listed(map(str, followers))} of {self.replicas.size} had run out before. What is right there is not "
                "known. Change them alike on all ranks; have step() reduce those of your own inside of the block; or "
                "call zero_grad() at its end"
            )
        aside = _put_aside(bound.parameters)
        if is_alike and last["gradients"]:
            if self.replicas.rank == root:
                _put_back([(parameter, gradient.clone()) for parameter, gradient in aside])
            plain = bound if self.compression is None else self._list_of(self.listed(), None)
            plain.notes.fill(0)
            with torch.no_grad():
                plain.reduce("sum")
        if self.replicas.rank not in followers:
            _put_back(aside)
        elif left != MarkState.REPLACED.name:
            _put_in_place(aside, is_kept)

    def _refuse_inside(self, is_inside: bool) -> NoReturn:
        """Raise on all replicas, as on some a step was to be made inside of a backward pass.  Collective."""
        told = self.replicas.communicator.exchange(b"inside" if is_inside else b"", "steps inside of backward()")
        raise RuntimeError(
            f"{self.owner}: an optimizer's step was called inside of backward(), as by a hook of a parameter, on rank "
            f"{_ranks(told)} of {self.replicas.size}; the gradients of a pass are reduced over the ranks at its end. "
            "Call step() behind backward(), and leave out the hook. Where the hook itself reduces the gradient, put "
            "no_sync() and skip_synchronize() around backward()"
        )

    def _refuse(self, unowned: Sequence[str]) -> NoReturn:
        """Raise on all replicas, as some have parameters with gradients that nobody reduces.  Collective."""
        told = self.replicas.communicator.exchange("; ".join(unowned).encode(), "parameters that nobody reduces")
        first = next(filter(None, told)).decode()
        raise CollectiveMismatchError(
            f"{self.owner}: the model has parameters whose gradients nobody reduces, as they came, or were thawed, "
            f"after the optimizer was distributed: rank {_ranks(told)} of {self.replicas.size} {first}. "
            "Change the model before that, or give these parameters to the optimizer on all ranks: "
            "optimizer.add_param_group({'params': [...]}). Where only values change, write them into the parameter "
            "that is there: with torch.no_grad(): parameter.copy_(values). What is not to be trained has "
            "requires_grad=False"
        )

    def _take_touched(self, aside: Sequence[tuple[torch.Tensor, torch.Tensor]], is_touched: bool) -> None:
        """Take gradients that the user has changed before they were reduced, if all replicas have the same.

        Then their mean is what they are.  Raises on all replicas if not.  Collective.
        """
        _put_back(aside)
        own = b"changed " + digest_of([each for each, _ in aside]) if is_touched else b""
        told = self.replicas.communicator.exchange(own, "gradients")
        if self.op == "mean" and len({*told}) == 1:
            return
        raise RuntimeError(
            f"{self.owner}: gradients were changed (clipped, unscaled, added to, or reduced by hand) on rank "
            f"{_ranks(told)} before they were reduced: all passes were made under no_sync(), or fewer than "
            "backward_passes_per_step. What is right is not known. Call synchronize() before they are changed, or "
            "leave no_sync() for the last pass. Where you have reduced them by hand, put skip_synchronize() around "
            "step()"
        )

    def _judge_own(self, told: bytes) -> None:
        """Raise on all replicas if gradients that come from no pass may have been summed already.  Collective."""
        found = self.replicas.communicator.exchange(told, "gradients of no pass")
        own = [each if each != b"passes" else b"" for each in found]
        if own != found or (len({*own} - {b""}) == 1 and own.count(b"") < len(own) - 1):
            raise RuntimeError(
                f"{self.owner}: gradients of no backward pass are the same on all ranks that have them, or others made "
                f"a pass; those of rank {_ranks(own)}. Whether they were summed over the ranks already is not known. "
                "Where they were, put skip_synchronize() around step(); where not, call synchronize() before step()"
            )

    def _judge(self, notes: Any, is_joined: bool) -> None:
        """Raise on all replicas if what they have told makes the gradients wrong.  Collective."""
        if numpy.count_nonzero(notes[:_PHASES]) > 1:
            told = self.replicas.communicator.exchange(b"" if is_joined else b"%d" % self.steps, "steps")
            steps = ", ".join(f"rank {rank} {each.decode()}" for rank, each in enumerate(told) if each)
            raise CollectiveMismatchError(
                f"{self.owner}: ranks are not in the same step when gradients are reduced. Steps made: {steps}. Each "
                "rank makes as many backward passes before a step; with no_sync() around all of them, step() reduces "
                "what they gave, whatever their number"
            )
        if not notes[_MIXED]:
            return
        if self.op == "sum":
            raise RuntimeError(
                f"{self.owner}: a backward pass has added to gradients that were summed over the replicas already. "
                f"Ask a DistributedOptimizer for backward_passes_per_step={self._passes + 1} or more, put no_sync() "
                "around all passes but the last, or set gradients to zero in between"
            )
        if notes[_LEFT]:
            raise RuntimeError(
                f"{self.owner}: on some ranks a backward pass has added to gradients that were reduced already, and "
                "others made none. Set gradients to zero on all ranks before each step's first pass"
            )

    def reduced_loss(self, loss: float | None) -> float:
        """Return the loss of all replicas, reduced as the gradients were last; None: no rows here.  Collective."""
        if self.joining is not None and loss is not None:
            self.joining.announce(LOSS)
        op, scale = self._last
        loss = loss or 0.0
        value = numpy.array([loss if scale is None else loss * scale if scale else 0.0], numpy.float64)
        self.replicas.reduce(op, [value], "loss")
        return float(value[0])

    def require_weights(self, rows: float) -> None:
        """Raise ValueError where gradients are not weighted by rows.  Local."""
        if self.joining is not None and not self.joining.by_all:
            where = "join(divide_by_initial_world_size=False), which weighs ranks alike"
        elif self.op == "sum":
            where = "op='sum'"
        else:
            return
        raise ValueError(f"{self.owner}: rows={rows:g} is for means weighted by rows, not for {where}: leave rows out")

    def _weight(self) -> tuple[str, float | None]:
        """Return by what this replica's gradients are multiplied, and what is done with all of them.

        Collective where rows are weighted.
        """
        rows, self.parts.said = self.parts.said, None
        crossed, self._crossed = self._crossed, crossing.count()
        if self.joining is not None and not self.joining.by_all and self.op == "mean":
            return "sum", 1.0 / len(self.joining.active)
        if rows is None:
            return self.op, None
        if crossed != self._crossed:
            raise RuntimeError(
                f"{self.owner}: rows={rows} weights gradients of which some come from other replicas' losses, by "
                "SyncBatchNorm. Divide each loss by the rows of the global batch (compute_average_loss), with op='sum'"
            )
        if self.parts.is_open and self.origins.left() is MarkState.CLEARED:
            self.parts.clear()  # of another loss, whose gradients were set to zero
        return "sum", self.parts.part(rows)


class GradientOwner:
    """What a module and an optimizer whose gradients are reduced have in common."""

    _reduction: GradientReduction

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients in the passes of a ``with`` block; the next pass behind it reduces all.  Local."""
        before, self._reduction.is_held = self._reduction.is_held, True
        try:
            yield
        finally:
            self._reduction.is_held = before

    def synchronize(self) -> None:
        """Reduce the gradients now, if the backward passes have not done so, whatever was done to them since.

        Collective: every rank calls it in the same order.
        """
        self._reduction.before_step(self if isinstance(self, torch.optim.Optimizer) else None, is_asked=True)

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have ``step()`` take the gradients as they are, for the time of a ``with`` block.  Local."""
        before, self._reduction.is_skipped = self._reduction.is_skipped, True
        try:
            yield
        finally:
            self._reduction.is_skipped = before

    @property
    def has_overlapped(self) -> bool:
        """Whether the last reduction was begun in the backward pass, and not after it.  Local."""
        return self._reduction.has_overlapped

    @property
    def rows(self) -> float | None:
        """How many rows the next loss is the mean of: set before ``backward()``, it weights the mean over replicas.

        Every rank sets it, or none does.  Of several passes that are accumulated it is set before the first, and again
        where it changes; the reduction is a RuntimeError on all ranks unless each has the same part of every pass.

        Raises
        ------
        ValueError
            Less than 0; or gradients are summed, or `join` weighs ranks alike.
        """
        return self._reduction.parts.said

    @rows.setter
    def rows(self, rows: float) -> None:
        if not rows >= 0:
            raise ValueError(f"rows={rows}: a number of rows is 0 or more")
        self._reduction.require_weights(rows)
        self._reduction.parts.say(float(rows))


def _ranks(told: Sequence[bytes]) -> str:
    """Return the ranks that have told something, for a message."""
    return listed(str(rank) for rank, each in enumerate(told) if each)


def _put_aside(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters that have gradients, with these, and leave them without."""
    found = [(each, each.grad) for each in parameters if each.grad is not None]
    for parameter, _ in found:
        parameter.grad = None
    return found


def _put_in_place(aside: Sequence[tuple[torch.Tensor, torch.Tensor]], is_kept: bool) -> None:
    """Put parameters' gradients into those put aside, and these back; with `is_kept` equal ones are not touched."""
    for parameter, gradient in aside:
        if parameter.grad is not None:
            if not (is_kept and torch.equal(parameter.grad.to_dense(), gradient.to_dense())):
                gradient.copy_(parameter.grad)
            parameter.grad = gradient


def _put_back(aside: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for parameter, gradient in aside:
        parameter.grad = gradient
