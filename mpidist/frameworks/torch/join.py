"""Replicas that run out of rows before others: they take part in what is left without rows of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import ref

import numpy
import torch

from mpidist.errors import listed
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
    `is_changed`: something else has changed this replica's gradients since they were reduced.
    """

    def __init__(self, replicas: Replicas, is_strict: bool, by_all: bool) -> None:
        self.active = tuple(range(replicas.size))
        self.followers: list[int] = []
        self.is_added = self.is_changed = False
        self.by_all = by_all
        self._marked: list[tuple[torch.Tensor, ref[torch.Tensor] | None, int]] = []
        self._replicas, self._is_strict = replicas, is_strict

    def mark(self, parameters: Sequence[torch.Tensor]) -> None:
        """Mark the gradients as they are now, where those of ranks that have run out are to be the same.  Local."""
        if self.by_all:
            pairs = [(each, each.grad) for each in parameters]
            self._marked = [(each, None, 0) if it is None else (each, ref(it), it._version) for each, it in pairs]

    def look(self, is_known: bool, added: torch.Tensor | None = None) -> None:
        """Look whether the marked gradients were changed, which may be known; a pass has just added to that of `added`.

        Local.
        """
        self.is_changed |= is_known or any(_is_changed(*each, each[0] is added) for each in self._marked)

    def announce(self, kind: int, is_added: bool = False) -> None:
        """Say that this replica, which has rows, is about to do something.

        Collective: ranks that have run out call `follow`.  RuntimeError, on all ranks, where another replica has run
        out, and that is an error, or what passes have added to is not the same there.
        """
        wanted = self._told(kind, is_added)
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
            for action, count in zip(actions, wanted, strict=True):
                if count:
                    action()

    def _told(self, kind: int | None, is_added: bool = False) -> list[int]:
        """Tell all what this replica does, None for nothing any more; return how many do what."""
        size = self._replicas.size
        told = numpy.zeros(size + WEIGHTED + 3, numpy.int64)
        if kind is not None:
            told[self._replicas.rank] = told[size + kind] = 1
            told[-1] = is_added
        told[-2] = self.is_changed
        self._replicas.reduce("sum", [told], "join")
        self.active = tuple(numpy.flatnonzero(told[:size]).tolist())
        wanted, changed = told[size:-2].tolist(), int(told[-2])
        if 0 < len(self.active) < size and self._is_strict:
            raise self._early()
        if any(wanted[GRADIENTS:]):
            self.followers = numpy.flatnonzero(told[:size] == 0).tolist()
            self.is_changed = False
        self.is_added = bool(told[-1])
        if self.followers and self.is_added and self.by_all and wanted[GRADIENTS] and 0 < changed < size:
            raise self._apart(changed)
        return wanted

    def _apart(self, changed: int) -> RuntimeError:
        return RuntimeError(
            f"join(): a backward pass has added to gradients that {changed} of {self._replicas.size} ranks have "
            "changed (clipped, unscaled, set to zero in part, or added to under no_sync()) since they were reduced; "
            f"rank {listed(map(str, self.followers))} had run out, so the mean over all ranks is not known. Set "
            "gradients to zero before each step's first pass; make passes that add up under no_sync(), and change "
            "gradients behind the last; or give join() divide_by_initial_world_size=False"
        )

    def _early(self) -> RuntimeError:
        left = sorted({*range(self._replicas.size)} - {*self.active})
        return RuntimeError(
            f"ranks {left} have no more rows, and others have: throw_on_early_termination=False lets these go on"
        )


def _is_changed(parameter: torch.Tensor, marked: ref[torch.Tensor] | None, version: int, is_added: bool) -> bool:
    """Return whether a gradient is not as it was marked; with `is_added`, but for what a pass has added."""
    gradient = parameter.grad
    if gradient is None:
        return marked is not None
    if is_added and (marked is None or gradient.requires_grad or gradient.layout is not torch.strided):
        return False  # the pass has made it, or adds in another way than in place
    return gradient._version != version + is_added or gradient is not (marked and marked())
