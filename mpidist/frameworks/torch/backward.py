"""The end of a backward pass: when every gradient that it gives has been accumulated.

PyTorch has no public name for it.  `torch.nn.parallel.DistributedDataParallel` uses the same two private names as this
module: ``Variable._execution_engine.queue_callback`` and ``torch._C._current_graph_task_id``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakMethod

import torch

_current_pass = torch._C._current_graph_task_id
_at_the_end: Any = torch.autograd.Variable._execution_engine.queue_callback


def call_at_the_end(parameters: Iterable[torch.Tensor], method: WeakMethod[Any]) -> list[Any]:
    """Have a method called at the end of every backward pass that gives one of these parameters a gradient.  Local.

    An error of the method is raised by ``backward()``.  Return the handles of the hooks.

    Parameters
    ----------
    parameters : iterable of Parameter
    method : WeakMethod
        Nothing is called any more when its object is dropped.
    """
    last = -1

    def over() -> None:
        nonlocal last
        last = -1
        found = method()
        if found is not None:
            found()

    def accumulated(parameter: torch.Tensor) -> None:
        nonlocal last
        number = _current_pass()
        if number != last:  # a pass that was broken off by an error is never over, and its number does not come again
            last = number
            _at_the_end(over)

    return [each.register_post_accumulate_grad_hook(accumulated) for each in parameters]
