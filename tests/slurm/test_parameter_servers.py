"""Parameter servers under a real Slurm: the servers are a component of their own of a heterogeneous job."""

from __future__ import annotations

import re
import sys

import pytest

from mpidist.cluster.slurm_plugins import family
from tests.helpers.grid import grid
from tests.helpers.launch import ROOT, JobResult
from tests.slurm.cluster import LIMIT_SECONDS, Slurm, mpi, plugin

COMMAND = [sys.executable, str(ROOT / "examples" / "parameter_server.py")]
RECOMMENDER = [sys.executable, str(ROOT / "examples" / "recommender.py"), "--epochs", "1"]

ROLES = """roles of 5 ranks (components of the Slurm job):
  rank 0     chief       node1
  ranks 1-2  worker 0-1  node1
  ranks 3-4  ps 0-1      node2
"""


def _check(result: JobResult) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    assert ROLES in result.stdout + result.stderr  # a batch job's output has both
    match = re.search(r"^660 updates, test accuracy (\d\.\d+)$", result.stdout, re.MULTILINE)
    assert match and float(match[1]) >= 0.9, result.stdout


def _batch(command: list[str]) -> str:
    """Return a batch script that runs a command in both components."""
    return f"""#!/bin/bash
#SBATCH --nodes=1 --ntasks=3 --nodelist=node1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=2 --nodelist=node2
srun --mpi={plugin()} --het-group=0,1 {" ".join(command)}
"""


def test_the_last_component_of_a_batch_job_serves(slurm: Slurm):
    _check(slurm.sbatch(_batch(COMMAND)))


def test_the_tables_of_the_recommender_have_a_shard_on_each_server_of_the_last_component(slurm: Slurm):
    result = slurm.sbatch(_batch(RECOMMENDER))
    assert result.returncode == 0, result.stdout
    assert ROLES in result.stdout
    assert "2 shards, test error" in result.stdout


@pytest.mark.parametrize("first", grid([], [["--nodes=1", "--ntasks=3", "--nodelist=node1"]]))
def test_the_last_component_of_a_job_of_srun_serves(slurm: Slurm, first: list[str]):
    second = ["--nodes=1", "--ntasks=2", "--nodelist=node2"]
    _check(slurm.srun(*COMMAND, ":", *second, *COMMAND, options=first))


@pytest.mark.parametrize("victim", grid([4], [1]), ids={1: "worker", 4: "server"}.get)
def test_a_rank_that_is_killed_ends_both_components(slurm: Slurm, victim: int):
    """A worker, and a server."""
    script = f"""
import os, signal, time
import mpidist
from mpidist.world import world_communicator
if world_communicator().rank == {victim}:
    signal.setitimer(signal.ITIMER_REAL, 1)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
strategy = mpidist.ParameterServerStrategy()
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
coordinator.schedule(time.sleep, args=({10 * LIMIT_SECONDS},)).fetch()
"""
    first, second = (["--nodes=1", f"--ntasks={count}", f"--nodelist=node{node}"] for node, count in ((1, 3), (2, 2)))
    command = [sys.executable, "-c", script]
    delay = {"OMPI_MCA_mpi_abort_delay": "1"} if family(mpi().vendor) == "Open MPI" else {}
    result = slurm.srun(*command, ":", *second, *command, options=first, env=delay)
    assert result.returncode != 0
    assert re.search(rf"rank {victim} \(node\d\)\)? died", result.stderr), result.stderr
