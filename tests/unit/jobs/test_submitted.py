"""The record of submitted jobs."""

from __future__ import annotations

import pytest

from mpidist.jobs.submitted import SubmittedJob, find_job, record_file, remember, submitted_jobs


def job(number):
    return SubmittedJob(number, "slurm", "train", "/home/me/job.sh", "/home/me", f"train-{number}.out", 1.5)


def test_jobs_are_found_again_by_number_and_the_last_one_without(tmp_path):
    path = tmp_path / "state" / "jobs.jsonl"
    remember(job("7"), path)
    remember(job("8"), path)
    assert submitted_jobs(path) == [job("7"), job("8")]
    assert find_job(path, "7") == job("7") and find_job(path, None) == job("8")


def test_a_number_that_comes_again_is_that_of_the_newest_job(tmp_path):
    path = tmp_path / "jobs.jsonl"
    remember(job("7"), path)
    newer = SubmittedJob("7", "slurm", "again", "/b.sh", "/", "again-7.out", 2.5)
    remember(newer, path)
    assert find_job(path, "7") == newer


def test_what_is_not_there_is_refused_with_what_is(tmp_path):
    path = tmp_path / "jobs.jsonl"
    with pytest.raises(ValueError, match="no job was submitted yet"):
        find_job(path, None)
    remember(job("7"), path)
    with pytest.raises(ValueError, match="job 9 was not submitted by `mpidist job`; expected one of 7"):
        find_job(path, "9")


def test_a_damaged_line_hides_no_other(tmp_path):
    path = tmp_path / "jobs.jsonl"
    remember(job("7"), path)
    path.write_text(path.read_text() + '{"job": "8"\n{"job": "9"}\n[]\n')
    remember(job("10"), path)
    assert [each.job for each in submitted_jobs(path)] == ["7", "10"]


def test_the_file_is_in_the_folder_of_the_users_state(tmp_path):
    assert record_file({"HOME": "/home/me"}).as_posix() == "/home/me/.local/state/mpidist/jobs.jsonl"
    assert record_file({"HOME": "/home/me", "XDG_STATE_HOME": "/x"}).as_posix() == "/x/mpidist/jobs.jsonl"
