"""An error of the launch is printed by one task of a node, in a line, where no program catches it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mpidist.commands.launch.probe import without_launcher

LIMIT_SECONDS = 60

#: A task of an srun, in an environment that has no mpi4py.
TASK = """
import sys
sys.modules["mpi4py"] = None
import mpidist
from mpidist.cluster.resolvers import mpi
mpi._PATIENCE_SECONDS = 0
"""


def _run(body: str, rank: int, local_rank: int) -> subprocess.CompletedProcess[str]:
    told = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4"}
    environ = {**without_launcher(os.environ), **told, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(local_rank)}
    command = [sys.executable, "-c", TASK + body]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS)


@pytest.mark.parametrize(("rank", "local_rank", "speaks"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)])
def test_the_first_task_of_a_node_says_it_in_a_line(rank: int, local_rank: int, speaks: bool) -> None:
    done = _run("mpidist.MultiWorkerMirroredStrategy()", rank, local_rank)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == speaks, done.stderr
    begin = f"mpidist: LaunchError: task {rank} of 4: srun (Slurm) started 4 tasks, but there is no mpi4py"
    assert done.stderr.startswith(begin) or not speaks


def test_a_program_may_catch_it_and_fail_for_another_reason() -> None:
    body = """
for _ in range(2):
    try:
        mpidist.MultiWorkerMirroredStrategy()
    except mpidist.errors.LaunchError:
        print("caught")
1 / 0
"""
    done = _run(body, 1, 1)
    assert done.stdout == "caught\ncaught\n"
    assert done.stderr.startswith("Traceback (most recent call last):\n") and "ZeroDivisionError" in done.stderr
