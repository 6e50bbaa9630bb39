"""Replicas that run out of rows before others: they take part in what is left without rows of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy

from mpidist.errors import listed
from mpidist.frameworks.replicas import Replicas

#: What is about to happen: rank 0's buffers are given to all, or gradients are reduced, or these weighted by rows, or
#: the loss of a closure.
BUFFERS, GRADIENTS, WEIGHTED, LOSS = range(4)

#: What this is in the message to ranks that differ: a rank that makes another collective finds the cure there.
_NAME = (
    "join(), where ranks that ran out make no SyncBatchNorm, nor collectives of your own: give all ranks as many "
    "batches, or have the model make none"
)

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
    when gradients were reduced last.
    """

    def __init__(self, replicas: Replicas, is_strict: bool, by_all: bool) -> None:
        self.active = tuple(range(replicas.size))
        self.followers: list[int] = []
        self.by_all = by_all
        self._replicas, self._is_strict = replicas, is_strict

    def announce(self, kind: int, is_again: bool = False) -> None:
        """Say that this replica, which has rows, is about to do something; with what was reduced before, `is_again`.

        Collective: ranks that have run out call `follow`.  RuntimeError, on all ranks, where another replica has run
        out, and that is an error, or a mean over all would lack what was reduced before there.
        """
        wanted = self._told(kind, is_again)
        if any(count not in (0, len(self.active)) for count in wanted):
            raise RuntimeError(f"replicas that have rows do not do the same: {wanted} of {len(self.active)}")

    def follow(self, actions: Sequence[Callable[[], object]]) -> int:
        """Do what those do that still have rows, until none has; return the first rank of those that had rows last.

        `actions` are by what is about to happen.  Collective: every rank comes here when it has run out.
        """
        while True:
            before = self.active
            wanted = self._told(None)
            if not self.active:
                return before[0]
            for action, count in zip(actions, wanted, strict=True):
                if count:
                    action()

    def _told(self, kind: int | None, is_again: bool = False) -> list[int]:
        """Tell all what this replica does, None for nothing any more; return how many do what."""
        size = self._replicas.size
        told = numpy.zeros(size + LOSS + 1, numpy.int64)
        if kind is not None:
            told[self._replicas.rank], told[size + kind] = 1 + is_again, 1
        self._replicas.reduce("sum", [told], _NAME)
        self.active, wanted = tuple(numpy.flatnonzero(told[:size]).tolist()), told[size:].tolist()
        if 0 < len(self.active) < size and self._is_strict:
            raise self._early()
        if wanted[GRADIENTS] or wanted[WEIGHTED]:
            self.followers = numpy.flatnonzero(told[:size] == 0).tolist()
        again = numpy.flatnonzero(told[:size] > 1).tolist()
        if again and self.followers and self.by_all and wanted[GRADIENTS]:
            raise self._reduced_again(again)
        return wanted

    def _reduced_again(self, ranks: Sequence[int]) -> RuntimeError:
        return RuntimeError(
            f"join(): rank {listed(map(str, ranks))} of {self._replicas.size} reduces gradients again that were "
            "reduced before: a backward pass has added to them, or to some, or they were changed before a second "
            f"step; rank {listed(map(str, self.followers))} had run out of rows, so the mean over all ranks is not "
            "known. Set all gradients to zero (model.zero_grad()) before each step's first pass, and put no_sync() "
            "around passes that add up but for the last; or give join() divide_by_initial_world_size=False"
        )

    def _early(self) -> RuntimeError:
        left = sorted({*range(self._replicas.size)} - {*self.active})
        return RuntimeError(
            f"ranks {left} have no more rows, and others have: throw_on_early_termination=False lets these go on"
        )
