"""The warning of a process that works alone in a job of several ranks; the same on a real Slurm in tests/slurm."""

from __future__ import annotations

import threading

import pytest

import mpidist
from mpidist import world
from mpidist.cluster.launchers import LAUNCHERS
from tests.unit.cluster import recorded


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, no job, and no warning yet."""
    for table in LAUNCHERS:
        monkeypatch.delenv(table.rank, raising=False)
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "MPIDIST_NO_MPI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(world, "_warned", threading.Lock())
    monkeypatch.setattr(world, "_library", lambda: "Open MPI v5.0.11, package: x")


def warnings_in(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[str]:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        world._warn_of_missing_launcher()
    return [record.getMessage() for record in caplog.records]


def test_a_batch_script_of_four_tasks_is_told_once(monkeypatch, caplog):
    (said,) = warnings_in(recorded.BATCH_SCRIPT, monkeypatch, caplog)
    assert "\n" not in said
    for part in ("Slurm job 4 was given 4 ranks", "`srun --mpi=pmix`", "`mpidist run -n 4 SCRIPT`", "MPIDIST_NO_MPI=1"):
        assert part in said


def test_components_of_a_job_count_together(monkeypatch, caplog):
    first = {"SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "node1", "SLURM_TASKS_PER_NODE": "1"}
    tasks = {"SLURM_HET_SIZE": "2", "SLURM_NTASKS_HET_GROUP_0": "1", "SLURM_NTASKS_HET_GROUP_1": "2"}
    (said,) = warnings_in({**recorded.BATCH_SCRIPT, **first, **tasks}, monkeypatch, caplog)
    assert "Slurm job 4 was given 3 ranks in 2 components" in said
    assert "`srun --mpi=pmix --het-group=0,1`" in said and "mpidist run" not in said


def test_a_job_of_two_hosts_of_another_scheduler_is_told(monkeypatch, caplog):
    (said,) = warnings_in({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b 4"}, monkeypatch, caplog)
    assert "LSF job 7 was given 2 ranks" in said and "srun" not in said


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {**recorded.BATCH_SCRIPT, "SLURM_NTASKS": "1", "SLURM_JOB_NODELIST": "n1", "SLURM_TASKS_PER_NODE": "1"},
        {**recorded.BATCH_SCRIPT, "MPIDIST_NO_MPI": "1"},
        {**recorded.BATCH_SCRIPT, "SLURM_TASKS_PER_NODE": "unreadable"},
        {**recorded.BATCH_SCRIPT, **recorded.OPEN_MPI},
        recorded.SRUN,
        recorded.HYDRA_IN_BATCH,
        {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4"},  # four places, for threads as likely as for ranks
    ],
)
def test_others_are_told_nothing(environ, monkeypatch, caplog):
    assert warnings_in(environ, monkeypatch, caplog) == []


@pytest.mark.parametrize(
    "use",
    [
        mpidist.MirroredStrategy,
        mpidist.MultiWorkerMirroredStrategy,
        mpidist.ParameterServerStrategy,
        mpidist.experimental.CentralStorageStrategy,
        lambda: mpidist.all_reduce(1.0),
    ],
)
def test_what_works_on_all_ranks_of_the_job_warns(use, monkeypatch, caplog):
    for name, value in recorded.BATCH_SCRIPT.items():
        monkeypatch.setenv(name, value)
    use()
    assert len([record for record in caplog.records if "no launcher started" in record.getMessage()]) == 1


@pytest.mark.parametrize("use", [mpidist.rank, lambda: mpidist.OneDeviceStrategy("/cpu:0"), mpidist.get_strategy])
def test_what_does_not_warns_of_nothing(use, monkeypatch, caplog):
    for name, value in recorded.BATCH_SCRIPT.items():
        monkeypatch.setenv(name, value)
    use()
    assert not [record for record in caplog.records if "no launcher started" in record.getMessage()]
