"""The scripts of `jobscripts/slurm`, submitted to a real Slurm; and jobs that save, go back to the queue and go on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mpidist.jobs.request import Request
from mpidist.jobs.script import fill_in
from tests.helpers.jobscripts import FOLDER, TRAINING
from tests.helpers.launch import ROOT
from tests.slurm.cluster import Slurm, plugin

#: Seconds within which a job of this file has ended, its restarts included.
LIMIT_SECONDS = 300

#: Scripts that this Slurm cannot run to their end: GPUs are only counted here, and there are no containers.
CHECKED = {"gpu.sh", "gpu-nodes.sh", "apptainer.sh", "pyxis.sh"}
RUN = {path.name for path in FOLDER.glob("slurm/*.sh")} - CHECKED


@pytest.fixture
def job(slurm: Slurm, tmp_path: Path):
    """A function that submits a text in a folder with the examples; it returns the job's number and its folder."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    numbers = []

    def submit(text: str) -> str:
        (tmp_path / "job.sh").write_text(text)
        environ = {name: value for name, value in slurm.environ().items() if name != "SCRATCH"}
        line = ["sbatch", "--parsable", "job.sh"]
        done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        numbers.append(done.stdout.strip())
        return numbers[-1]

    yield submit
    for number in numbers:
        client(slurm, "scancel", number)


def client(slurm: Slurm, *words: str) -> subprocess.CompletedProcess[str]:
    """Run one of Slurm's own programs to its end."""
    return subprocess.run(words, env=slurm.environ(), capture_output=True, text=True, timeout=60)


def states(slurm: Slurm, number: str) -> set[str]:
    """Return the states of a job's parts, with their exit codes."""
    shown = client(slurm, "scontrol", "--oneliner", "show", "job", number).stdout
    return {f"{state} {code}" for state, code in re.findall(r"JobState=(\w+).*?ExitCode=(\d+:\d+)", shown)}


def waited_for(slurm: Slurm, number: str, folder: Path, text: str = "") -> str:
    """Wait until a job has printed a text, or until all its parts have ended; return all that it has printed."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        alive = {state.split()[0] for state in states(slurm, number)} & {"PENDING", "RUNNING", "COMPLETING", "REQUEUED"}
        printed = "".join(path.read_text() for path in sorted(folder.glob("*.out")))
        if (text and text in printed) or not alive:
            return printed
        assert time.monotonic() < deadline, printed
        time.sleep(0.1)


def fitted(name: str) -> str:
    """Return a script for this interpreter and its MPI, with a training of a few seconds."""
    text = (FOLDER / "slurm" / name).read_text()
    for there, here in {
        "$HOME/venvs/mpidist/bin/python": sys.executable,
        "--mpi=pmix": f"--mpi={plugin()}",
        "--epochs 60": "--epochs 2 --model mlp",
        "parameter_server.py": "parameter_server.py --epochs 2",
    }.items():
        text = re.sub(
            rf"^(?!#)(.*){re.escape(there)}", lambda line, here=here: line[1] + here, text, flags=re.MULTILINE
        )
    return text


@pytest.mark.parametrize("name", sorted(RUN))
def test_a_script_runs_to_its_end(slurm: Slurm, job, tmp_path: Path, name: str):
    number = job(fitted(name))
    printed = waited_for(slurm, number, tmp_path)
    assert states(slurm, number) == {"COMPLETED 0:0"}, printed
    tasks = 4 if name == "array.sh" else 1
    accuracies = re.findall(r"test accuracy:? +(\d\.\d+)", printed)
    assert len(accuracies) == len(re.findall("the ranks ended with status 0", printed)) == tasks, printed
    assert len([*tmp_path.glob("*.out")]) == tasks
    if name in ("cpu.sh", "requeue.sh"):
        assert len(re.findall(r"^\d+ +node[12] ", printed, re.MULTILINE)) == 4, printed
    if name == "servers.sh":
        assert re.search(r"ranks 2-3 +ps 0-1 +node2", printed), printed


def test_every_script_is_run_or_checked():
    assert CHECKED < {path.name for path in FOLDER.glob("slurm/*.sh")} and len(RUN) >= 4


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_slurm_takes_a_script_that_cannot_run_here(slurm: Slurm, tmp_path: Path, name: str):
    text = fitted(name)
    if name == "pyxis.sh":
        assert "    --container-image " in text and "#SBATCH --container" not in text  # options of the step, not here
    (tmp_path / "job.sh").write_text(text)
    smaller = ["--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=2", "--gpus-per-node=2"]
    done = client(slurm, "sbatch", "--test-only", *smaller, str(tmp_path / "job.sh"))
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


def script(tmp_path: Path, arguments: tuple[str, ...], text: str, **fields: object) -> str:
    """Return the script of a job of two nodes that runs a program."""
    program = tmp_path / "program.py"
    program.write_text(text)
    asked = {"nodes": 2, "ranks_per_node": 2, "name": "job", "python": sys.executable, "mpi": plugin(), **fields}
    return fill_in(Request("slurm", str(program), arguments, **asked), "mpidist job")


def test_a_job_that_is_told_before_its_time_limit_saves_and_goes_on_after_a_restart(slurm: Slurm, job, tmp_path: Path):
    number = job(script(tmp_path, ("{checkpoints}",), TRAINING, requeue=3))
    assert "begins at 0" in waited_for(slurm, number, tmp_path, "begins at 0")
    client(slurm, "scancel", "--batch", "--signal=USR1", number)  # as Slurm does before the limit
    printed = waited_for(slurm, number, tmp_path)
    assert states(slurm, number) == {"COMPLETED 0:0"}, printed
    starts = [int(first) for first in re.findall(r"begins at (\d+)", printed)]
    assert len(starts) == 2 and starts[1] > 0, printed
    assert "done: 5 True" in printed and "restart 1" in printed


@pytest.mark.brief
def test_a_job_that_is_preempted_saves_and_goes_on_when_its_nodes_are_free_again(slurm: Slurm, job, tmp_path: Path):
    number = job(script(tmp_path, ("{checkpoints}",), TRAINING, requeue=3, directives=("--exclusive",)))
    waited_for(slurm, number, tmp_path, "begins at 0")
    urgent = job("#!/bin/bash\n#SBATCH --partition=urgent --nodes=2 --exclusive --output=/dev/null\ntrue\n")
    printed = waited_for(slurm, number, tmp_path)
    assert states(slurm, urgent) == states(slurm, number) == {"COMPLETED 0:0"}, printed
    starts = [int(first) for first in re.findall(r"begins at (\d+)", printed)]
    assert len(starts) == 2 and starts[1] > 0 and "done: 5 True" in printed, printed


def test_a_job_that_is_cancelled_does_not_go_back(slurm: Slurm, job, tmp_path: Path):
    number = job(script(tmp_path, ("{checkpoints}",), TRAINING, requeue=3))
    waited_for(slurm, number, tmp_path, "begins at 0")
    client(slurm, "scancel", number)
    printed = waited_for(slurm, number, tmp_path)
    assert {state.split()[0] for state in states(slurm, number)} == {"CANCELLED"}, printed


@pytest.mark.brief
def test_a_job_is_submitted_looked_at_and_ended_by_the_command(slurm: Slurm, tmp_path: Path):
    environ = {**slurm.environ(), "HOME": str(tmp_path)}
    environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *environ.get("PYTHONPATH", "").split(os.pathsep)])
    (tmp_path / "train.py").write_text(TRAINING)

    def command(*words: str) -> str:
        line = [sys.executable, "-m", "mpidist", "job", *words]
        done = subprocess.run(line, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS)
        assert done.returncode == 0, done.stderr
        return done.stdout

    printed = command("slurm", "--nodes", "2", "--submit", "train.py", "--", "{checkpoints}")
    (number,) = re.findall(r"as job (\d+);", printed)
    waited_for(slurm, number, tmp_path, "begins at 0")
    assert re.search(
        rf"^{number} +train +running +\S+ node\[1-2\] +train-{number}.out$", command("status"), re.MULTILINE
    )
    command("cancel", number)
    assert "begins at 0" in command("logs", "-f")
    assert re.search(rf"^{number} +train +cancelled ", command("status"), re.MULTILINE)
