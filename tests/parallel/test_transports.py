"""The transports between processes, by the suites of all transports, on the ranks of an mpirun."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import pytest

from mpidist.cluster.launchers import detect_launcher
from mpidist.testing.conformance import (
    CollectiveTests,
    OnRank,
    RankRunner,
    TransportTests,
    assert_same_on_all_ranks,
    contribution,
    reduced,
    watch_of,
)
from mpidist.transports import world
from mpidist.transports.base import Transport
from mpidist.transports.mpi import MpiTransport

pytestmark = pytest.mark.mpi

#: On how many ranks each test runs: all there are, and a group of two of them.
_launcher = detect_launcher()
_TOTAL = (_launcher.size if _launcher is not None else None) or 1
SIZES = tuple(sorted({min(2, _TOTAL), _TOTAL}))

#: Groups that were made, by the test class's name and the number of ranks: making one takes time and MPI's contexts.
_groups: dict[tuple[str, int], Transport] = {}


class ProcessRanks(RankRunner):
    """The first ranks of the world form the group; the others wait until it is done.

    A check that fails on some ranks raises on all of them, so that they stay in step for the next test.
    """

    sizes = SIZES

    def group(self, parent: Transport, color: int) -> Transport:
        """Return a transport over the ranks of `parent` that give the same color; collective."""
        raise NotImplementedError

    def run(self, size: int, fn: OnRank) -> None:
        everyone = world().transport
        key = (type(self).__name__, size)
        if key not in _groups:
            _groups[key] = self.group(everyone, int(everyone.rank < size))
        problem, refusal = "", None
        if everyone.rank < size:
            try:
                fn(_groups[key])
            except Exception as error:  # told to all ranks below
                problem, refusal = traceback.format_exc(), error
        problems = everyone.exchange(problem.encode(), everyone.control.watch("the verdict of all ranks"))
        if refusal is not None:
            raise refusal
        failed = {rank: raw.decode() for rank, raw in enumerate(problems) if raw}
        assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())


class MpiRanks(ProcessRanks):
    def group(self, parent: Transport, color: int) -> Transport:
        return parent.split(color)


class TestMpi(MpiRanks, TransportTests):
    pass


class TestMpiInPieces(MpiRanks, TransportTests):
    """Long messages are cut; here anything above 1000 bytes is long."""

    large_bytes = (1 << 18) + 3

    def group(self, parent: Transport, color: int) -> Transport:
        whole = parent.split(color)
        assert isinstance(whole, MpiTransport)
        whole._chunk_bytes = 1000
        return whole


class TestMpiCollectives(MpiRanks, CollectiveTests):
    sizes = SIZES


class TestNativeAllReduce(MpiRanks):
    """MPI's own all-reduce gives the sums, and the same bits everywhere; else it could not be chosen."""

    @pytest.mark.parametrize("dtype, op", [("f4", "sum"), ("f8", "min"), ("i4", "prod"), ("u1", "max"), ("i8", "sum")])
    def test_values(self, size: int, dtype: str, op: str) -> None:
        self.run(size, lambda transport: _native_values(transport, dtype, op))

    def test_same_bits(self, size: int) -> None:
        self.run(size, _native_same_bits)


def _native(transport: Transport, buffer: Any, op: str) -> None:
    transport.wait([transport.native["all_reduce"](buffer, op)], watch_of(transport))


def _native_values(transport: Transport, dtype: str, op: str) -> None:
    for length in (0, 1, 1000):
        buffer = contribution(op, dtype, length, transport.rank, transport.size)
        _native(transport, buffer, op)
        np.testing.assert_array_equal(buffer, reduced(op, dtype, length, transport.size))


def _native_same_bits(transport: Transport) -> None:
    for length in (1, 1000, 100_000):
        buffer = np.random.default_rng((7, transport.rank)).normal(size=length).astype("f4")
        _native(transport, buffer, "sum")
        assert_same_on_all_ranks(transport, buffer)
