"""A client that is killed while it pushes: real jobs, with and without fault tolerance."""

from __future__ import annotations

import re
import sys

import pytest

from tests.helpers.launch import environment, launcher, run_job, run_process

LIMIT_SECONDS = 300.0

TOLERANT = launcher().vendor == "Open MPI" and launcher().version >= (5,)

#: Ranks 0 and 1 are clients, rank 2 is the server.  Rank 1 dies in its 11th push, when half of it is in place.
JOB = """
import os, signal, sys, numpy
from mpidist import transports
from mpidist.optimizers import SGD
from mpidist.parameter_server.consistency import StaleSynchronous
from mpidist.parameter_server.server.server import Server
from tests.helpers.served import on_rank, spec

world = transports.world()
world.control.vital_ranks = frozenset({0, 2})

def job(client):
    client.create(spec(0, (100_000,)), 0, numpy.zeros(100_000) if client.is_chief else None)
    optimizer = client.register_optimizer(SGD(1.0))
    for step in range(30):
        client.refresh()
        client.value((0, 0))
        if client.number == 1 and step == 10:
            client.flush()
            area = client.servers[0].area(800_000)
            area.array[:400_000] = 77
            os.kill(os.getpid(), signal.SIGKILL)
        client.push(optimizer, [((0, 0), numpy.ones(100_000))])

found = on_rank(1, job, StaleSynchronous(0))
if isinstance(found, Server):
    values = set(found.store.read((0, 0)).tolist())
    os.write(1, f"the server holds {values} after {found.pushes} pushes\\n".encode())
"""


@pytest.mark.skipif(not TOLERANT, reason="this MPI's launcher ends all ranks when one dies")
@pytest.mark.parametrize("shared", ["1", "0"])
def test_of_a_push_that_is_broken_off_nothing_is_left(tmp_path, shared):
    path = tmp_path / "job.py"
    path.write_text(JOB)
    command = [sys.executable, "-m", "mpidist", "run", "-n", "3", "--fault-tolerant", str(path)]
    job = run_process(command, environment({"MPIDIST_SHARED_MEMORY": shared}), LIMIT_SECONDS)
    assert job.returncode == 0, job.stderr
    assert "the server holds {-40.0} after 40 pushes" in job.stdout


def test_without_fault_tolerance_the_job_ends_and_says_who_died():
    job = run_job(3, JOB, timeout_seconds=LIMIT_SECONDS)
    assert job.returncode != 0
    assert "the server holds" not in job.stdout


#: Clients that only push, and so wait for nobody, and a server that is killed.
ONLY_PUSHING = """
import os, signal, numpy
from mpidist import transports
from mpidist.optimizers import SGD
from tests.helpers.served import on_rank, spec

control = transports.world().control

def job(client):
    client.create(spec(0), 0, numpy.zeros(()) if client.is_chief else None)
    optimizer = client.register_optimizer(SGD(1.0))
    for step in range(100_000_000):
        client.push(optimizer, [((0, 0), numpy.ones(()))])
        if client.number == 0 and step == 1000:
            os.kill(control.board.pids[control.board_ranks.index(2)], signal.SIGKILL)

on_rank(1, job)
"""


def test_who_only_pushes_notices_that_the_server_was_killed():
    job = run_job(3, ONLY_PUSHING, timeout_seconds=LIMIT_SECONDS)
    assert job.returncode != 0
    assert re.search(r"rank 2\b.*(died|exited on)|Killed \(signal 9\)", job.stderr + job.stdout)
