"""A collective call as all ranks must make it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidist.collectives.mismatch import Description, fact

#: What `fact` returned, and what to do where it differs.
FactsAndAdvice = tuple[Sequence[tuple[str, str, tuple[int, ...]]], str]


def digest_of(description: Description) -> int:
    """Return the 64-bit digest that stands for a call on the status board."""
    raw = json.dumps(description, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


class Call:
    """What a rank says about its call.

    `packs` are the units in which tensors are reduced, each with algorithm and bytes.  `orders` has, for tensors that
    do not lie in memory in the order of their axes, the order in which these do.  `digest` is 64 bits that stand for
    the description; `what` is the call in a few words, for messages.
    """

    __slots__ = ("digest", "what", "_described", "_digest", "_say_more")

    def __init__(
        self,
        name: str,
        tensors: Sequence[tuple[str, Any, Sequence[int]]] = (),
        packs: Sequence[tuple[str, int]] = (),
        orders: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        described = [[label, str(dtype), list(shape)] for label, dtype, shape in tensors]
        self._described: Description = {"call": name, "tensors": described, "packs": [list(pack) for pack in packs]}
        if orders:
            self._described["orders"] = {str(index): list(order) for index, order in orders.items()}
        self.digest = self._digest = digest_of(self._described)
        self.what = _summary(self._described)
        self._say_more: Callable[[], FactsAndAdvice] | None = None

    def compare_too(self, digest: int, say: Callable[[], FactsAndAdvice]) -> None:
        """Have facts compared with the call from now on, which change from time to time.  Local.

        `digest` is 64 bits that stand for the facts; ``say()`` returns them, where they differ.
        """
        self.digest, self._say_more = self._digest ^ digest, say

    def with_paths(self, paths: Sequence[str]) -> Call:
        """Return this call for the first leaf of a structure, of all of whose leaves these are the paths.  Local."""
        return self.with_facts([fact(f"leaf {at}", path) for at, path in enumerate(paths)])

    def with_facts(self, facts: Sequence[tuple[str, str, tuple[int, ...]]]) -> Call:
        """Return this call with facts that all ranks must have alike, as `fact` has them.  Local."""
        return Call(self._described["call"], [*self._described["tensors"], *facts]) if facts else self

    @property
    def description(self) -> Description:
        """What the ranks tell each other where digests differ."""
        if self._say_more is None:
            return self._described
        facts, advice = self._say_more()
        more = [[label, dtype, list(shape)] for label, dtype, shape in facts]
        return {**self._described, "tensors": [*self._described["tensors"], *more], "advice": advice}


def _summary(description: Description) -> str:
    tensors = description["tensors"]
    if not tensors:
        return str(description["call"])
    name, dtype, shape = tensors[0]
    first = f"{name + ' ' if name else ''}{dtype}{shape}"
    more = len([each for each in tensors[1:] if each[1] or not dtype])  # facts are no tensors
    return f"{description['call']} of {first}" + (f" and {more} more" if more else "")
