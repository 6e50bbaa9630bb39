"""The example under a real Slurm: four ranks on two nodes, started by srun and from a batch script."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

from mpidist.cluster.slurm_plugins import family
from tests.helpers.launch import ROOT
from tests.slurm.cluster import WRONG_PLUGINS, Slurm, mpi, plugin

TRAIN = str(ROOT / "examples" / "train.py")
MLP = ["--model", "mlp", "--epochs", "8"]


def _hosts(stdout: str) -> list[str]:
    """Return the hosts of the table who is who, in rank order."""
    rows = re.findall(r"^(\d+) +(node\d+) +(\d) +worker \d", stdout, re.MULTILINE)
    assert [int(rank) for rank, _, _ in rows] == list(range(len(rows))), stdout
    assert [int(node) for _, _, node in rows] == [int(host != rows[0][1]) for _, host, _ in rows], stdout
    return [host for _, host, _ in rows]


def _accuracy(stdout: str) -> float:
    match = re.search(r"test accuracy +(\d\.\d+)\n\Z", stdout)
    assert match, stdout
    return float(match.group(1))


@pytest.mark.parametrize(
    "options, hosts",
    [
        (["--ntasks-per-node=2"], ["node1", "node1", "node2", "node2"]),
        (["--ntasks-per-node=2", "--distribution=cyclic"], ["node1", "node2", "node1", "node2"]),
        (["--ntasks=3", "--distribution=arbitrary", "--nodelist=node1,node2,node2"], ["node1", "node2", "node2"]),
    ],
    ids=["block", "cyclic", "uneven"],
)
def test_srun_makes_one_world_over_two_nodes(slurm: Slurm, options: list[str], hosts: list[str]):
    before = slurm.shared_memory()
    result = slurm.srun(sys.executable, TRAIN, *MLP, options=["--nodes=2", *options])
    assert result.returncode == 0, result.stderr
    assert _hosts(result.stdout) == hosts
    assert _accuracy(result.stdout) >= 0.9
    assert slurm.shared_memory() == before


def test_four_ranks_on_two_nodes_train_to_the_parameters_of_one(slurm: Slurm, tmp_path: Path):
    steps = [TRAIN, "--model", "mlp", "--steps", "20", "--save-parameters"]
    alone = subprocess.run(
        [sys.executable, *steps, str(tmp_path / "alone.npz")], env=slurm.environ(), capture_output=True, text=True
    )
    assert alone.returncode == 0, alone.stderr
    result = slurm.srun(sys.executable, *steps, str(tmp_path / "four.npz"))
    assert result.returncode == 0, result.stderr
    expected, found = numpy.load(tmp_path / "alone.npz"), numpy.load(tmp_path / "four.npz")
    assert sorted(found) == sorted(expected) and expected.files
    for name in expected:
        numpy.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("kill", ["0", "1"])
@pytest.mark.parametrize("wrong", [0, 1])
def test_a_wrong_plugin_ends_in_one_error_that_names_the_right_one(slurm: Slurm, wrong: int, kill: str):
    plugin_tried = WRONG_PLUGINS[family(mpi().vendor)][wrong]
    options = ["--nodes=2", "--ntasks-per-node=2", f"--kill-on-bad-exit={kill}"]
    result = slurm.srun(sys.executable, TRAIN, *MLP, mpi=plugin_tried, options=options)
    assert result.returncode != 0
    assert "test accuracy" not in result.stdout and "Traceback" not in result.stderr
    errors = re.findall(r"^mpidist: LaunchError: (task (\d) of 4: .*)", result.stderr, re.MULTILINE)
    # where Slurm does not end the others, the first task of the other node does not know that it was told
    assert [int(task) for _, task in errors] == ([0, 2] if kill == "0" else [0]), result.stderr
    for error, _ in errors:
        assert "srun (Slurm)" in error and "started 4 tasks" in error
        assert plugin_tried == "none" or f"--mpi={plugin_tried} started" in error
        assert f"mpi4py loaded {mpi().title}" in error
        assert f"Start with `srun --mpi={plugin()}`" in error


@pytest.mark.parametrize("launcher", ["mpirun", "mpidist run -n 4"])
def test_mpirun_in_a_batch_script_makes_one_world_over_two_nodes(slurm: Slurm, launcher: str):
    folder = Path(sys.executable).parent
    start = {"mpirun": f"{folder}/mpirun {sys.executable}"}.get(launcher, f"{sys.executable} -m {launcher}")
    result = slurm.sbatch(
        f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1  # these tests are run by root
{start} {TRAIN} {" ".join(MLP)}
"""
    )
    assert result.returncode == 0, result.stdout
    assert _hosts(result.stdout) == ["node1", "node1", "node2", "node2"]
    assert _accuracy(result.stdout) >= 0.9


def test_a_batch_script_itself_is_one_rank(slurm: Slurm):
    result = slurm.sbatch(
        f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2
{sys.executable} {TRAIN} {" ".join(MLP)}
"""
    )
    assert result.returncode == 0, result.stdout
    assert re.search(r"replicas +1\n", result.stdout)
    assert _accuracy(result.stdout) >= 0.9
