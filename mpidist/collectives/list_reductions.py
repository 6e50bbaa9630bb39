"""All-reduces of lists with whatever may be asked for besides: factors, and arrays that some ranks do not have."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy

from mpidist import arrays
from mpidist.collectives.adjustment import AS_IT_IS, Adjustment
from mpidist.collectives.fused import FusedAllReduce
from mpidist.collectives.persistent import Bound
from mpidist.collectives.ranks import Ranks
from mpidist.errors import CollectiveMismatchError

#: How many bound lists with an adjustment are kept ready.
_KEPT = 8


class ListReductions:
    """The all-reduces of lists over some ranks.

    Parameters
    ----------
    ranks : Ranks
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._fused = FusedAllReduce(ranks)
        self._kept: dict[Any, Bound] = {}

    def bind(
        self,
        like: Sequence[Any],
        op: str,
        adjustment: Adjustment,
        algorithm: str | None,
        timeout_seconds: float | None,
    ) -> Bound:
        """Return the all-reduce of lists like this one; see `Communicator.all_reduce_init`.  Collective."""
        fused = self._fused if algorithm is None else FusedAllReduce(self._ranks, algorithm=algorithm)
        return fused.bound(like, op, timeout_seconds, adjustment)

    def __call__(
        self, tensors: Sequence[Any], op: str, adjustment: Adjustment, timeout_seconds: float | None
    ) -> list[Any]:
        """Return the reduced arrays of a list; see `Communicator.all_reduce_list`.  Collective."""
        if not tensors:
            return []
        if adjustment == AS_IT_IS:
            return self._fused(tensors, op, None, timeout_seconds)
        if adjustment.none_as_zeros:
            return self._with_none(tensors, op, adjustment, timeout_seconds)
        found: list[Any] = self._bound(tensors, op, adjustment, timeout_seconds)(tensors, timeout_seconds)
        return found

    def _bound(self, examples: Sequence[Any], op: str, adjustment: Adjustment, timeout_seconds: float | None) -> Bound:
        key = (op, adjustment, *((type(each), each.dtype, each.shape) for each in examples))
        found = self._kept.get(key)
        if found is None:
            found = self.bind(examples, op, adjustment, None, timeout_seconds)
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = found
        return found

    def _with_none(
        self, tensors: Sequence[Any], op: str, adjustment: Adjustment, timeout_seconds: float | None
    ) -> list[Any]:
        """Reduce a list with None in it: the shape of what this rank does not have it learns from the others."""
        known = self._signatures(tensors, op, timeout_seconds)
        there = [at for at, signature in enumerate(known) if signature is not None]
        kind = next((each for each in tensors if each is not None), numpy.empty(0))
        given = [tensors[at] for at in there]
        examples = [
            arrays.empty(known[at][1], known[at][0], kind) if each is None else each
            for at, each in zip(there, given, strict=True)
        ]
        results: list[Any] = [None] * len(tensors)
        if there:
            reduced = self._bound(examples, op, adjustment, timeout_seconds)(given, timeout_seconds)
            for at, result in zip(there, reduced, strict=True):
                results[at] = result
        return results

    def _signatures(self, tensors: Sequence[Any], op: str, timeout_seconds: float | None) -> list[Any]:
        """Return dtype and shape of each array of a list, as the first rank has it that has it.  Collective."""
        mine = [None if each is None else (each.dtype, tuple(each.shape)) for each in tensors]
        what = f"all_reduce({op}) with None"
        answers = [pickle.loads(raw) for raw in self._ranks.exchange(pickle.dumps(mine), what, timeout_seconds)]
        lengths = list(map(len, answers))
        if len(set(lengths)) > 1:
            raise CollectiveMismatchError(
                f"{self._ranks.control.own_name}: all_reduce({op}) got lists of {lengths} arrays, by rank; every rank "
                "must pass as many"
            )
        return [next((each for each in at if each is not None), None) for at in zip(*answers, strict=True)]
