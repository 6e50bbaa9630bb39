"""The bytes in which optimizers and schedules travel."""

from __future__ import annotations

import importlib
import pickle
from typing import Any

from mpidist.errors import MissingDependencyError
from mpidist.optimizers.base import rule_of
from mpidist.optimizers.rule import Rule


def packed(optimizer: Rule) -> bytes:
    """Return the rule of an optimizer as bytes: its settings, without slots and steps, which its server keeps.

    What needs whole gradients, or several micro-batches, is done by the clients before they push: clipping by norm,
    loss scale, accumulation, and leaving out what is not finite.
    """
    return pickled(rule_of(optimizer))


def pickled(value: Any) -> bytes:
    """Return an optimizer or a schedule as bytes; errors as for `packed`."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        return _pickled_by_name(value)
    return cloudpickle.dumps(value)


def _pickled_by_name(value: Any) -> bytes:
    rate = getattr(value, "_learning_rate", None)
    parts = (value, rate, getattr(rate, "wrapped", None), getattr(value, "wrapped", None))
    of_script: list[Any] = [each for each in parts if _is_of_script(each)]
    if not of_script:
        try:
            return pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            of_script = [error]
    raise MissingDependencyError(
        f"{value!r} cannot be sent to the servers by names alone: {of_script[0]!r}. Put its functions and classes into "
        "a module that the script imports, or: pip install cloudpickle"
    )


def _is_of_script(value: Any) -> bool:
    """Whether a class or function belongs to the script, which servers leave before they come to its definition."""
    owner = value if hasattr(value, "__qualname__") else type(value)
    return getattr(owner, "__module__", "") == "__main__"
