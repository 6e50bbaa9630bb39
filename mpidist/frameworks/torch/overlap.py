"""Gradients whose sums between nodes are begun in the backward pass, bucket by bucket, and taken at its end.

Backward passes give gradients about in the reverse order of the parameters, and so lie the buckets.  When the last
gradient of a bucket has come, and the buckets before it have begun, its values are copied and its sum is begun; the sum
moves on with each gradient that comes; on a device it goes on by itself.  Nothing waits, and no gradient is touched,
before the pass is over.  Then one call tells whether the sums count on all replicas: one pass has given all, and
nothing has changed a gradient since it was copied.  Only then are the sums put in place of the gradients.

This takes copies and comparisons that sums after the pass do without.  So steps of both kinds are timed, and the
quicker kind is kept.
"""

from __future__ import annotations

from collections import deque
from typing import Any
from weakref import WeakMethod, finalize

import torch

from mpidist.collectives.early_buckets import EarlyPlan
from mpidist.collectives.early_sums import EarlySums
from mpidist.errors import listed
from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch import cuda
from mpidist.frameworks.torch.backward import current_pass
from mpidist.frameworks.torch.comparison import StepComparison
from mpidist.frameworks.torch.early_gradients import early_gradients
from mpidist.frameworks.torch.gradients import GradientList

#: What is told before the list's own: whether this is over, what is gained, on how many replicas that is known, and
#: whether the sums before were wrong.
_OVER, _GAINED, _KNOWN, _WRONG, _TOLD = range(5)

#: After so many reductions in a row that could not take what was begun, nothing is begun any more.
_MOST_MISSED = 3

#: So many steps of each kind are timed.  The quickest counts: between others, users may have done something else.
_STEPS_TIMED = 3

#: Sums begin in the pass where a step then takes at most so much of the time of one with sums after the pass.
_MOST_OF_STEP = 0.95


class StepTimes:
    """How long the steps take whose sums are made after the pass, and those whose sums begin in it.

    Ranks that make the same steps know the same at the same time, but for the seconds; those of a device are known when
    it has come there.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[bool, Any, Any] | None] = deque()
        self._last: tuple[bool, Any] | None = None
        self._sums: list[float] = []
        self._steps: tuple[list[float], list[float]] = [], []

    def note(self, is_early: bool, begun: Any, ended: Any) -> None:
        """Take note when a reduction began and ended, and whether its sums had begun in the pass.  Local.

        A step is from the end of one reduction to that of the next, if both are of one kind.  Times are `cuda.now`'s.
        """
        self._noted.append((is_early, begun, ended))
        self._look()

    def interrupt(self) -> None:
        """Take note of a reduction of another kind.  Local."""
        self._noted.append(None)
        self._look()

    def _look(self) -> None:
        """Time what is over."""
        while self._noted:
            noted = self._noted[0]
            if noted is None:
                self._last = None
            elif cuda.has_come(noted[2]):
                self._time(*noted)
            else:
                return
            self._noted.popleft()

    def _time(self, is_early: bool, begun: Any, ended: Any) -> None:
        last, self._last = self._last, (is_early, ended)
        steps = self._steps[is_early]
        if last is not None and last[0] is is_early and len(steps) < _STEPS_TIMED:
            steps.append(cuda.seconds_between(last[1], ended))
            if not is_early:
                self._sums.append(cuda.seconds_between(begun, ended))

    def may_gain(self) -> bool:
        """Return whether sums after the pass take so long that to begin them in it may be a gain.  Local."""
        after = self._steps[False]
        is_known = len(after) >= _STEPS_TIMED
        return is_known and min(self._sums, default=0.0) >= (1 - _MOST_OF_STEP) * min(after, default=0.0)

    def gained(self) -> float | None:
        """Return by how many seconds early sums shorten a step more than they must; None until it is known.  Local."""
        after, early = self._steps
        return _MOST_OF_STEP * min(after) - min(early) if len(early) >= _STEPS_TIMED and early else None

    @property
    def are_open(self) -> bool:
        """Whether more steps are to be timed."""
        return any(len(each) < _STEPS_TIMED for each in self._steps)


def planned(replicas: Replicas, gradients: GradientList, op: str) -> EarlyPlan | None:
    """Return the buckets of gradients, in reverse order; None where their sums cannot begin early here.  Local."""
    engine = replicas.engine()
    return None if engine is None else engine.early_plan(gradients.signatures[::-1], op, gradients.kind)


def bound_early(replicas: Replicas, gradients: GradientList, early: EarlyPlan, number: int) -> EarlySums | None:
    """Return the early sums of gradients; None where they cannot be for now.  Local.

    `number`, the list's, is the same on all replicas.  MemoryError where the device has too little.
    """
    engine = replicas.engine()
    assert engine is not None  # the plan is from it
    with gradients.in_order():
        told = _TOLD + gradients.tell().size
        return engine.bind_early(early, number, gradients.flags_signature, told)


class Overlap:
    """The early sums of the gradients of one list.

    ``may_begin()`` returns whether the pass that is going on gives all that is reduced next.  `is_over`, the same on
    all replicas: this is not used any more.
    """

    def __init__(
        self, replicas: Replicas, gradients: GradientList, sums: EarlySums, may_begin: WeakMethod[Any]
    ) -> None:
        self.gradients = gradients
        self.is_over = False
        self._replicas, self._sums, self._may_begin = replicas, sums, may_begin
        plan = sums.plan
        self._members = [bucket.tensors for bucket in plan.buckets]
        parameters = gradients.parameters[::-1]
        by_bucket = [[parameters[each] for each in found] for found in self._members]
        scale = 1.0 / replicas.size if plan.op == "mean" else None
        self._early = early_gradients(self._sums.buckets, by_bucket, scale)
        self._bucket_of = {id(each): index for index, found in enumerate(by_bucket) for each in found}
        self._missed = 0
        self._reset()
        came = WeakMethod(self.came)

        def hook(parameter: torch.Tensor) -> None:
            known = came()
            if known is not None:
                known(parameter)

        for each in parameters:
            finalize(self, each.register_post_accumulate_grad_hook(hook).remove)

    def _reset(self) -> None:
        """Wait for the first gradient of the next pass."""
        self._pass = -1
        self._is_spoiled = False
        self._lacking = [len(each) for each in self._members]
        self._come: set[int] = set()
        self._copied = 0  # buckets

    # -- in the backward pass -----------------------------------------------------------------------------------------

    def came(self, parameter: torch.Tensor) -> None:
        """Take note of a gradient, begin what is complete, and move on what is under way.  Local."""
        if self._is_spoiled:
            return
        number, key = current_pass(), id(parameter)
        may_begin = self._may_begin() if self._pass < 0 else None
        if may_begin is not None and may_begin():
            self._pass = number
        if number != self._pass or key in self._come:  # not all, or not the last, that is reduced next
            self._is_spoiled = True
            return
        self._come.add(key)
        self._lacking[self._bucket_of[key]] -= 1
        with self.gradients.in_order():
            self._sums.enter(())
            while self._copied < len(self._lacking) and not self._lacking[self._copied] and not self._is_spoiled:
                self._copy()
            if self._copied and not self._is_spoiled:
                self._sums.move_on(self._copied)

    def _copy(self) -> None:
        """Copy the gradients of the next bucket to where they are summed."""
        self._is_spoiled = not self._early.copy(self._copied)
        self._copied += not self._is_spoiled

    # -- at its end ---------------------------------------------------------------------------------------------------

    def reduce(
        self, is_asked: bool, bound: GradientList, gained: float | None, compared: StepComparison | None
    ) -> bool:
        """Take the early sums if they count on all replicas, and return whether they do.

        Collective: every rank calls it in the same order, before a reduction of any other kind.  `is_asked`: the last
        pass was to give all that is reduced.  `bound` is that of the parameters that there are now, `gained` as of
        `StepTimes`, `compared` what is compared with them.

        RuntimeError, on all replicas, where gradients on a device were not what was summed the last time.
        """
        with self.gradients.in_order():
            return self._reduce(is_asked, bound, gained, compared)

    def _reduce(
        self, is_asked: bool, bound: GradientList, gained: float | None, compared: StepComparison | None
    ) -> bool:
        counts = is_asked and bound is self.gradients and self._pass >= 0
        was_wrong = self._early.were_wrong()
        counts = counts and self._complete()
        self._missed = 0 if counts else self._missed + 1
        flags, gradients = self._sums.flags, self.gradients
        flags[_OVER] = bound is not gradients or self._missed >= _MOST_MISSED
        flags[_GAINED], flags[_KNOWN] = gained or 0.0, gained is not None
        flags[_WRONG] = was_wrong
        flags[_TOLD:] = gradients.tell() if counts else 0
        self._is_spoiled = True  # until the call has come to its end
        if compared is not None:
            compared.compare_groups(self._sums)
        has_taken = self._sums(counts)
        is_known = round(flags[_KNOWN]) == self._replicas.size
        self.is_over = bool(flags[_OVER] or flags[_WRONG] or (is_known and flags[_GAINED] < 0))
        if flags[_WRONG]:
            self._refuse(was_wrong)
        if has_taken:
            gradients.hear(flags[_TOLD:])
            self._put_in_place()
        else:
            self._early.forget()
        self._reset()
        if self.is_over:
            if has_taken and gradients.on_device:
                self._refuse(self._early.were_wrong())
            self._sums.end()
        return has_taken

    def _complete(self) -> bool:
        """Copy the buckets that lack gradients, and return whether those copied before are as they were."""
        if self._is_spoiled or not self._early.are_as_copied(self._copied):
            return False
        while self._copied < len(self._members) and not self._is_spoiled:
            self._copy()
        return not self._is_spoiled

    def _put_in_place(self) -> None:
        """Put the sums, or means, in place of the gradients that any replica has."""
        has = self.gradients.has[::-1]
        for index, members in enumerate(self._members):
            self._early.put(index, [bool(has[each]) for each in members])

    def _refuse(self, is_own: bool) -> None:
        """Raise on all replicas, where some have summed other gradients than those of a pass.  Collective."""
        told = self._replicas.communicator.exchange(b"wrong" if is_own else b"", "gradients that were changed")
        ranks = listed(str(rank) for rank, each in enumerate(told) if each)
        if ranks:
            raise RuntimeError(
                f"in a backward pass, the last one or the one before it, gradients on rank {ranks} of "
                f"{self._replicas.size} were changed after their sum was begun, in a way that PyTorch does not see, as "
                "by parameter.grad.data; the sum has them as they were before. Change parameter.grad itself, or change "
                "it behind backward(), or pass overlap='none'"
            )
