"""Sums that are begun before their call, under a real mpirun on pretended nodes: jobs that end with some under way."""

from __future__ import annotations

import re

import pytest

from tests.jobs import run_job

START = """
import os, signal
import numpy
from mpidist.errors import RemoteReplicaError
from mpidist.world import world_communicator

ranks = world_communicator()
rank, size = ranks.rank, ranks.size
signatures = [(name, numpy.dtype("f4"), (1 << 21,)) for name in "abc"]
plan = ranks.engine().early_plan(signatures, "sum")
sums = ranks.engine().bind_early(plan, 0, ("", numpy.dtype("f4"), (1,)), 1)

def say(line):
    os.write(1, f"{line}\\n".encode())

def step(filled, counts=True):
    for buffer in sums.buckets.buffers:
        buffer[:] = rank
    sums.move_on(min(filled, len(sums.buckets.buffers)))
    if sums(counts):
        for buffer in sums.buckets.buffers:
            assert (buffer == size * (size - 1) // 2).all()

for number in range(3):
    step(number + rank)
"""


def job(body: str, ranks: int = 3):
    return run_job(ranks, START + body, env={"MPIDIST_VIRTUAL_NODES": "2", "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_values_and_sums_that_are_dropped(ranks):
    body = """
for number in range(4):
    step(rank, number % 2 == 1 or rank == 0)
say(f"done {rank}")
"""
    result = job(body, ranks)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"done {rank}" for rank in range(ranks)]


@pytest.mark.parametrize("begun", [0, 1, 3])
def test_a_job_ends_well_with_sums_under_way_that_nobody_takes(begun):
    """The rank that raised has caught its error, as others have caught what they heard of it, and all is over."""
    body = f"""
if rank == 1:
    sums.move_on({begun})
    ranks.miss(ValueError("boom"))
else:
    try:
        step(3)
    except RemoteReplicaError as error:
        assert "boom" in str(error)
ranks.barrier()
say(f"done {{rank}}")
"""
    result = job(body)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["done 0", "done 1", "done 2"]


def test_a_rank_that_is_killed_with_sums_under_way_is_named():
    body = """
if rank == 1:
    sums.move_on(2)
    os.kill(os.getpid(), signal.SIGKILL)
step(3)
say("came to the end")
"""
    result = job(body)
    assert result.returncode != 0
    assert "came to the end" not in result.stdout
    # Open MPI's mpirun leaves the survivors time to say it; MPICH's kills them at once and names the process
    assert re.search(r"rank 1\b.*(died|exited on)|Killed \(signal 9\)", result.stderr + result.stdout)
