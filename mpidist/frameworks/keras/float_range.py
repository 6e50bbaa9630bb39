"""Gradients that one process has in float16, where sums overflow: so do the sums over replicas, which are float32.

By such overflows a `LossScaleOptimizer` finds its scale, and the steps that it leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import keras

#: From here on a number becomes infinite in float16.
_OVERFLOW = 65520.0


def half_variables(model: keras.Model) -> set[int]:
    """Return the ids of the variables that layers use in float16, and hold in a wider dtype.  Local."""
    return {
        id(variable)
        for layer in model._flatten_layers()
        if layer.compute_dtype == "float16"
        # Private: those of the layer itself, and whether it casts them
        for variable in layer._trainable_variables
        if getattr(variable, "_autocast", True)
    }


def overflown(gradients: Sequence[Any], variables: Sequence[Any], halves: Set[int]) -> list[Any]:
    """Return gradients, those of `halves` with infinite values where they overflow in float16.  Local."""
    pairs = zip(gradients, variables, strict=True)
    return [_overflown(each) if each is not None and id(variable) in halves else each for each, variable in pairs]


def _overflown(gradient: Any) -> Any:
    infinite = keras.ops.sign(gradient) * float("inf")
    return keras.ops.where(keras.ops.abs(gradient) < _OVERFLOW, gradient, infinite)
