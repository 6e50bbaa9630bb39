"""The steps of optimizers, also of those that nobody has wrapped: whoever reduces gradients hears of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpidist.frameworks.torch.reduction import GradientOwner, GradientReduction


def watch_steps(reducer: GradientReduction) -> None:
    """Call a reducer at each step of an optimizer that takes its gradients, as long as there is the reducer."""
    reference = ref(reducer)
    taken: WeakSet[Any] = WeakSet()  # optimizers whose step is under way: each step asks for its parameters once

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = reference()
        taken.discard(optimizer)  # of a step that raised
        if known is None or not known.ownership.are_changed_by(optimizer):
            return None
        taken.add(optimizer)
        return prepare_step(known, optimizer, args, kwargs)

    def after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        known = reference()
        if known is not None and optimizer in taken:
            taken.discard(optimizer)
            known.after_step(optimizer)

    for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
        finalize(reducer, handle.remove)


def watch_others(reducer: GradientReduction) -> None:
    """Tell a reducer of steps by optimizers that are not distributed, where these concern it."""
    found = ref(reducer)

    def concerned(optimizer: Any) -> GradientReduction | None:
        known = found()
        return known if known is not None and known.is_concerned(optimizer) else None

    def before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if isinstance(optimizer, GradientOwner) or concerned(optimizer) is None:
            return
        gc.collect()  # the reducer may have been dropped
        known = concerned(optimizer)
        if known is not None:
            known.before_other(optimizer)

    finalize(reducer, register_optimizer_step_pre_hook(before).remove)


def prepare_step(reducer: GradientReduction, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reduce what is not reduced yet, now or after each call of the closure that the step is given.

    Returns other (args, kwargs) for the step, if it needs any.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if reducer.is_skipped:
        return None
    if closure is None:
        reducer.before_step(optimizer)
        return None
    reduced = _ReducedClosure(reducer, optimizer, closure)
    if "closure" in kwargs:
        return args, {**kwargs, "closure": reduced}
    return (args[0], reduced, *args[2:]), kwargs


class _ReducedClosure:
    """A closure whose gradients, and whose loss, are those of all replicas: a step may depend on the loss."""

    def __init__(self, reducer: GradientReduction, optimizer: Any, closure: Callable[[], Any]) -> None:
        self._reducer, self._optimizer, self._closure = reducer, optimizer, closure

    def __call__(self) -> Any:
        reducer = self._reducer
        reducer.after_step(self._optimizer)
        loss = self._closure()
        reducer.before_step(self._optimizer)
        if loss is None or isinstance(self._closure, _ReducedClosure):  # of two models, say
            return loss
        is_tensor = isinstance(loss, torch.Tensor)
        value = reducer.reduced_loss(loss.item() if is_tensor else float(loss))
        return torch.tensor(value, dtype=loss.dtype, device=loss.device) if is_tensor else value
