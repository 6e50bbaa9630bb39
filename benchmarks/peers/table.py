"""Everybody else who can reduce a list of tensors here: the table, and who of it can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from benchmarks.peers.mpi import AllreduceEach, AllreducePacked, IallreducePacked
from benchmarks.peers.tensorflow import TensorFlowRing
from benchmarks.peers.torch import GlooEach, GlooFlat, GlooReducer
from benchmarks.suite.contender import Contender
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.tensors import TensorList
from mpidist.errors import MissingDependencyError

Maker = Callable[[Ranks, TensorList], Contender]

#: In the order of the tables.
PEERS: tuple[type[Contender], ...] = (
    AllreduceEach,
    AllreducePacked,
    IallreducePacked,
    GlooFlat,
    GlooEach,
    GlooReducer,
    TensorFlowRing,
)


def able(makers: Iterable[Maker], ranks: Ranks, tensors: TensorList) -> tuple[list[Contender], dict[str, str]]:
    """Return the contenders that can run on all ranks, and for each of the others why it cannot.  Collective."""
    found, missing = [], {}
    for make in makers:
        contender, problem = _try(make, ranks, tensors)
        problem = ranks.first_problem(problem)
        if contender is not None and not problem:
            found.append(contender)
        else:
            missing[name_of(make)] = problem
    return found, missing


def name_of(make: Maker) -> str:
    """Return the name of what `make` makes, as far as it is known before."""
    made = make.func if isinstance(make, partial) else make
    extra = [str(value) for value in make.keywords.values()] if isinstance(make, partial) else []
    return " ".join([str(getattr(made, "name", "") or getattr(made, "__name__", "")), *extra]).strip()


def _try(make: Maker, ranks: Ranks, tensors: TensorList) -> tuple[Contender | None, str]:
    try:
        return make(ranks, tensors), ""
    except (ImportError, OSError, RuntimeError, ValueError, TypeError) as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        return None, first if isinstance(error, MissingDependencyError) else f"{type(error).__name__}: {first}"
