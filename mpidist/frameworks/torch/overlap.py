"""Gradients whose sums between nodes are begun in the backward pass, bucket by bucket, and taken at its end.

Backward passes give gradients about in the reverse order of the parameters, and so lie the buckets.  When the last
gradient of a bucket has come, and the buckets before it have begun, its values are copied and its sum is begun; the sum
moves on with each gradient that comes.  Nothing waits, and no gradient is touched, before the pass is over.  Then one
call tells whether the sums count on all replicas: one pass has given all, and nothing has changed a gradient since it
was copied.  Only then are the sums put in place of the gradients.

This takes copies and comparisons that sums after the pass do without.  So steps of both kinds are timed, and the
quicker kind is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from weakref import WeakMethod, finalize
from zlib import crc32

import numpy
import torch

from mpidist.collectives.reductions.plan import Plan
from mpidist.collectives.ways.pieces import Pieces
from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch.backward import current_pass
from mpidist.frameworks.torch.comparison import StepComparison
from mpidist.frameworks.torch.gradients import GradientList
from mpidist.frameworks.torch.tensors import array_of, is_dense, is_flat, is_on_host

#: Arrays of so many bytes are told by sums of blocks of so many, with odd multiples of a number as weights.
_LONG_BYTES, _BLOCK_BYTES, _WEIGHT = 1 << 16, 1 << 12, numpy.uint64(0x9E3779B97F4A7C15)

#: After so many reductions in a row that could not take what was begun, nothing is begun any more.
_MOST_MISSED = 3

#: So many steps of each kind are timed.  The quickest counts: between others, users may have done something else.
_STEPS_TIMED = 3

#: Sums begin in the pass where a step then takes at most so much of the time of one with sums after the pass.
_MOST_OF_STEP = 0.95


class StepTimes:
    """How long the steps take whose sums are made after the pass, and those whose sums begin in it.

    Ranks that make the same steps know the same at the same time, but for the seconds.
    """

    def __init__(self) -> None:
        self._last: tuple[bool, float] | None = None
        self._sums: list[float] = []
        self._steps: tuple[list[float], list[float]] = [], []

    def note(self, is_early: bool, begun: float, ended: float) -> None:
        """Take note when a reduction began and ended, and whether its sums had begun in the pass.  Local.

        A step is from the end of one reduction to that of the next, if both are of one kind.
        """
        last, self._last = self._last, (is_early, ended)
        steps = self._steps[is_early]
        if last is not None and last[0] is is_early and len(steps) < _STEPS_TIMED:
            steps.append(ended - last[1])
            if not is_early:
                self._sums.append(ended - begun)

    def interrupt(self) -> None:
        """Take note of a reduction of another kind.  Local."""
        self._last = None

    def may_gain(self) -> bool:
        """Return whether sums after the pass take so long that to begin them in it may be a gain.  Local."""
        after = self._steps[False]
        is_known = len(after) >= _STEPS_TIMED
        return is_known and min(self._sums, default=0.0) >= (1 - _MOST_OF_STEP) * min(after, default=0.0)

    def gained(self) -> float:
        """Return how many seconds a step gains by early sums, less what it must gain; 0 until that is known.  Local."""
        after, early = self._steps
        return _MOST_OF_STEP * min(after) - min(early) if len(early) >= _STEPS_TIMED and early else 0.0


class Overlap:
    """The early sums of the gradients of one list.

    `plan` is of the signatures in reverse order; `number`, the list's, is the same on all replicas.  ``may_begin()``
    returns whether the pass that is going on gives all that is reduced next.  `is_over`, the same on all replicas: this
    is not used any more.
    """

    def __init__(
        self, replicas: Replicas, gradients: GradientList, plan: Plan, number: int, may_begin: WeakMethod[Any]
    ) -> None:
        self.gradients = gradients
        self.is_over = False
        self._may_begin = may_begin
        self._scale = 1.0 / replicas.size if plan.op == "mean" else None
        self._parameters = gradients.parameters[::-1]
        engine = replicas.engine()
        assert engine is not None  # the plan is from it
        self._sums = engine.bind_early(plan, number, gradients.flags_signature, 2 + gradients.tell().size)
        self._members = [bucket.tensors for bucket in plan.buckets]
        self._pieces = [Pieces(bucket.offsets) for bucket in plan.buckets]
        self._bucket_of = {id(self._parameters[each]): n for n, found in enumerate(self._members) for each in found}
        self._missed = 0
        self._reset()
        came = WeakMethod(self.came)

        def hook(parameter: torch.Tensor) -> None:
            known = came()
            if known is not None:
                known(parameter)

        for each in self._parameters:
            finalize(self, each.register_post_accumulate_grad_hook(hook).remove)

    def _reset(self) -> None:
        """Wait for the first gradient of the next pass."""
        self._pass = -1
        self._is_spoiled = False
        self._lacking = [len(each) for each in self._members]
        self._come: set[int] = set()
        self._copied: list[list[int | None]] = []  # by bucket that was copied: the check sums of its gradients

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
        while len(self._copied) < len(self._lacking) and not self._lacking[len(self._copied)]:
            self._copy(len(self._copied))
        if self._copied and not self._is_spoiled:
            self._sums.move_on(len(self._copied))

    def _copy(self, index: int) -> None:
        """Copy the gradients of a bucket to where they are summed, zeros for those that there are not."""
        arrays, sums = [], []
        for parameter in self._of_bucket(index):
            gradient = parameter.grad
            if gradient is not None and not _is_plain(gradient, parameter):
                self._is_spoiled = True
                return
            if gradient is None:
                array = numpy.zeros(parameter.shape, self._sums.buffers[index].dtype)
            else:
                array = array_of(gradient)
            arrays.append(array if array.flags.c_contiguous else array.copy(order="C"))
            sums.append(None if gradient is None else _check_sum(arrays[-1]))
        self._pieces[index].gather(0, self._pieces[index].elements, arrays, self._sums.buffers[index])
        self._copied.append(sums)

    def _of_bucket(self, index: int) -> Iterator[torch.Tensor]:
        return (self._parameters[each] for each in self._members[index])

    # -- at its end ---------------------------------------------------------------------------------------------------

    def reduce(self, is_asked: bool, bound: GradientList, gained: float, compared: StepComparison | None) -> bool:
        """Take the early sums if they count on all replicas, and return whether they do.

        Collective: every rank calls it in the same order, before a reduction of any other kind.  `is_asked`: the last
        pass was to give all that is reduced.  `bound` is that of the parameters that there are now, `gained` as of
        `StepTimes`, `compared` what is compared with them.
        """
        counts = is_asked and bound is self.gradients and self._pass >= 0 and self._complete()
        self._missed = 0 if counts else self._missed + 1
        flags, gradients = self._sums.flags, self.gradients
        flags[0] = bound is not gradients or self._missed >= _MOST_MISSED
        flags[1] = gained
        flags[2:] = gradients.tell() if counts else 0
        self._is_spoiled = True  # until the call has come to its end
        if compared is not None:
            compared.compare_groups(self._sums)
        has_taken = self._sums(counts)
        self.is_over = flags[0] != 0 or flags[1] < 0
        if has_taken:
            gradients.hear(flags[2:])
            self._put_in_place()
        self._reset()
        if self.is_over:
            self._sums.close()
        return has_taken

    def _complete(self) -> bool:
        """Copy the buckets that lack gradients, and return whether those copied before are as they were."""
        copied = ((self._of_bucket(index), sums) for index, sums in enumerate(self._copied))
        pairs = (pair for each in copied for pair in zip(*each, strict=True))
        if self._is_spoiled or any(_has_changed(*each) for each in pairs):
            return False
        while len(self._copied) < len(self._members) and not self._is_spoiled:
            self._copy(len(self._copied))
        return not self._is_spoiled

    def _put_in_place(self) -> None:
        """Put the sums, or means, in place of the gradients that any replica has."""
        has = self.gradients.has[::-1]
        for pieces, members, values in zip(self._pieces, self._members, self._sums.buffers, strict=True):
            for (start, stop), each in zip(pairwise(pieces.offsets), members, strict=True):
                if has[each]:
                    self._put(self._parameters[each], values[start:stop])

    def _put(self, parameter: torch.Tensor, values: Any) -> None:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter, memory_format=torch.contiguous_format)
        array = array_of(parameter.grad)
        if self._scale is None:
            array[...] = values.reshape(array.shape)
        else:
            numpy.multiply(values.reshape(array.shape), self._scale, out=array)


def _is_plain(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a gradient can be copied, and sums put in its place."""
    is_like = gradient.layout is torch.strided and gradient.dtype is parameter.dtype
    return is_like and is_on_host(gradient) and (is_flat(gradient) or is_dense(gradient))  # the first is quicker


def _has_changed(parameter: torch.Tensor, check_sum: int | None) -> bool:
    """Return whether a parameter's gradient is not what was copied."""
    gradient = parameter.grad
    if gradient is None or check_sum is None:
        return gradient is not None or check_sum is not None
    return not _is_plain(gradient, parameter) or _check_sum(array_of(gradient)) != check_sum


def _check_sum(array: Any) -> int:
    """Return 64 bits that stand for the bytes of an array, wherever it lies.

    Long arrays by sums of blocks, each with a weight of its own, and the first block as it is: a plain sum may stay
    where all signs change.
    """
    raw = array.reshape(-1).view(numpy.uint8)
    count = raw.size // _BLOCK_BYTES if raw.size >= _LONG_BYTES else 0
    whole = count * _BLOCK_BYTES
    sums = raw[:whole].view(numpy.uint64).reshape(count, _BLOCK_BYTES // 8).sum(axis=1)
    weights = _WEIGHT * numpy.arange(1, 2 * count, 2, dtype=numpy.uint64)
    return int((sums * weights).sum()) ^ crc32(raw[whole:], crc32(raw[:_BLOCK_BYTES]))
