"""The variables of a model and of its optimizer: the chief's on all replicas, but for the seeds of random numbers."""

from __future__ import annotations

from typing import Any

import keras
import numpy

from mpidist.frameworks.keras.replica import ModelReplica

#: The name of the state of a `keras.random.SeedGenerator`: two numbers, the seed and a counter.
_SEED = "seed_generator_state"

#: By so much the seeds of neighbours differ: counters do not come there.
_SEED_STEP = 0x1E3779B1


def is_seed(variable: Any) -> bool:
    """Return whether a variable is the state of a `keras.random.SeedGenerator`.  Local."""
    return variable.name == _SEED and tuple(variable.shape) == (2,)


def own_seed(state: numpy.ndarray, number: int) -> numpy.ndarray:
    """Return the state of a seed for a replica by its number; replica 0 has it as it is.  Local."""
    seed = (int(state[0]) + number * _SEED_STEP) % 2**31 if number else int(state[0])
    return numpy.array([seed, state[1]], state.dtype)


def variables_of(model: keras.Model) -> list[Any]:
    """Return the variables of a model and of its optimizer.  Local."""
    optimizer = getattr(model, "optimizer", None)
    return [*model.variables, *(optimizer.variables if optimizer is not None else [])]


def synchronize(replica: ModelReplica, model: keras.Model) -> None:
    """Give a model, and its optimizer, the chief's weights, and seeds of this replica's own.

    Collective: every rank calls it in the same order.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    variables = variables_of(model)
    values = replica.from_chief([numpy.asarray(keras.ops.convert_to_numpy(each)) for each in variables])
    for variable, value in zip(variables, values, strict=True):
        variable.assign(own_seed(value, replica.number) if is_seed(variable) else value)
    replica.is_synchronized = True
