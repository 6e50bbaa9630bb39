"""Jobs on one copy of the variables that go wrong: they end in seconds, say why, and leave no memory behind."""

from __future__ import annotations

import re

import pytest

from tests.jobs import no_shared_memory_left, run_job
from tests.jobs.test_failures import LIMIT_SECONDS, NAMED_FILES

TRAINING = """
import os, resource, signal
import numpy
import mpidist
from mpidist.optimizers import Adam

strategy = mpidist.CentralStorageStrategy()
rank = strategy.extended.replica_id
with strategy.scope():
    table = mpidist.Variable(numpy.zeros((1000, 400), "float32"), name="table")
    optimizer = Adam(0.1)

def steps(count):
    gradient = numpy.ones((1000, 400), "float32")
    for _ in range(count):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, table)]))

steps(3)
"""


@pytest.mark.parametrize("before", ["", NAMED_FILES], ids=["without a name", "in /dev/shm"])
def test_a_killed_rank_ends_the_job_and_leaves_no_memory(before):
    body = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\nsteps(10**9)"
    with no_shared_memory_left():
        result = run_job(3, before + TRAINING + body, timeout_seconds=LIMIT_SECONDS)
    assert result.returncode != 0
    # Open MPI's mpirun leaves the survivors time to say it; MPICH's kills them at once and names the process.
    assert re.search(r"rank 1\b.*(died|exited on)|Killed \(signal 9\)", result.stderr + result.stdout)


def test_a_rank_that_raises_in_an_update_ends_the_job_with_its_error_last():
    body = (
        "if rank == 2:\n"
        "    def broken(*arguments): raise FloatingPointError('boom')\n"
        "    optimizer.update_slice = broken\n"
        "steps(1)\n"
    )
    with no_shared_memory_left():
        result = run_job(3, TRAINING + body, timeout_seconds=LIMIT_SECONDS)
    assert result.returncode != 0
    assert "FloatingPointError: boom" in result.stderr and "rank 2 of 3 failed" in result.stderr


def test_too_little_memory_is_said_with_the_variable_and_what_to_do():
    body = (
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 22, 1 << 22))\n"  # which files in memory have as well
        "with strategy.scope():\n"
        "    mpidist.Variable(numpy.zeros(1 << 21), name='embedding')\n"
    )
    result = run_job(2, TRAINING + body, timeout_seconds=LIMIT_SECONDS)
    assert result.returncode != 0
    message = result.stderr.replace("\n", " ")
    assert "TransportError: Variable 'embedding': the ranks of this node cannot share one copy of it" in message
    assert "16777216 bytes of shared memory cannot be had" in message and "more memory" in message
