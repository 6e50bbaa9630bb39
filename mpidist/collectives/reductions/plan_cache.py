"""Which plans are kept for another call: a matter of the calls alone, so that all ranks keep the same ones.

Neither the time, nor the memory of one rank, nor who still refers to a result has a say: a plan may be part of what all
ranks have together.  Results are another matter, see `ResultSet`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, Protocol

from mpidist.collectives.persistent import UNLIKE

#: The plans that are kept have at most so many times the bytes of the largest of them: two large lists may alternate,
#: as in a GAN, with short ones between them.
_TIMES_LARGEST = 3

#: So many bytes are kept in any case, and a plan counts for so many more than it says: short lists are many.
_LEAST_BYTES, _PLAN_BYTES = 1 << 26, 1 << 18

#: A plan that has not been used in so many calls is dropped, however much room there is; it is looked for now and then.
_UNUSED_CALLS, _CALLS_BETWEEN = 1024, 256


class Kept(Protocol):
    """What is kept.

    Ranks ask for it by `key`, the same on all of them.  `nbytes`, the same too, is about how much it holds with the
    results of one call.  `last_call`, 0 at first, is the cache's.
    """

    key: Any
    nbytes: int
    last_call: int


class PlanCache:
    """The plans of the lists that were reduced last."""

    def __init__(self) -> None:
        self._plans: dict[Any, Any] = {}
        self._calls = 0
        self._bytes = self._largest = 0  # of all plans, and of the largest

    def __iter__(self) -> Iterator[Any]:
        return iter(self._plans.values())

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, key: Any) -> Any | None:
        """Return the plan for this key, or None.  Local."""
        return self._plans.get(key)

    def use(self, plan: Kept) -> None:
        """Take note of a call that all ranks have made by `plan`: it is kept, and others may be dropped for it.

        Local; once for each such call.
        """
        self._calls = calls = self._calls + 1
        is_new = False
        if not plan.last_call:  # perhaps in the place of one for tensors that lay otherwise in this rank's memory
            is_new = plan.key not in self._plans
            self._plans[plan.key] = plan
        plan.last_call = calls
        if is_new:
            size = _size(plan)
            self._bytes += size
            self._largest = max(self._largest, size)
        if (is_new and self._bytes > _room(self._largest)) or not calls % _CALLS_BETWEEN:
            self._drop()

    def _drop(self) -> None:
        """Drop what was used least recently, while it is unused for long or more than may be kept."""
        latest = sorted(self._plans.values(), key=attrgetter("last_call"), reverse=True)
        sizes = list(map(_size, latest))
        # an eighth is left free, or each new list of many would have all of them sorted
        eighths = 7 if sum(sizes) > _room(max(sizes)) else 8
        while self._calls - latest[-1].last_call >= _UNUSED_CALLS or 8 * sum(sizes) > eighths * _room(max(sizes)):
            del self._plans[latest.pop().key], sizes[-1]
        self._bytes, self._largest = sum(sizes), max(sizes)


class Bindings(PlanCache):
    """Bound collectives by key; those go that were not used for long, see `PlanCache`.

    A key is the same on all ranks that make the same call: verb, operation, names, dtypes, shapes and options.
    """

    def free_results(self) -> None:
        """Give back the memory that is kept for results of later calls, which those then take anew.  Local."""
        for bound in list(self):
            bound.free_results()

    def call(
        self,
        key: Any,
        bind: Callable[..., Any],
        like: tuple[Any, ...],
        given: Any,
        timeout_seconds: float | None,
        paths: tuple[str, ...] = (),
    ) -> Any:
        """Return what the collective under `key` returns; ``bind(*like)`` makes it where it is not kept.

        Collective: every rank calls it in the same order.  Errors are those of the two, and nothing new is kept then.
        """
        if paths:
            key = key, paths
        bound = self._plans.get(key)
        if bound is None:
            bound = bind(*like)
            bound.call = bound.call.with_paths(paths)
            bound.key, bound.timeout_seconds = key, None  # the deadline is that of each call, not of the first
        results = bound.attempt(given, timeout_seconds)  # what `Bound.__call__` does, in fewer functions
        if results is UNLIKE:
            raise bound.unlike(given)
        self.use(bound)
        return results


def _room(largest: int) -> int:
    """Return how many bytes may be kept with a plan of so many."""
    return max(_LEAST_BYTES, _TIMES_LARGEST * largest)


def _size(plan: Kept) -> int:
    """Return what a plan counts."""
    return plan.nbytes + _PLAN_BYTES
