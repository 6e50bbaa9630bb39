"""What the job was given, seen from a batch script on two nodes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm, plugin

BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node={tasks} --cpus-per-task={cpus}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1  # these tests are run by root
unset OMP_NUM_THREADS
{command}
"""

RUN = f"{sys.executable} -m mpidist run -n $SLURM_NTASKS --tag sh -c 'echo is on $(hostname)'"


def test_mpidist_run_counts_the_cores_of_each_node_for_its_own_ranks(slurm: Slurm):
    """A rank a node has a core of its own, however few this machine has: all ranks together may have none."""
    result = slurm.sbatch(BATCH.format(tasks=1, cpus=4, command=RUN))
    assert result.returncode == 0, result.stdout
    assert sorted(line for line in result.stdout.splitlines() if line.startswith("[")) == [
        "[0] is on node1",
        "[1] is on node2",
    ]
    assert "for 1 rank on node1" in result.stdout
    assert "OVERSUBSCRIBE" not in result.stdout and " share " not in result.stdout


@pytest.mark.parametrize("ranks, there", [(4, 2), (3, 2), (7, 4)])
def test_more_ranks_than_a_node_has_cores_are_counted_by_node(slurm: Slurm, ranks: int, there: int):
    """With two tasks a node, also for more ranks than the job has tasks; the launcher deals them as we count."""
    result = slurm.sbatch(BATCH.format(tasks=2, cpus=1, command=RUN.replace("$SLURM_NTASKS", str(ranks))))
    assert result.returncode == 0, result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert sum(line.endswith("is on node1") for line in lines) == there
    assert sum(line.endswith("is on node2") for line in lines) == ranks - there
    assert f"for {there} ranks on node1" in result.stdout


#: A process says how many replicas there are, in one write: lines of two ranks may mix otherwise.
PROGRAM = 'import sys, mpidist; sys.stdout.write("%d\\n" % mpidist.MultiWorkerMirroredStrategy().num_replicas_in_sync)'
STRATEGY = f"{sys.executable} -c '{PROGRAM}'"
INFO = f"{sys.executable} -m mpidist info"
MPIRUN = f"{Path(sys.executable).parent}/mpirun -n 2"
WARNING = "no launcher started this process"


def test_a_forgotten_srun_is_told_with_the_plugin_to_use(slurm: Slurm):
    result = slurm.sbatch(BATCH.format(tasks=2, cpus=1, command=STRATEGY))
    assert result.returncode == 0, result.stdout
    said, replicas = result.stdout.splitlines()
    assert replicas == "1"
    assert WARNING in said and "was given 4 ranks" in said
    assert f"Start with `srun --mpi={plugin()}` (`srun --mpi=list` here: " in said


def test_who_forgot_nothing_is_told_nothing(slurm: Slurm):
    """A child of srun, and of an mpirun of fewer ranks than the job has; a command that trains nothing."""
    steps = [f"srun --mpi={plugin()} --nodes=1 --ntasks=1 {STRATEGY}", f"{MPIRUN} {STRATEGY}", INFO]
    result = slurm.sbatch(BATCH.format(tasks=2, cpus=1, command="\n".join(steps)))
    assert result.returncode == 0, result.stdout
    assert [line for line in result.stdout.splitlines() if line in ("1", "2")] == ["1", "2", "2"], result.stdout
    assert WARNING not in result.stdout


def test_a_job_of_one_task_is_told_nothing(slurm: Slurm):
    result = slurm.sbatch("#!/bin/bash\n#SBATCH --nodes=1 --exclusive\n" + STRATEGY)
    assert (result.returncode, result.stdout) == (0, "1\n")
