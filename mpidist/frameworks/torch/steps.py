"""The steps of optimizers that nobody has wrapped: whoever reduces gradients hears of each that takes them."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import finalize, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class _Reducer(Protocol):
    """What reduces gradients."""

    def takes(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer changes parameters whose gradients are reduced here.  Local."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce what is not reduced yet.  Collective."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Take note that the step is over."""


def watch_steps(reducer: _Reducer) -> None:
    """Call a reducer at each step of an optimizer that takes its gradients, as long as there is the reducer.

    A step that is given a closure makes its own backward passes.
    """
    found = ref(reducer)

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = found()
        if known is not None and not _has_closure(args, kwargs) and known.takes(optimizer):
            known.before_step(optimizer)

    def after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = found()
        if known is not None and known.takes(optimizer):
            known.after_step(optimizer)

    for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
        finalize(reducer, handle.remove)


def _has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return kwargs.get("closure", args[1] if len(args) > 1 else None) is not None
