"""The update of variables in one copy: each rank of the node updates its part of the shared arrays.

All ranks have the same gradients, summed already.  The work is dealt by elements, whatever variables these belong to:
a rank gets some of the small variables, and a span of a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from mpidist.collectives.call import Call
from mpidist.optimizers.rule import Rule, Step
from mpidist.optimizers.slots import Slots
from mpidist.optimizers.updates.parts import elements_to_update, update_part

#: Of so many lists of variables the description is kept, which takes longer to make than to compare.
_KEPT_CALLS = 8


class Span(NamedTuple):
    """Elements `start` to `stop` of the `number`-th of some things."""

    number: int
    start: int
    stop: int


def parts_of(lengths: Sequence[int], rank: int, size: int, cuts: bool) -> list[Span]:
    """Return what one rank gets of some things; all ranks together get every element once.  Pure.

    `lengths` are in elements.  With `cuts` a thing may be cut, so that several ranks get a span of it.
    """
    ends = list(accumulate(lengths))
    total = ends[-1] if ends else 0
    first, last = rank * total // size, (rank + 1) * total // size
    spans = []
    for number, (length, end) in enumerate(zip(lengths, ends, strict=True)):
        begin = end - length
        if cuts:
            start, stop = max(first, begin), min(last, end)
        else:  # all of it is for the rank to which its middle belongs
            start, stop = (begin, end) if first <= begin + length // 2 < last else (begin, begin)
        if start < stop:
            spans.append(Span(number, start - begin, stop - begin))
    return spans


class OneCopyUpdates:
    """What one optimizer keeps for such updates: the descriptions of some lists of variables."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, ...], tuple[Call, list[Any]]] = {}

    def run(
        self, rule: Rule, slots: Slots, gradients: Sequence[Any], variables: Sequence[Any], steps: Sequence[Step]
    ) -> None:
        """Apply summed gradients to variables that share one copy.

        Collective: every rank calls it in the same order, with the same gradients.
        """
        # New slots are made together; all have filled them when the change begins.
        own = [slots.of(variable) for variable in variables]
        one_copy = variables[0].one_copy
        lengths = [elements_to_update(rule, *each) for each in zip(gradients, variables, steps, strict=True)]
        with one_copy.changes(self._call(variables), variables):
            for part in parts_of(lengths, one_copy.rank, one_copy.size, type(rule).update is Rule.update):
                n = part.number
                update_part(rule, gradients[n], variables[n], own[n], steps[n], part.start, part.stop)

    def _call(self, variables: Sequence[Any]) -> Call:
        key = tuple(map(id, variables))
        if key not in self._calls:
            if len(self._calls) >= _KEPT_CALLS:
                self._calls.clear()
            call = Call("apply_gradients", [(each.name, each.dtype, each.shape) for each in variables])
            self._calls[key] = call, list(variables)  # which keeps their ids from being reused
        return self._calls[key][0]
