"""Replicas that run out of rows before others: they take part in what is left without rows of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy

from mpidist.frameworks.replicas import Replicas

#: What is about to happen: rank 0's buffers are given to all, or gradients are reduced, or these weighted by rows.
BUFFERS, GRADIENTS, WEIGHTED = range(3)

_is_open = False


@contextmanager
def sole_block() -> Iterator[None]:
    """Refuse blocks inside of this one: RuntimeError.  Local."""
    global _is_open
    if _is_open:
        raise RuntimeError(
            "join() inside of join(): a rank that runs out of rows can follow the others in one block only. Leave the "
            "first block before the second, or make one DistributedDataParallel of a module that has both models"
        )
    _is_open = True
    try:
        yield
    finally:
        _is_open = False


class Joining:
    """Who still has rows, and what those do next: told to all before each collective of theirs.

    `is_strict`: a replica that has run out is an error on all.  `by_all`: a mean divides by all replicas, not by those
    that still have rows.  `active` are the ranks that had rows at the last collective, `followers` those that had none
    when gradients were reduced last.  `is_added`: passes have added to gradients that were reduced before.
    """

    def __init__(self, replicas: Replicas, is_strict: bool, by_all: bool) -> None:
        self.active = tuple(range(replicas.size))
        self.followers: list[int] = []
        self.is_added = False
        self.by_all = by_all
        self._replicas, self._is_strict = replicas, is_strict

    def announce(self, kind: int, is_added: bool = False) -> None:
        """Say that this replica, which has rows, is about to do something.

        Collective: ranks that have run out call `follow`.  RuntimeError, on all ranks, where another replica has run
        out, and that is an error.
        """
        wanted = self._told(kind, is_added)
        if self._is_strict and len(self.active) < self._replicas.size:
            raise self._early()
        if any(count not in (0, len(self.active)) for count in wanted):
            raise RuntimeError(f"replicas that have rows do not do the same: {wanted} of {len(self.active)}")

    def follow(self, actions: Sequence[Callable[[], None]]) -> int:
        """Do what those do that still have rows, until none has; return the first rank of those that had rows last.

        `actions` are by what is about to happen.  Collective: every rank comes here when it has run out.
        """
        while True:
            before = self.active
            wanted = self._told(None)
            if not self.active:
                return before[0]
            if self._is_strict:
                raise self._early()
            for action, count in zip(actions, wanted, strict=True):
                if count:
                    action()

    def _told(self, kind: int | None, is_added: bool = False) -> list[int]:
        """Tell all what this replica does, None for nothing any more; return how many do what."""
        size = self._replicas.size
        told = numpy.zeros(size + WEIGHTED + 2, numpy.int64)
        if kind is not None:
            told[self._replicas.rank] = told[size + kind] = 1
            told[-1] = is_added
        self._replicas.reduce("sum", [told], "join")
        self.active = tuple(numpy.flatnonzero(told[:size]).tolist())
        if told[size + GRADIENTS :].any():
            self.followers = numpy.flatnonzero(told[:size] == 0).tolist()
        self.is_added = bool(told[-1])
        return [int(each) for each in told[size:-1]]

    def _early(self) -> RuntimeError:
        left = sorted({*range(self._replicas.size)} - {*self.active})
        return RuntimeError(
            f"ranks {left} have no more rows, and others have: throw_on_early_termination=False lets these go on"
        )
