"""The variables of a model and of its optimizer: the chief's on all replicas, but for the seeds of random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from typing import Any

import keras

from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.classes import replica_of
from mpidist.frameworks.keras.random_numbers import is_seed, own_seed
from mpidist.frameworks.keras.replica import ModelReplica


def optimizers_of(model: keras.Model) -> list[Any]:
    """Return the optimizers that a model has as attributes, or in lists and mappings that are attributes.  Local."""
    optimizers: dict[int, Any] = {}
    for value in list(vars(model).values()):
        several = list(value.values()) if isinstance(value, dict) else value
        for each in several if isinstance(several, (list, tuple)) else [value]:
            if isinstance(each, keras.optimizers.Optimizer):
                optimizers[id(each)] = each
    return list(optimizers.values())


def variables_of(model: keras.Model) -> list[Any]:
    """Return the variables of a model and of its optimizers.  Local."""
    found = {id(each): each for owner in (model, *optimizers_of(model)) for each in owner.variables}
    return list(found.values())


def state_of(model: keras.Model) -> list[tuple[str, Any]]:
    """Return, with names, what all replicas have alike of a model and of its optimizers.  Local."""
    kept = [(each.name, each) for each in variables_of(model) if not is_seed(each)]
    return kept + backends.seam().buffers(model)


def learning_rates(optimizer: Any, values: Sequence[Any] | None = None) -> list[Any]:
    """Return the variables of an optimizer that are learning rates, or what is among `values` in their places.  Local.

    A schedule is none: it follows from the number of steps.
    """
    variables = optimizer.variables
    pairs = zip(variables, variables if values is None else values, strict=False)
    return [value for variable, value in pairs if variable.name == "learning_rate"]


def synchronize(replica: ModelReplica, model: keras.Model) -> None:
    """Give a model, and its optimizer, the chief's weights, and seeds of this replica's own.

    Collective: every rank calls it in the same order.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    share_weights(replica, model, variables_of(model))
    replica.is_synchronized = True


def share_weights(replica: ModelReplica, model: keras.Model, variables: Sequence[Any]) -> None:
    """Give variables of a model, and its buffers, the chief's values, but seeds of this replica's own.  Collective."""
    values = replica.from_chief([to_numpy(each) for each in variables])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(own_seed(value, replica.number) if is_seed(variable) else value)
    backends.seam().share_buffers(replica, model)
    for layer in model._flatten_layers():
        if replica_of(layer) is not None:
            replica_of(layer).has_chiefs_weights = True


def free_name(path: str, names: set[str]) -> str:
    """Return a name for a variable that no other one has, and take note of it.  Local."""
    name = next(each for each in chain([path], (f"{path}_{n}" for n in count(1))) if each not in names)
    names.add(name)
    return name
