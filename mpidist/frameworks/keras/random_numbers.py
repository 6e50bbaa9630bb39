"""Random numbers of a replica's own: the seeds of its layers, and the numbers of `keras.random` without a seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import keras
import numpy

# Private: where Keras has the seeds of numbers that are drawn without one
from keras.src.random import seed_generator
from keras.src.random.seed_generator import global_seed_generator as seed_generator_of_all

from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.backends import to_numpy
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

    The seeds behind them go on as in one process, so what is drawn afterwards, such as data, is alike on replicas whose
    seeds are.  Other threads draw as ever.
    """
    thread = get_ident()

    def own_generator() -> Any:
        generator = seed_generator_of_all()
        return _OwnSeeds(generator, number) if number and get_ident() == thread else generator

    with put_over([(seed_generator, "global_seed_generator", own_generator)]), backends.seam().own_dropout(thread):
        yield


class _OwnSeeds:
    """A `keras.random.SeedGenerator` as a replica has it."""

    def __init__(self, generator: keras.random.SeedGenerator, number: int) -> None:
        self._generator, self._number = generator, number

    def next(self, ordered: bool = True) -> Any:
        state = to_numpy(self._generator.next(ordered))
        return keras.ops.convert_to_tensor(own_seed(state, self._number))
