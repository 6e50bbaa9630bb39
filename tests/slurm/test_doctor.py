"""``mpidist doctor`` under a real Slurm: one page of four ranks, and one of four that did not find each other."""

from __future__ import annotations

import sys

from mpidist.cluster.launchers import family
from tests.slurm.cluster import WRONG_PLUGINS, Slurm, mpi, plugin

DOCTOR = (sys.executable, "-m", "mpidist", "doctor")


def test_four_ranks_on_two_nodes_print_one_page(slurm: Slurm, tmp_path):
    result = slurm.srun(*DOCTOR, "--folder", str(tmp_path), env={"OMP_NUM_THREADS": "1"})
    lines = result.stdout.splitlines()
    assert [line for line in lines if line.startswith("FAIL")] == [], result.stdout
    assert lines.count("ok    world: 4 ranks, as many as srun (Slurm) started") == 1
    assert lines.count("ok    placement: 2 nodes x 2 ranks: node1 2, node2 2") == 1
    assert lines.count("ok    all-reduce: 1.05 MB, right on 4 ranks") == 1
    assert any(line.startswith("ok    software: ") and line.endswith("alike on all ranks") for line in lines)
    assert any(line.startswith(f"ok    folder: {tmp_path}: ") and "seen by all nodes" in line for line in lines)
    assert any("node pairs: " in line for line in lines)
    assert result.returncode == any(line.startswith("warn") for line in lines), result.stderr


def test_a_folder_of_one_node_is_not_shared(slurm: Slurm):
    result = slurm.srun(*DOCTOR, "--folder", "/dev/shm")  # each of these nodes has its own
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert line.startswith("FAIL  folder: /dev/shm: node2 does not see a file of rank 0 there"), result.stdout
    assert result.returncode == 2


def test_a_wrong_plugin_is_one_line_with_the_right_one(slurm: Slurm):
    result = slurm.srun(*DOCTOR, mpi=WRONG_PLUGINS[family(mpi().vendor)][0])
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("FAIL")]
    assert line.startswith("FAIL  world: task 0 of 4: srun (Slurm) "), result.stdout
    assert f"mpi4py loaded {mpi().title}" in line
    assert line.endswith(f"-> srun --mpi={plugin()} python -m mpidist doctor")
    assert result.returncode == 2 and "Traceback" not in result.stderr


def test_ranks_are_counted_in_all_components_of_a_job(slurm: Slurm):
    start = " ".join(DOCTOR)
    result = slurm.sbatch(
        f"""#!/bin/bash
#SBATCH --nodes=1 --ntasks=2 --nodelist=node1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=1 --nodelist=node2
{start} --folder /tmp
srun --mpi={plugin()} {start} --folder /tmp
srun --mpi={plugin()} --het-group=0,1 {start} --folder /tmp
"""
    )
    cure, lines = f"srun --mpi={plugin()} --het-group=0,1 python -m mpidist doctor", result.stdout.splitlines()
    assert [line for line in lines if line[6:].startswith(("world: ", "placement: "))] == [
        f"warn  world: this process is alone, but the job has 3 tasks in 2 components  -> {cure}",
        f"warn  world: 2 ranks, as many as srun (Slurm) started, but in component 0 of the job's 2 only  -> {cure}",
        "ok    placement: 1 node x 2 ranks: node1 2",
        "ok    world: 3 ranks, as many as srun (Slurm) started, in all 2 components of the job",
        "ok    placement: 2 nodes: 2+1 ranks: node1 2, node2 1",
    ], result.stdout


def test_python_alone_in_a_job_of_four_tasks_names_srun(slurm: Slurm):
    start = " ".join(DOCTOR)
    result = slurm.sbatch(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2\n{start} --folder /tmp\n")
    lines = result.stdout.splitlines()
    text = "warn  world: this process is alone, but the job has 4 tasks"
    assert f"{text}  -> srun --mpi={plugin()} python -m mpidist doctor" in lines, result.stdout
    assert any(line.startswith("warn  srun: takes --mpi=none by itself") for line in lines), result.stdout
    assert result.returncode == 1
