"""The steps of optimizers, also of those that nobody has wrapped: whoever reduces gradients hears of them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any
from weakref import WeakSet, finalize, ref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mpidist.frameworks.torch import cuda
from mpidist.frameworks.torch.reduction import GradientOwner, GradientReduction

#: What is called before and after each step of any optimizer, in order, as long as there is whom it is for.
_before_steps: dict[int, Callable[..., Any]] = {}
_after_steps: dict[int, Callable[..., Any]] = {}
_numbers = count()


def _call(fns: dict[int, Callable[..., Any]], fn: Callable[..., Any], reducer: GradientReduction) -> None:
    """Have a function called at each step as long as there is the reducer."""
    _hook_in()
    number = next(_numbers)
    fns[number] = fn
    finalize(reducer, fns.pop, number, None).atexit = False


@cache
def _hook_in() -> None:
    """Hear of all steps from now on.

    For good: a reducer can go at any moment, and PyTorch fails if a hook is removed while it calls them.
    """
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    changed = None
    for fn in [*_before_steps.values()]:
        result = fn(optimizer, args, kwargs)
        if result is not None:
            args, kwargs = changed = result
    return changed


def _after(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for fn in [*_after_steps.values()]:
        fn(optimizer, args, kwargs)


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

    _call(_before_steps, before, reducer)
    _call(_after_steps, after, reducer)


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

    _call(_before_steps, before, reducer)


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
        value = reducer.reduced_loss(cuda.awaited(loss).item() if is_tensor else float(loss))
        return torch.tensor(value, dtype=loss.dtype, device=loss.device) if is_tensor else value
