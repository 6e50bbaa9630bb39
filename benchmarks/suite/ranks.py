"""The ranks that measure: the strategy, MPI beside it, and what times and counts of all of them come to."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy

import mpidist
from benchmarks.suite.cache_mode import CacheProbe
from benchmarks.suite.tensors import TensorList
from mpidist.errors import MissingDependencyError


class Ranks:
    """All ranks of this launch.  Making it is collective and starts MPI.

    Attributes
    ----------
    mpi : module
        ``mpi4py.MPI``.
    comm : MPI.Comm
        A communicator of the benchmark's own.
    strategy : MultiWorkerMirroredStrategy
    rank, size, node_count : int
    probe : CacheProbe
    """

    def __init__(self) -> None:
        # first: it joins the ranks and says what is wrong with a launch
        self.strategy = mpidist.MultiWorkerMirroredStrategy()
        from mpi4py import MPI

        self.mpi: Any = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank, self.size = self.comm.rank, self.comm.size
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.node_count = int(self.comm.allreduce(int(node.rank == 0)))
        node.Free()
        self.probe = CacheProbe(self.comm, MPI)
        self._existing: tuple[TensorList, list[Any]] | None = None
        self._packed: tuple[TensorList, list[Any]] | None = None

    @cached_property
    def communicator(self) -> Any:
        """mpidist's communicator, for calls below the public ones: no case of `benchmarks.pairs` uses it."""
        from mpidist.world import world_communicator

        return world_communicator()

    @property
    def library(self) -> str:
        """Vendor and version of the MPI library."""
        vendor, version = self.mpi.get_vendor()
        return f"{vendor} {'.'.join(map(str, version))}"

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' times.  Collective."""
        return float(self.comm.allreduce(seconds, self.mpi.MAX))

    def elapsed(self, start: float, stop: float) -> float:
        """Return `seconds_of` the ranks' `time.perf_counter` at their start and at their end.  Collective."""
        return seconds_of(self.comm.allgather((start, stop)), self.node_count == 1)

    def total(self, count: int) -> int:
        """Return the sum of all ranks' counts.  Collective."""
        return int(self.comm.allreduce(count))

    def first_problem(self, problem: str) -> str:
        """Return the first rank's problem that is not empty, on all ranks.  Collective."""
        found = [(rank, text) for rank, text in enumerate(self.comm.allgather(problem)) if text]
        if not found:
            return ""
        rank, text = found[0]
        return text if len(found) == self.size else f"rank {rank}: {text}"

    def existing(self, tensors: TensorList) -> list[Any]:
        """Return arrays for the results of contenders that write into arrays which exist: one set for all of them."""
        if self._existing is None or self._existing[0] is not tensors:
            self._existing = tensors, [numpy.zeros(shape, tensors.dtype) for shape in tensors.shapes]
        return self._existing[1]

    def packed(self, tensors: TensorList) -> list[Any]:
        """Return two flat arrays for contenders that pack: one pair for all of them."""
        if self._packed is None or self._packed[0] is not tensors:
            self._packed = tensors, [numpy.zeros(tensors.elements, tensors.dtype) for _ in range(2)]
        return self._packed[1]


def seconds_of(spans: Sequence[tuple[float, float]], one_clock: bool) -> float:
    """Return how long ranks took that started and ended at these times.  Local, pure.

    With one clock it is from the first start to the last end.  Where ranks outnumber cores some start when others are
    done, and a copy, which waits for nobody, would seem to take each of them half of what it takes all.  With a clock
    for each node it is the time of the slowest.
    """
    if one_clock:
        return max(stop for _, stop in spans) - min(start for start, _ in spans)
    return max(stop - start for start, stop in spans)


def imported(name: str, cure: str, ranks: Ranks) -> Any:
    """Return the package in which the module `name` is.

    Collective: every rank calls it in the same order.

    Raises
    ------
    MissingDependencyError
        On all ranks, with `cure`, when one of them does not have it.
    """
    problem = ""
    try:
        importlib.import_module(name)
    except ImportError as error:
        problem = cure if isinstance(error, ModuleNotFoundError) else f"cannot be imported: {error}"
    problem = ranks.first_problem(problem)
    if problem:
        raise MissingDependencyError(problem)
    return sys.modules[name.partition(".")[0]]
