"""Connections between processes, through shared memory and by messages; and parts of the world."""

from __future__ import annotations

import traceback
from dataclasses import replace

import numpy as np
import pytest

from mpidist.collectives.communicator import Communicator
from mpidist.errors import CollectiveMismatchError
from mpidist.transports import world
from mpidist.transports.connections.open import open_connections
from mpidist.world import world_communicator
from tests.helpers.connection_checks import CHECKS, RING_BYTES

pytestmark = pytest.mark.mpi


def _on_all_ranks(fn) -> None:
    """Run `fn` and raise on all ranks if it raises on some, so that they stay in step for the next test."""
    problem, transport = "", world().transport
    try:
        fn()
    except Exception:  # told to all ranks below
        problem = traceback.format_exc()
    problems = transport.exchange(problem.encode(), transport.control.watch("the verdict of all ranks"))
    failed = {rank: raw.decode() for rank, raw in enumerate(problems) if raw}
    assert not failed, "\n".join(f"rank {rank}: {text}" for rank, text in failed.items())


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_connection(check, shared, monkeypatch):
    here = world()
    monkeypatch.setattr(here.control, "settings", replace(here.control.settings, shared_memory=shared))
    peers = [peer for peer in range(here.transport.size) if peer != here.transport.rank]
    connections = open_connections(here, peers, ring_bytes=RING_BYTES)
    assert not any(connection.is_shared for connection in connections.values()) or shared
    _on_all_ranks(lambda: check(here.transport.rank, connections))
    for connection in connections.values():
        connection.close()


@pytest.mark.parametrize("shared", [True, False])
def test_parts_of_the_world_make_different_numbers_of_calls(shared, monkeypatch):
    here = world()
    monkeypatch.setattr(here.control, "settings", replace(here.control.settings, shared_memory=shared))
    rank, size = here.transport.rank, here.transport.size
    color = rank % 2
    members = range(color, size, 2)

    def on_rank():
        part = here.part(color)
        assert (part.transport.rank, part.transport.size) == (rank // 2, len(members))
        assert part.control.own_name == f"rank {rank} of {size}"
        communicator, before = Communicator(part), here.control.call
        for call in range(3 + 20 * color):
            for length in (1, 1000, 300_000):
                values = np.full(length, rank + call, dtype=np.float32)
                communicator.all_reduce(values)
                assert (values == sum(members) + call * len(members)).all()
        assert here.control.call == before  # those calls are no calls of the world's

    _on_all_ranks(on_rank)
    values = np.ones(5)
    world_communicator().all_reduce(values)
    assert (values == size).all()


def test_a_mismatch_in_a_part_is_raised_in_that_part_only_and_names_ranks_of_the_world():
    here = world()
    rank, size = here.transport.rank, here.transport.size
    color, members = rank % 2, range(rank % 2, size, 2)

    def on_rank():
        communicator = Communicator(here.part(color))
        if color == 0 and len(members) > 1:
            with pytest.raises(CollectiveMismatchError):
                communicator.all_reduce(np.ones(4 if rank == 0 else 5))
        values = np.ones(3)
        communicator.all_reduce(values)
        assert (values == len(members)).all()

    _on_all_ranks(on_rank)
