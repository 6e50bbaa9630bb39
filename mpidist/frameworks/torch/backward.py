"""Where a backward pass begins and ends: the end is when every gradient that it gives has been accumulated.

A pass may run others inside, as ``torch.utils.checkpoint`` does with ``use_reentrant=True``.  Only the end of the
outermost one counts.  What waits for the end of one pass is called in the order in which it was made, which is the same
on all ranks; the order in which gradients arrive may differ.

PyTorch has no public name for any of this.  `torch.nn.parallel.DistributedDataParallel` uses two of the private names
of this module: ``Variable._execution_engine.queue_callback`` and ``torch._C._current_graph_task_id``.  The third one is
``torch._C._current_autograd_node``: at the end of a pass inside another it is the node of that one that runs it.
"""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any
from weakref import WeakMethod, ref

import torch

#: Returns the number of the pass that is going on, its own in the process.
current_pass = torch._C._current_graph_task_id
_current_node: Any = torch._C._current_autograd_node
_at_the_end: Any = torch.autograd.Variable._execution_engine.queue_callback

_orders = count()
#: By the number of a pass, which is its own in the process: what waits for its end, by its order.
_waiting: dict[int, dict[int, PassWatch]] = {}


class PassWatch:
    """Tells of the backward passes that give one of some parameters a gradient.

    ``look(parameter)`` is called before a pass, or one inside it, adds to the first gradient, and returns whether this
    counts; else it is called with the next one.  ``begin()`` is called when that gradient is there: never where
    `torch.autograd.grad` only returns it.  ``end()`` is called when the outermost pass is over, and its error is raised
    by ``backward()``.  `is_open`: a pass has given gradients and is not over; also one that was broken off.
    """

    def __init__(self, look: WeakMethod[Any], begin: WeakMethod[Any], end: WeakMethod[Any]) -> None:
        self.is_open = False
        self._look, self._begin, self._end = look, begin, end
        self._order = next(_orders)
        self._last = self._looked = -1
        self._first: tuple[Any, Any] = None, None  # the parameter that was the first last, and the handle of its hook

    def watch(self, parameter: torch.Tensor) -> None:
        """Watch one more parameter, which may be frozen: PyTorch takes hooks of others only, and keeps them."""
        is_trained = parameter.requires_grad
        known = ref(parameter)

        @torch.utils.hooks.unserializable_hook
        def hook(gradient: torch.Tensor | None) -> None:
            if current_pass() != self._looked and gradient is not None:
                self._comes(known)

        parameter.requires_grad_(True).register_hook(hook)
        parameter.requires_grad_(is_trained)

    def is_inside(self) -> bool:
        """Return whether a pass is going on, and has not just run one inside that gave the gradients."""
        has_run_another = self.is_open and self._last not in _waiting
        return current_pass() >= 0 and not has_run_another

    def _comes(self, known: ref[torch.Tensor]) -> None:
        """Look at the gradients before a parameter's is added, and wait for that."""
        look, parameter = self._look(), known()
        if look is None or parameter is None or not parameter.requires_grad or not look(parameter):
            return  # who asked was dropped, or does not reduce it
        self._looked = current_pass()
        first, handle = self._first
        if first is not known:
            if handle is not None:
                handle.remove()
            self._first = known, parameter.register_post_accumulate_grad_hook(self._has_come)

    def _has_come(self, _: torch.Tensor) -> None:
        """Begin a pass: the gradient is there."""
        begin, number = self._begin(), current_pass()
        if begin is None or number != self._looked:
            return
        begin()
        self._last = number
        self.is_open = True
        _those_that_wait(number)[self._order] = self

    def over(self) -> None:
        """Say that the pass is over."""
        self.is_open, self._last = False, -1
        end = self._end()
        if end is not None:
            end()


def _those_that_wait(number: int) -> dict[int, PassWatch]:
    """Return what waits for the end of the pass that is going on, by its order."""
    watches = _waiting.get(number)
    if watches is None:
        watches = _waiting[number] = {}
        _at_the_end(partial(_over, number))
    return watches


def _over(number: int) -> None:
    """End a pass, or have what waits for its end wait for that of the pass that runs it."""
    watches, node = _waiting.pop(number), _current_node()
    if node is not None:
        _wait_for_outer(node, watches)
        return
    for _, each in sorted(watches.items()):
        each.over()


def _wait_for_outer(node: Any, waiting: dict[int, PassWatch]) -> None:
    """Wait for the end of the pass that runs this one in a node; a function can be queued there only from inside it."""
    handles: list[Any] = []

    def is_back(*gradients: Any) -> None:
        for each in handles:
            each.remove()
        handles.clear()
        _those_that_wait(current_pass()).update(waiting)

    handles += [each.register_prehook(is_back) for each, _ in node.next_functions if each is not None]
