"""What to say when ranks do not make the same collective call: who differs from whom, and in which tensor."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from mpidist.errors import CollectiveMismatchError, MergeCallError, counted, listed

#: What a rank says about its call: ``{"call": "all_reduce(sum)", "tensors": [[name, dtype, shape], ...], "packs":
#: [[algorithm, bytes], ...]}``; packs where something is reduced.  A tensor without a dtype, named ``"what: value"``,
#: is a *fact*: something else that must be the same on all ranks; ``"advice"`` says what to do where facts only differ.
Description = dict[str, Any]

#: The name of the call with which a `merge_call` begins.
MERGE_CALL = "merge_call"

#: Of so many groups of ranks is said what they differ in; in a large job all ranks may differ from each other.
_MOST_GROUPS = 8


def fact(what: str, value: Any) -> tuple[str, str, tuple[int, ...]]:
    """Return what a description has among its tensors for something else that all ranks must have alike.  Local."""
    return f"{what}: {value}", "", ()


class OrdersDiffer(CollectiveMismatchError):
    """Ranks make the same call on tensors whose axes lie in memory in different orders: it can be made again."""


def mismatch_error(descriptions: Sequence[Description], number: int, rank: int) -> CollectiveMismatchError:
    """Return the error to raise, the same on all ranks; parameters as for `explain`.  Local."""
    if _differ_in_orders_only(descriptions):
        return OrdersDiffer(f"rank {rank} of {len(descriptions)}: tensors lie in memory in different orders")
    text = explain(descriptions, number, rank)
    if MERGE_CALL in {description["call"] for description in descriptions}:
        return MergeCallError(
            f"Some replicas made a different number of replica_context().merge_call() calls. {text}; make each "
            "merge_call on every replica"
        )
    return CollectiveMismatchError(text)


def _differ_in_orders_only(descriptions: Sequence[Description]) -> bool:
    first, *others = ({key: value for key, value in each.items() if key != "orders"} for each in descriptions)
    return all(other == first for other in others) and any(each != descriptions[0] for each in descriptions)


def explain(descriptions: Sequence[Description], number: int, rank: int) -> str:
    """Return the message of a mismatch.

    `descriptions` are what each rank of the group called as its call `number`; `rank` is the one that will raise.
    """
    groups: dict[str, list[int]] = {}
    first = descriptions[0]
    for other, description in enumerate(descriptions):
        groups.setdefault(repr(description), []).append(other)
    expected, *rest = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    shown = rest[:_MOST_GROUPS]
    lines = [_difference(other, descriptions[other[0]], expected, descriptions[expected[0]]) for other in shown] or [
        "all ranks describe the same call, but their digests differ: do all ranks run the same version of mpidist?"
    ]
    if len(rest) > len(shown):
        lines.append(f"{sum(map(len, rest[_MOST_GROUPS:]))} more ranks differ")
    advice = "Every rank must pass the same tensors, in the same order, to the same calls"
    if all((each["call"], _tensors(each)) == (first["call"], _tensors(first)) for each in descriptions):
        advice = first.get("advice", advice)
    return f"rank {rank} of {len(descriptions)}: ranks differ in collective call {number}: {'; '.join(lines)}. {advice}"


def _difference(ranks: list[int], got: Description, others: list[int], expected: Description) -> str:
    who, whom = _ranks(ranks), _ranks(others)
    if got["call"] != expected["call"]:
        return f"{who} called {_call(got)}, {whom} called {_call(expected)}"
    first = ""
    for index, (mine, theirs) in enumerate(zip_longest(_tensors(got), _tensors(expected))):
        if mine != theirs:
            first = f"tensor {index}: {who} passed {_tensor(mine)}, {whom} passed {_tensor(theirs)}"
            break
    count, expected_count = len(_tensors(got)), len(_tensors(expected))
    if count != expected_count:
        counts = counted(count, "tensor"), counted(expected_count, "tensor")
        return f"{who} passed {counts[0]} to {got['call']}, {whom} passed {counts[1]}; {first}"
    if first:
        return f"in {got['call']}, {first}"
    if facts := _facts(who, got, whom, expected):
        return f"in {got['call']}, {facts}"
    if got.get("packs") != expected.get("packs"):
        return (
            f"{who} reduce {_packs(got)}, {whom} {_packs(expected)}; CommunicationOptions, algorithms and kinds of "
            "arrays must be alike"
        )
    return f"{who} and {whom} describe {got['call']} differently: {got!r} and {expected!r}"


def _tensors(description: Description) -> list[Any]:
    return [tensor for tensor in description["tensors"] if tensor[1]]


def _facts(who: str, got: Description, whom: str, expected: Description) -> str:
    """Return the facts that differ, each with both values; empty when none does."""
    mine, theirs = (
        dict(label.split(": ", 1) for label, dtype, _ in description["tensors"] if not dtype)
        for description in (got, expected)
    )
    names = [name for name in {**theirs, **mine} if mine.get(name) != theirs.get(name)]
    # only the first few: an optimizer may have hundreds of groups
    return listed(f"{name}: {mine.get(name, 'none')} on {who}, {theirs.get(name, 'none')} on {whom}" for name in names)


def _packs(description: Description) -> str:
    packs = description.get("packs", [])
    names = ", ".join(dict.fromkeys(name for name, _ in packs))
    sizes = ", ".join(str(nbytes) for _, nbytes in packs[:4]) + (", ..." if len(packs) > 4 else "")
    return f"by {names} in {counted(len(packs), 'pack')} of {sizes} bytes"


def _call(description: Description) -> str:
    tensors = _tensors(description)
    shown = ", ".join(_tensor(tensor) for tensor in tensors[:3])
    return f"{description['call']} on {shown}{', ...' if len(tensors) > 3 else ''}" if tensors else description["call"]


def _tensor(tensor: Sequence[Any] | None) -> str:
    if tensor is None:
        return "none"
    name, dtype, shape = tensor
    return f"{name!r} {dtype} {tuple(shape)}" if name else f"{dtype} {tuple(shape)}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(map(str, ranks))}"
