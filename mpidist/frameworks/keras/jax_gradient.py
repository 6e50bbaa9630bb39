"""The gradient of a Keras loss on JAX, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def value_and_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns loss and gradients by the first argument, a list of arrays.  Local."""
    return jax.jit(jax.value_and_grad(fn))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled.  Local."""
    return jax.jit(fn)
