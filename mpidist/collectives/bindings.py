"""`Bindings`: what a communicator has bound for calls that bind nothing themselves, of all verbs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.collectives.persistent import UNLIKE
from mpidist.collectives.reductions.plan_cache import PlanCache


class Bindings(PlanCache):
    """Bound collectives by key; those go that were not used for long, see `PlanCache`.

    A key is the same on all ranks that make the same call: verb, operation, names, dtypes, shapes and options.
    """

    def free_results(self) -> None:
        """Give back the memory that is kept for results of later calls, which those then take anew.  Local."""
        for bound in list(self):
            bound.free_results()

    def call(
        self, key: Any, bind: Callable[..., Any], like: tuple[Any, ...], given: Any, timeout_seconds: float | None
    ) -> Any:
        """Return what the collective under `key` returns; ``bind(*like)`` makes it where it is not kept.

        Collective: every rank calls it in the same order.  Errors are those of the two, and nothing new is kept then.
        """
        bound = self._plans.get(key)
        if bound is None:
            bound = bind(*like)
            bound.key, bound.timeout_seconds = key, None  # the deadline is that of each call, not of the first
        results = bound.attempt(given, timeout_seconds)  # what `Bound.__call__` does, in fewer functions
        if results is UNLIKE:
            raise bound.unlike(given)
        self.use(bound)
        return results
