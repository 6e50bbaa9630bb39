"""All-reduces of lists with whatever may be asked for besides: factors, and arrays that some ranks do not have."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from mpidist import arrays
from mpidist.collectives.reductions.adjustment import Adjustment
from mpidist.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


def adjusted_list(
    ranks: Communicator,
    tensors: Sequence[Any],
    op: str,
    adjustment: Adjustment,
    timeout_seconds: float | None,
    names: tuple[str, ...] | None,
) -> list[Any]:
    """Return the reduced arrays of a list; see `Communicator.all_reduce_list`.  Collective."""
    examples, there = tensors, list(range(len(tensors)))
    results: list[Any] = [None] * len(tensors)
    if adjustment.none_as_zeros:  # the shape of what this rank does not have it learns from the others
        known = _signatures(ranks, tensors, op, timeout_seconds)
        there = [at for at, signature in enumerate(known) if signature is not None]
        if not there:
            return results
        kind = next((each for each in tensors if each is not None), numpy.empty(0))
        examples = [
            arrays.empty(known[at][1], known[at][0], kind) if tensors[at] is None else tensors[at] for at in there
        ]
        tensors, names = [tensors[at] for at in there], names and tuple(names[at] for at in there)
    key = ("all_reduce_list", op, adjustment, names, *((type(each), each.dtype, each.shape) for each in examples))
    like = (examples, op, timeout_seconds, adjustment, names)
    reduced = ranks.bindings.call(key, ranks.engine().bind, like, tensors, timeout_seconds)
    for at, result in zip(there, reduced, strict=True):
        results[at] = result
    return results


def _signatures(ranks: Communicator, tensors: Sequence[Any], op: str, timeout_seconds: float | None) -> list[Any]:
    """Return dtype and shape of each array of a list, as the first rank has it that has it.  Collective."""
    mine = [None if each is None else (each.dtype, tuple(each.shape)) for each in tensors]
    what = f"all_reduce({op}) with None"
    answers = [pickle.loads(raw) for raw in ranks.exchange(pickle.dumps(mine), what, timeout_seconds)]
    lengths = list(map(len, answers))
    if len(set(lengths)) > 1:
        raise CollectiveMismatchError(
            f"{ranks.control.own_name}: all_reduce({op}) got lists of {lengths} arrays, by rank; every rank "
            "must pass as many"
        )
    return [next((each for each in at if each is not None), None) for at in zip(*answers, strict=True)]
