"""Random numbers of a replica's own: the seeds of its layers, and the numbers of `keras.random` without a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy

# Private: where Keras has the seeds of numbers that are drawn without one
from keras.src.random.seed_generator import global_seed_generator

from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.own_methods import put_over

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


@contextmanager
def own_random_numbers(number: int) -> Iterator[None]:
    """Give a replica, by its number, its own random numbers without a seed, for the time of a ``with`` block.  Local.

    Replicas whose seeds were alike have the same ones afterwards, whatever was drawn: for data, for example.
    """
    with backends.seam().own_generator(number), _own_seeds(number):
        yield


def _own_seeds(number: int) -> AbstractContextManager[None]:
    """Let the seeds that Keras makes be a replica's own; meanwhile those behind them go on as on replica 0."""
    try:
        generator = global_seed_generator() if number else None
    except ValueError:  # in code that JAX compiles, where Keras refuses such numbers
        generator = None
    if generator is None:
        return nullcontext()

    def drawn(ordered: bool = True) -> Any:
        state = keras.ops.convert_to_numpy(type(generator).next(generator, ordered))
        return keras.ops.convert_to_tensor(own_seed(state, number))

    return put_over([(generator, "next", drawn)])
