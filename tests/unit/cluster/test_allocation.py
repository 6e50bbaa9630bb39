"""What a scheduler has given to a job; those of Slurm are recorded, the others after their manuals."""

from __future__ import annotations

import pytest

from mpidist.cluster.allocation import HostShare, given_allocation
from mpidist.errors import ClusterResolutionError
from tests.unit.cluster import recorded

SLURM = {
    "SLURM_JOB_ID": "41",
    "SLURM_JOB_NODELIST": "node[1-3]",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_CPUS_PER_NODE": "4(x2),2",
}


def test_a_batch_script_of_slurm():
    found = given_allocation({**SLURM, "SLURM_NTASKS": "5"})
    assert found is not None
    assert found.title == "Slurm job 41"
    assert found.shares == {"node1": HostShare(2, 4), "node2": HostShare(2, 4), "node3": HostShare(1, 2)}
    assert found.places == {"node1": 2, "node2": 2, "node3": 1}
    assert found.ranks == 5


@pytest.mark.parametrize(
    "more, ranks",
    [
        # sbatch -N 3 names no tasks; sbatch -N 1 --exclusive neither, and has a slot for each CPU
        ({}, 3),
        ({"SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "64", "SLURM_JOB_CPUS_PER_NODE": "64"}, 1),
        ({"SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "1"}, 1),
    ],
)
def test_the_ranks_that_a_job_of_slurm_was_asked_for(more, ranks):
    environ = {**SLURM, **more}
    if "," not in environ["SLURM_TASKS_PER_NODE"]:
        environ["SLURM_JOB_CPUS_PER_NODE"] = "64"
    found = given_allocation(environ)
    assert found is not None and found.ranks == ranks


def test_a_step_of_slurm_has_the_tasks_that_are_its_own():
    step = {"SLURM_STEP_NODELIST": "node[2-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_TASKS_PER_NODE": "1(x2)"}
    found = given_allocation({**SLURM, **step})
    assert found is not None
    assert found.shares == {"node2": HostShare(1, 4), "node3": HostShare(1, 2)}


@pytest.mark.parametrize(
    "environ, places",
    [
        (recorded.BATCH_SCRIPT, {"node1": 2, "node2": 2}),
        (recorded.SRUN, {"node1": 2, "node2": 1}),
        (recorded.HYDRA_IN_BATCH, {"node1": 1, "node2": 1}),
        (recorded.OPEN_MPI_IN_BATCH, {"node2": 1}),
    ],
)
def test_recorded_jobs_of_slurm(environ, places):
    found = given_allocation(environ)
    assert found is not None
    assert found.places == places
    assert {share.cpus for share in found.shares.values()} == {None}  # that variable was not recorded


def test_pbs_has_a_line_for_each_slot(tmp_path):
    file = tmp_path / "nodes"
    file.write_text("a.example.org\na.example.org\nb.example.org\n")
    found = given_allocation({"PBS_JOBID": "7.server", "PBS_NODEFILE": str(file)})
    assert found is not None
    assert (found.title, found.ranks) == ("PBS job 7.server", 2)
    assert found.shares == {"a.example.org": HostShare(2), "b.example.org": HostShare(1)}
    assert found.share_of("b") == HostShare(1)
    assert found.share_of("c") is None


def test_lsf_has_pairs():
    found = given_allocation({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b 2 "})
    assert found is not None
    assert (found.title, found.ranks) == ("LSF job 7", 2)
    assert found.shares == {"a": HostShare(4, 4), "b": HostShare(2, 2)}


def test_grid_engine_has_a_line_for_each_queue_of_a_host(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a 2 all.q@a UNDEFINED\nb 1 all.q@b UNDEFINED\na 1 more.q@a UNDEFINED\n")
    found = given_allocation({"JOB_ID": "7", "PE_HOSTFILE": str(file)})
    assert found is not None
    assert found.shares == {"a": HostShare(3, 3), "b": HostShare(1, 1)}


@pytest.mark.parametrize(
    "environ", [{}, {"JOB_ID": "a CI system's"}, {"SLURM_JOB_ID": "41"}, {"LSB_MCPU_HOSTS": "a 4"}]
)
def test_no_job(environ):
    assert given_allocation(environ) is None


@pytest.mark.parametrize(
    "environ, says",
    [
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2(x2)"}, r"Slurm's job .*SLURM_TASKS_PER_NODE=2\(x2\) is for 2 hosts"),
        ({**SLURM, "SLURM_JOB_NODELIST": "node[1-"}, r"host list 'node\[1-'"),
        ({name: text for name, text in SLURM.items() if "TASKS" not in name}, "SLURM_TASKS_PER_NODE is not set"),
        ({**SLURM, "SLURM_HET_SIZE": "two"}, "Slurm's job cannot be read: .*'two'"),
        ({"PBS_JOBID": "7", "PBS_NODEFILE": "/no/such/file"}, "PBS's job .*No such file"),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b"}, "LSF's job"),
    ],
)
def test_what_cannot_be_read(environ, says):
    with pytest.raises(ClusterResolutionError, match=says):
        given_allocation(environ)
