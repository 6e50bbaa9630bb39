"""Scripts of `mpidist job` under a real Grid Engine of two hosts: they run, save in time, and go on after a restart."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mpidist.jobs.request import Request
from mpidist.jobs.script import fill_in
from tests.helpers.jobscripts import FOLDER, TRAINING
from tests.helpers.launch import ROOT
from tests.sge.conftest import GridEngine


@pytest.fixture
def submit(grid_engine: GridEngine, tmp_path: Path):
    """A function that submits the text of a script in a folder with the examples, and returns the job's number."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    numbers = []

    def submitted(text: str) -> str:
        (tmp_path / "job.sh").write_text(text)
        done = grid_engine.client("qsub", "-terse", "-V", "job.sh", cwd=tmp_path)
        assert done.returncode == 0, done.stderr + done.stdout
        numbers.append(done.stdout.strip())
        return numbers[-1]

    yield submitted
    for number in numbers:
        grid_engine.client("qdel", number)


def script(tmp_path: Path, **fields: object) -> str:
    """Return the script of a job of two hosts that runs the training which a restart ends."""
    (tmp_path / "program.py").write_text(TRAINING)
    asked = {"nodes": 2, "ranks_per_node": 2, "cores": 2, "name": "job", "python": sys.executable, **fields}
    return fill_in(Request("sge", str(tmp_path / "program.py"), ("{checkpoints}",), **asked), "mpidist job")


def test_the_script_of_the_folder_runs_to_its_end(grid_engine: GridEngine, submit, tmp_path: Path):
    text = (FOLDER / "sge" / "cpu.sh").read_text()
    for there, here in {
        "$HOME/venvs/mpidist/bin/python": sys.executable,
        "#$ -pe mpi 16": "#$ -pe mpi 8",
        "ranks_per_node=4": "ranks_per_node=2",
        "--epochs 60": "--epochs 2 --model mlp",
    }.items():
        assert there in text
        text = re.sub(rf"^(?!# )(.*){re.escape(there)}", lambda line, new=here: line[1] + new, text, flags=re.MULTILINE)
    number = submit(text)
    printed = grid_engine.wait_for(number, tmp_path / f"digits-cpu-{number}.out")
    assert "the ranks ended with status 0" in printed, printed
    assert len(re.findall(r"^\d+ +host[12] ", printed, re.MULTILINE)) == 4, printed
    assert re.search(r"test accuracy:? +0\.\d+", printed), printed


def test_a_job_saves_before_its_time_limit_and_goes_on_after_a_restart(grid_engine: GridEngine, submit, tmp_path: Path):
    number = submit(script(tmp_path, time=80, save_before=60, requeue=3))
    first = grid_engine.wait_for(number, tmp_path / f"job-{number}.out")
    assert "begins at 0\n" in first and "saved: the job goes back to the queue" in first, first
    (again,) = re.findall(r"^Your job (\d+) ", first, re.MULTILINE)
    second = grid_engine.wait_for(again, tmp_path / f"job-{again}.out")
    assert "restart 1" in second and re.search(r"begins at [1-9]", second), second
    assert "done: 5 True" in second and "the ranks ended with status 0" in second, second


def test_a_job_is_submitted_looked_at_and_ended_by_the_command(grid_engine: GridEngine, tmp_path: Path):
    (tmp_path / "train.py").write_text(TRAINING)

    def command(*words: str) -> str:
        home = ["env", f"HOME={tmp_path}", f"PYTHONPATH={ROOT}"]
        done = grid_engine.client(*home, sys.executable, "-m", "mpidist", "job", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    size = ["--nodes", "2", "--ranks-per-node", "2", "--cores", "2"]
    printed = command("sge", *size, "--directive=-V", "--submit", "train.py", "--", "{checkpoints}")
    (number,) = re.findall(r"as job (\d+);", printed)
    assert "begins at 0" in grid_engine.wait_for(number, tmp_path / f"train-{number}.out", "begins at 0")
    assert re.search(rf"^{number} +train +r +all.q@host[12] +train-{number}.out$", command("status"), re.MULTILINE)
    command("cancel", number)
    assert "begins at 0" in command("logs", "-f")
    assert re.search(rf"^{number} +train +ended ", command("status"), re.MULTILINE)
