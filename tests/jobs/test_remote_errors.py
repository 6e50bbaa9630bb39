"""An exception in `run` on one rank of a real job that nobody catches, or that only that rank catches."""

from __future__ import annotations

import pytest

from tests.jobs import run_job

#: One node, two nodes, and ranks that share nothing.
PLACES = {
    "one node": {},
    "two nodes": {"MPIDIST_VIRTUAL_NODES": "2"},
    "no shared memory": {"MPIDIST_SHARED_MEMORY": "0"},
}

SCRIPT = """
import os
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.extended.replica_id

def step():
    mpidist.get_replica_context().all_reduce("SUM", 1.0)
    if rank == 1:
        raise LookupError("no such row")
    return mpidist.get_replica_context().all_reduce("SUM", 1.0)

"""

#: That rank catches the error and ends its program; the others are in a collective that it will not make.
CAUGHT = """
try:
    strategy.run(step)
except LookupError:
    print("rank 1 goes home", flush=True)
"""

#: All catch it, and some make no call any more.
ALL_CATCH = """
from mpidist.errors import RemoteReplicaError
try:
    strategy.run(step)
except (LookupError, RemoteReplicaError) as error:
    os.write(1, f"{type(error).__name__} on {rank}\\n".encode())  # in one piece
"""

#: All catch it every time, and go on together.
GO_ON = """
from mpidist.errors import RemoteReplicaError
errors = []
for number in range(5):
    try:
        strategy.run(step)
    except (LookupError, RemoteReplicaError) as error:
        errors.append(type(error).__name__)
total = strategy.reduce("SUM", float(rank), axis=None)
os.write(1, f"{rank}: {errors.count('LookupError')} of {len(errors)}, {total:g}\\n".encode())
"""

#: Nobody is in a collective when it happens, and nobody makes one afterwards.
AT_THE_END = """
def last():
    if rank == 1:
        raise LookupError("no such row")

try:
    strategy.run(last)
except LookupError:
    print("rank 1 goes home", flush=True)
"""


@pytest.mark.parametrize("place", PLACES)
def test_the_traceback_of_the_rank_that_raised_is_the_only_one(place):
    result = run_job(3, SCRIPT + "strategy.run(step)", env=PLACES[place])
    assert result.returncode != 0
    assert result.stderr.count("Traceback") == 1, result.stderr
    assert "rank 1 of 3 failed" in result.stderr and "LookupError: no such row" in result.stderr


@pytest.mark.parametrize("place", PLACES)
def test_ranks_that_wait_for_one_that_caught_its_error_and_left(place):
    result = run_job(3, SCRIPT + CAUGHT, env=PLACES[place])
    assert result.returncode != 0
    assert "rank 1 goes home" in result.stdout
    assert "RemoteReplicaError: rank" in result.stderr and "LookupError: no such row (script.py, line" in result.stderr


@pytest.mark.parametrize("place", PLACES)
def test_a_job_in_which_nobody_makes_a_call_any_more_ends_well(place):
    result = run_job(3, SCRIPT + AT_THE_END, env=PLACES[place])
    assert result.returncode == 0, result.stderr
    assert "rank 1 goes home" in result.stdout


@pytest.mark.parametrize("place", ["one node"])
def test_a_job_whose_ranks_all_catch_it_ends_well(place):
    result = run_job(3, SCRIPT + ALL_CATCH, env=PLACES[place])
    assert result.returncode == 0, result.stderr
    kinds = ["RemoteReplicaError", "LookupError", "RemoteReplicaError"]
    assert sorted(result.stdout.splitlines()) == sorted(f"{kind} on {rank}" for rank, kind in enumerate(kinds))


@pytest.mark.parametrize("place", PLACES)
def test_ranks_that_all_catch_it_go_on_in_step(place):
    result = run_job(3, SCRIPT + GO_ON, env=PLACES[place])
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["0: 0 of 5, 3", "1: 5 of 5, 3", "2: 0 of 5, 3"]
