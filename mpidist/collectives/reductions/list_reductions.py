"""All-reduces of lists with whatever may be asked for besides: factors, and arrays that some ranks do not have."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from mpidist import arrays
from mpidist.collectives.reductions.adjustment import AS_IT_IS, Adjustment
from mpidist.errors import CollectiveMismatchError

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: Of the arrays of a list; None where they have none.
Names = tuple[str, ...] | None


def reduce_list(
    ranks: Communicator,
    tensors: Sequence[Any],
    op: str,
    adjustment: Adjustment,
    timeout_seconds: float | None,
    names: Names = None,
) -> list[Any]:
    """Return the reduced arrays of a list; see `Communicator.all_reduce_list`.  Collective."""
    if not tensors:
        return []
    if adjustment == AS_IT_IS:
        return ranks.engine()(tensors, op, names, timeout_seconds)
    if adjustment.none_as_zeros:
        return _with_none(ranks, tensors, op, adjustment, timeout_seconds, names)
    return _adjusted(ranks, tensors, tensors, op, adjustment, timeout_seconds, names)


def _adjusted(
    ranks: Communicator,
    tensors: Sequence[Any],
    examples: Sequence[Any],
    op: str,
    adjustment: Adjustment,
    timeout_seconds: float | None,
    names: Names,
) -> list[Any]:
    """Return the reduced arrays of a list that is like `examples`.  Collective."""
    key = ("all_reduce_list", op, adjustment, names, *((type(each), each.dtype, each.shape) for each in examples))
    like = (examples, op, timeout_seconds, adjustment, names)
    found: list[Any] = ranks.bindings.call(key, ranks.engine().bind, like, tensors, timeout_seconds)
    return found


def _with_none(
    ranks: Communicator,
    tensors: Sequence[Any],
    op: str,
    adjustment: Adjustment,
    timeout_seconds: float | None,
    names: Names,
) -> list[Any]:
    """Reduce a list with None in it: the shape of what this rank does not have it learns from the others."""
    known = _signatures(ranks, tensors, op, timeout_seconds)
    there = [at for at, signature in enumerate(known) if signature is not None]
    kind = next((each for each in tensors if each is not None), numpy.empty(0))
    present = [tensors[at] for at in there]
    examples = [
        arrays.empty(known[at][1], known[at][0], kind) if each is None else each
        for at, each in zip(there, present, strict=True)
    ]
    results: list[Any] = [None] * len(tensors)
    if there:
        given_names = None if names is None else tuple(names[at] for at in there)
        reduced = _adjusted(ranks, present, examples, op, adjustment, timeout_seconds, given_names)
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
