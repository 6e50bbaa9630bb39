"""Tasks of a job array do not mix in one directory of checkpoints; the same on a real Slurm in tests/slurm."""

from __future__ import annotations

import pytest

import mpidist
from mpidist.errors import CheckpointError
from mpidist.testing import run_ranks
from mpidist.training.array_task import own_task

NAMES = {
    "Slurm": ("SLURM_JOB_NAME", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"),
    "PBS": ("PBS_JOBNAME", "PBS_ARRAY_ID", "PBS_ARRAY_INDEX"),
    "LSF": ("LSB_JOBNAME", "LSB_JOBID", "LSB_JOBINDEX"),
    "Grid Engine": ("JOB_NAME", "JOB_ID", "SGE_TASK_ID"),
}


@pytest.fixture(autouse=True)
def no_array(monkeypatch):
    for name in [*sum(NAMES.values(), ()), "MPIDIST_ARRAY_CHAIN"]:
        monkeypatch.delenv(name, raising=False)


def be_task(monkeypatch, array, task, scheduler="Slurm"):
    for name, value in zip(NAMES[scheduler], ("digits", array, task), strict=True):
        monkeypatch.setenv(name, value)


def manager_of(directory):
    return mpidist.CheckpointManager(mpidist.Checkpoint(v=mpidist.Variable(1.0, name="v")), directory)


def saved_by(monkeypatch, directory, array, task, scheduler="Slurm"):
    """Let a task save, as a process that ends then."""
    be_task(monkeypatch, array, task, scheduler)
    manager = manager_of(directory)
    manager.save()
    (directory / ".owner").unlink()
    return manager


@pytest.mark.parametrize("scheduler", NAMES)
def test_another_task_of_the_array_is_refused_on_all_ranks_with_the_cure(scheduler, monkeypatch, tmp_path):
    saved_by(monkeypatch, tmp_path, "41", "1", scheduler)
    be_task(monkeypatch, "41", "2", scheduler)

    def make():
        with pytest.raises(CheckpointError) as raised:
            manager_of(tmp_path)
        return str(raised.value), raised.value.on_all_ranks

    for message, on_all_ranks in run_ranks(2, make):
        assert on_all_ranks
        assert f"the checkpoints in {tmp_path} are those of task 1 of {scheduler}'s job array 41 (digits)" in message
        assert "this is task 2 of it" in message
        assert f"${NAMES[scheduler][2]}" in message and "MPIDIST_ARRAY_CHAIN=1" in message
    assert len(list(tmp_path.glob("*.h5"))) == 1


@pytest.mark.parametrize("array, task", [("41", "1"), ("42", "2"), ("42", "1")])
def test_a_task_that_is_queued_again_and_a_later_array_go_on(array, task, monkeypatch, tmp_path):
    saved_by(monkeypatch, tmp_path, "41", "1")
    saved_by(monkeypatch, tmp_path, array, task)
    assert manager_of(tmp_path).restore_or_initialize() == tmp_path / "checkpoint-2.h5"


def test_a_later_job_goes_on_and_does_not_make_room_for_other_tasks(monkeypatch, tmp_path):
    saved_by(monkeypatch, tmp_path, "41", "1")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID")
    manager = manager_of(tmp_path)
    assert manager.restore_or_initialize() == tmp_path / "checkpoint-1.h5"
    manager.save()
    be_task(monkeypatch, "41", "2")
    with pytest.raises(CheckpointError, match="task 1 of Slurm's job array 41"):
        manager_of(tmp_path)


def test_a_chain_is_asked_for(monkeypatch, tmp_path):
    saved_by(monkeypatch, tmp_path, "41", "1")
    monkeypatch.setenv("MPIDIST_ARRAY_CHAIN", "1")
    saved_by(monkeypatch, tmp_path, "41", "2")
    monkeypatch.delenv("MPIDIST_ARRAY_CHAIN")
    be_task(monkeypatch, "41", "1")
    with pytest.raises(CheckpointError, match="those of task 2 of"):
        manager_of(tmp_path)


def test_a_directory_without_checkpoints_is_for_all(monkeypatch, tmp_path):
    for path in tmp_path.glob("*"):
        path.unlink()
    saved_by(monkeypatch, tmp_path / "a", "41", "1")
    (tmp_path / "a" / "checkpoint-1.h5").unlink()
    be_task(monkeypatch, "41", "2")
    manager_of(tmp_path / "a").save()


def test_a_manager_that_clears_its_directory_leaves_nothing(monkeypatch, tmp_path):
    be_task(monkeypatch, "41", "1")
    manager = manager_of(tmp_path / "a")
    manager.save()
    assert (tmp_path / "a" / ".job").exists()
    manager.clear()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"task": 1}', "\x00"])
def test_a_damaged_note_keeps_nobody_out(text, monkeypatch, tmp_path):
    saved_by(monkeypatch, tmp_path, "41", "1")
    (tmp_path / ".job").write_text(text)
    saved_by(monkeypatch, tmp_path, "41", "2")


def test_outside_of_arrays_nothing_is_noted(tmp_path):
    manager_of(tmp_path).save()
    assert not (tmp_path / ".job").exists()


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "41"},
        {"LSB_JOBID": "41", "LSB_JOBINDEX": "0"},
        {"JOB_ID": "41", "SGE_TASK_ID": "undefined"},
        {"JOB_ID": "41"},
    ],
)
def test_no_array(environ):
    assert own_task(environ) is None


def test_the_first_task_of_an_array_of_slurm_may_be_0():
    found = own_task({"SLURM_ARRAY_JOB_ID": "41", "SLURM_ARRAY_TASK_ID": "0", "SLURM_JOB_NAME": "digits"})
    assert found == ("Slurm", "digits", "41", "0")
