"""Where srun puts ranks: Slurm's variables and MPI say the same of every one, and steps side by side do not meet."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.grid import grid
from tests.slurm.cluster import Slurm, plugin

#: Each rank says where it is, by Slurm's variables and by MPI, and whether the two agree about all ranks.
SCRIPT = """
import platform, sys
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver, SlurmClusterResolver

total = float(mpidist.all_reduce(1.0))
by_slurm, by_mpi = SlurmClusterResolver(), MPIClusterResolver()
hosts = mpidist.all_gather_object(platform.node())
for resolver in (by_slurm, by_mpi):
    assert list(resolver.topology.hosts) == hosts, (resolver, resolver.topology.hosts, hosts)
    assert (resolver.task_type, resolver.task_id) == ("worker", mpidist.rank()), (resolver.task_id, mpidist.rank())
assert by_slurm.topology.local_rank_of[mpidist.rank()] == mpidist.local_rank()
sys.stdout.write(f"rank {mpidist.rank()} of {int(total)} on {platform.node()} among {' '.join(hosts)}\\n")
"""


@pytest.fixture(scope="module")
def slurm(four_nodes: Slurm) -> Slurm:
    """The cluster of these tests; most of them leave nodes of it alone."""
    return four_nodes


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("placements") / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def _lines(hosts: list[str]) -> list[str]:
    """Return what ranks on these hosts print, sorted."""
    return sorted(f"rank {rank} of {len(hosts)} on {host} among {' '.join(hosts)}" for rank, host in enumerate(hosts))


def _printed(text: str) -> list[str]:
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


A, B, C, D = "node1", "node2", "node3", "node4"


@pytest.mark.parametrize(
    "options, hosts",
    grid(
        [
            # on a node of 4 CPUs, srun fills the first as far as it can where nobody says how many go on each
            (["--nodes=2", "--ntasks=4"], [A, A, A, B]),
            pytest.param(["--nodes=2", "--ntasks=4", "--distribution=cyclic"], [A, B, A, A], marks=pytest.mark.brief),
            (["--nodes=2", "--ntasks=5", "--distribution=plane=2"], [A, A, B, A, A]),
            (["--nodes=4", "--ntasks=6"], [A, A, A, B, C, D]),
            (["--nodes=4", "--ntasks=7", "--distribution=plane=2"], [A, A, B, C, D, A, A]),
        ],
        [
            (["--nodes=1", "--ntasks=3"], [A, A, A]),
            (["--nodes=2", "--ntasks-per-node=2"], [A, A, B, B]),
            (["--nodes=2", "--ntasks-per-node=2", "--distribution=cyclic"], [A, B, A, B]),
            (["--nodes=2", "--ntasks=2"], [A, B]),
            (["--nodes=4", "--ntasks-per-node=2"], [A, A, B, B, C, C, D, D]),
            (["--nodes=4", "--ntasks=6", "--distribution=cyclic"], [A, B, C, D, A, A]),
            (["--nodes=2", "--ntasks=3", "--nodelist=node[2,4]"], [B, B, D]),
        ],
    ),
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_slurm_and_mpi_agree_about_every_rank(slurm: Slurm, script: str, options: list[str], hosts: list[str]):
    result = slurm.srun(sys.executable, script, options=options)
    assert result.returncode == 0, result.stderr
    assert _printed(result.stdout) == _lines(hosts)


@pytest.mark.parametrize(
    "first, second, hosts",
    grid(
        [("--nodes=1 --ntasks=3 --nodelist=node1", "--nodes=1 --ntasks=2 --nodelist=node2", [A, A, A, B, B])],
        [("--nodes=3 --ntasks=3 --nodelist=node[1-3]", "--nodes=1 --ntasks=2 --nodelist=node4", [A, B, C, D, D])],
    ),
    ids=["two nodes", *grid([], ["four nodes"])],
)
def test_they_agree_in_a_job_of_two_components(slurm: Slurm, script: str, first: str, second: str, hosts: list[str]):
    command = [sys.executable, script]
    result = slurm.srun(*command, ":", *second.split(), *command, options=first.split())
    assert result.returncode == 0, result.stderr
    assert _printed(result.stdout) == _lines(hosts)


def test_they_agree_in_steps_of_array_tasks(slurm: Slurm, script: str, tmp_path: Path):
    """Two tasks at a time, each with two nodes of its own: a step on both of them, then one on the first."""
    start = f"srun --mpi={plugin()} --kill-on-bad-exit=1"
    result = slurm.sbatch(
        f"""#!/bin/bash
#SBATCH --array=3-4 --nodes=2 --ntasks-per-node=2 --exclusive
{start} --distribution=cyclic {sys.executable} {script} >{tmp_path}/both-$SLURM_ARRAY_TASK_ID &&
{start} --nodes=1 --ntasks=2 {sys.executable} {script} >{tmp_path}/one-$SLURM_ARRAY_TASK_ID
"""
    )
    assert result.returncode == 0, result.stdout
    both, one = (
        sorted(_printed((tmp_path / f"{step}-{task}").read_text()) for task in (3, 4)) for step in ("both", "one")
    )
    assert both == [_lines([A, B, A, B]), _lines([C, D, C, D])]
    assert one == [_lines([A, A]), _lines([C, C])]


def test_steps_side_by_side_are_worlds_of_their_own(slurm: Slurm, script: str, tmp_path: Path):
    """Two steps of one job at a time, one of them on what the other leaves of both nodes."""
    start = f"srun --mpi={plugin()} --exact --kill-on-bad-exit=1"
    result = slurm.sbatch(
        f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=4
{start} --nodes=1 --ntasks=2 {sys.executable} {script} >{tmp_path}/small &
{start} --nodes=2 --ntasks=4 {sys.executable} {script} >{tmp_path}/large &
wait -n && wait -n
"""
    )
    assert result.returncode == 0, result.stdout
    small, large = (_printed((tmp_path / name).read_text()) for name in ("small", "large"))
    assert small in (_lines([A, A]), _lines([B, B]))
    assert [line.split(" on ")[0] for line in large] == [f"rank {rank} of 4" for rank in range(4)]
    assert {line.split()[5] for line in large} == {A, B}
