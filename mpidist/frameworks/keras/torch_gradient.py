"""The gradient of a Keras loss on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def value_and_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns loss and gradients by the first argument, a list of arrays.  Local."""

    def with_gradients(arrays: Sequence[Any], *arguments: Any) -> tuple[Any, list[Any]]:
        leaves = [torch.tensor(each, requires_grad=True) for each in arrays]
        loss = fn(leaves, *arguments)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        pairs = zip(leaves, found, strict=True)
        gradients = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs]
        return loss.detach(), gradients

    return with_gradients


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which makes no gradients.  Local."""
    return torch.no_grad()(fn)
