"""A user's optimizer as servers know it: its rule, with the slots that lie with variables."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

from mpidist.optimizers.base import Optimizer
from mpidist.optimizers.rule import Rule
from mpidist.optimizers.slices import SLICE_ELEMENTS
from mpidist.parameter_server.copies import SlotCopies
from mpidist.parameter_server.ledger import Ledger

#: Where this package's rules are.
_OURS = Optimizer.__module__.rpartition(".")[0] + "."


def is_ours(kind: type) -> bool:
    """Whether a class of rules is this package's."""
    return kind.__module__.startswith(_OURS)


class ServedOptimizer:
    """An optimizer that updates the variables of a server, in the server or in a client on its node."""

    slots: SlotCopies | None = None

    def __init__(self, content: bytes, number: int) -> None:
        self.optimizer: Rule = pickle.loads(content)
        self.number = number
        self.steps_word, self.rate_real = Ledger.steps_word(number), Ledger.rate_real(number)
        kind = type(self.optimizer)
        self.joins = self.optimizer._joins
        self.is_ours = is_ours(kind)
        self.renew_slice = self._found_renew_slice(kind)
        self._scratch: dict[numpy.dtype, list[Any]] = {}

    def _found_renew_slice(self, kind: type[Optimizer]) -> Callable[..., None]:
        """Return the optimizer's `renew_slice`; the one by `update_slice`, if a subclass has overridden that alone."""
        names = {"renew_slice", "update_slice"}
        last = next(each for each in kind.__mro__ if not names.isdisjoint(vars(each)))
        return self.optimizer.renew_slice if "renew_slice" in vars(last) else partial(Rule.renew_slice, self.optimizer)

    def scratch_of(self, dtype: numpy.dtype) -> list[Any]:
        """Return arrays for intermediate results, the same ones for all updates."""
        scratch = self._scratch.get(dtype)
        if scratch is None:
            count = self.optimizer.scratch_count
            scratch = self._scratch[dtype] = [numpy.empty(SLICE_ELEMENTS, dtype) for _ in range(count)]
        return scratch
