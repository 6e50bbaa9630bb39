"""What a script for Slurm does when it runs: bash, with a ``srun`` and a ``scontrol`` that note how they are called."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mpidist.jobs.request import Request
from mpidist.jobs.script import fill_in

#: A step of `true` asks a node, and fails where the file ``lost`` has its name.
SRUN = """#!/bin/bash
if [ "${!#}" = true ]; then
    node=$(grep -o "nodelist=[^ ]*" <<<"$*")
    echo "asked ${node#*=}" >>calls
    ! grep -qx "${node#*=}" lost
    exit
fi
echo "srun $*" >>calls
echo "threads $OMP_NUM_THREADS" >>calls
. ./ranks
"""

SCONTROL = """#!/bin/bash
[ "$*" != "show hostnames node[1-2]" ] || { printf 'node1\\nnode2\\n'; exit; }
echo "scontrol $*" >>calls
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Run the script of a request; the file ``ranks`` has what the ranks do, in bash, ``lost`` the nodes that are."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "bin").mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)

    def start(ranks, restart=0, lost=(), **fields):
        (tmp_path / "lost").write_text("".join(f"{node}\n" for node in lost))
        (tmp_path / "ranks").write_text(ranks)
        (tmp_path / "calls").write_text("")
        asked = Request(**{"scheduler": "slurm", "script": "train.py", "name": "digits", "mpi": "pmix", **fields})
        (tmp_path / "job.sh").write_text(fill_in(asked, "mpidist job"))
        slurm = {"JOB_ID": "7", "JOB_NAME": "digits", "JOB_NUM_NODES": "2", "JOB_NODELIST": "node[1-2]"}
        slurm |= {"NTASKS_PER_NODE": "4", "CPUS_PER_TASK": "3", "RESTART_COUNT": str(restart)}
        environ = {name: value for name, value in os.environ.items() if name != "SCRATCH"}
        environ |= {f"SLURM_{name}": value for name, value in slurm.items()} | {"SLURMD_NODENAME": "node1"}
        environ["PATH"] = f"{tmp_path / 'bin'}:{environ['PATH']}"
        return subprocess.Popen(["bash", "job.sh"], env=environ, stdout=subprocess.PIPE, text=True)

    return start


def ended(process):
    """Return the exit status, what was printed, and the calls."""
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed, Path("calls").read_text().splitlines()


def requeued(calls):
    return "scontrol requeue 7" in calls


def test_the_step_gets_the_numbers_of_the_job(job):
    status, printed, calls = ended(job("exit 0", arguments=("--out", "{checkpoints}/x", "a b")))
    assert status == 0 and "job 7, 2 nodes (node[1-2]), restart 0" in printed
    folder = Path.cwd() / "digits" / "checkpoints"
    options = "--mpi=pmix --ntasks-per-node=4 --cpus-per-task=3 --kill-on-bad-exit=1"
    assert calls == [f"srun {options} python3 train.py --out {folder}/x a b", "threads 3"]
    assert folder.is_dir()


@pytest.mark.parametrize("save_before", [0, 120])
def test_the_status_of_the_ranks_is_that_of_the_job(job, save_before):
    assert ended(job("exit 3", save_before=save_before))[0] == 3


def test_ranks_that_have_saved_go_back_to_the_queue(job):
    assert requeued(ended(job("exit 42", requeue=2))[2])
    assert not requeued(ended(job("exit 0", requeue=2))[2])
    assert not requeued(ended(job("exit 1", requeue=2))[2])


def test_the_marker_beside_the_checkpoints_counts_where_the_status_is_hidden(job):
    status, _, calls = ended(job("touch digits/checkpoints/requeue; exit 143", requeue=2))
    assert (status, requeued(calls)) == (143, True)
    assert not requeued(ended(job("exit 143", restart=1, requeue=2))[2])  # that of the start before does not


def test_restarts_have_a_limit(job):
    save = "touch digits/checkpoints/a; exit 42"
    assert requeued(ended(job(save, restart=1, requeue=2))[2])
    _, printed, calls = ended(job(save, restart=2, requeue=2))
    assert not requeued(calls) and "saved, after 2 restarts, which is the limit" in printed


def test_a_job_that_has_lost_a_node_goes_back_to_the_queue_up_to_the_limit(job):
    status, printed, calls = ended(job("exit 14", requeue=2, lost=("node2",)))
    assert (status, requeued(calls)) == (14, True)
    assert " node2 does not answer: the job goes back to the queue\n" in printed
    (Path.cwd() / "digits" / "checkpoints" / "checkpoint").touch()
    _, printed, calls = ended(job("exit 14", restart=2, requeue=2, lost=("node2",)))
    assert not requeued(calls) and "node2 does not answer, after 2 restarts, which is the limit" in printed


@pytest.mark.parametrize(
    "ranks, lost, asked",
    [
        ("exit 1", (), ["node1", "node1", "node2"]),  # a fault of the program
        ("exit 1", ("node1", "node2"), ["node1"]),  # no step can start, though the script's own node is there
        ("exit 0", ("node2",), []),
    ],
    ids=["all answer", "no step starts", "well"],
)
def test_where_no_node_is_lost_the_status_is_the_end(job, ranks, lost, asked):
    status, printed, calls = ended(job(ranks, requeue=2, lost=lost))
    assert (f"exit {status}", requeued(calls)) == (ranks, False) and "does not answer" not in printed
    assert [call for call in calls if call.startswith("asked")] == [f"asked {node}" for node in asked]


def test_without_a_requeue_it_is_said_how_to_go_on(job):
    status, printed, calls = ended(job("exit 42"))
    assert (status, requeued(calls)) == (42, False) and "saved: submit the script again to go on" in printed


@pytest.mark.parametrize("ranks, lost", [("exit 42", ()), ("exit 14", ("node2",))], ids=["saved", "lost"])
def test_a_job_whose_last_three_starts_saved_nothing_stops(job, ranks, lost):
    for restart in range(3):
        assert requeued(ended(job(ranks, restart=restart, requeue=10, lost=lost))[2])
    status, printed, calls = ended(job(ranks, restart=3, requeue=10, lost=lost))
    assert (status, calls) == (1, []) and "the last 3 starts have saved nothing" in printed


def test_a_save_is_progress(job):
    for restart in range(5):
        save = f"sleep 0.02; touch digits/checkpoints/checkpoint-{restart}; exit 42" if restart == 2 else "exit 42"
        assert requeued(ended(job(save, restart=restart, requeue=10))[2])
    assert ended(job("exit 42", restart=6, requeue=10))[0] == 42


def started(process):
    """Wait until the ranks run."""
    deadline = time.monotonic() + 60
    while not Path("running").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return process


RANKS = "trap 'echo got >>calls; exit 42' {}; echo $$ >pid; mv pid running; while :; do sleep 0.05; done"


def test_a_signal_before_the_time_limit_reaches_the_ranks_and_their_status_is_waited_for(job):
    process = started(job(RANKS.format("USR1"), requeue=2))
    process.send_signal(signal.SIGUSR1)
    status, printed, calls = ended(process)
    assert (status, calls[-2:]) == (42, ["got", "scontrol requeue 7"]) and "USR1: the ranks are told to save" in printed


@pytest.mark.parametrize("ends_with, lost", [(42, ()), (14, ("node2",))], ids=["saved", "lost"])
def test_a_job_that_is_ended_from_outside_waits_for_its_ranks_and_stays_out_of_the_queue(job, ends_with, lost):
    ranks = RANKS.format("USR2").replace("42", str(ends_with))
    process = started(job(ranks, requeue=2, lost=lost))
    process.send_signal(signal.SIGTERM)
    assert any("TERM: the job is ended from outside" in line for line in iter(process.stdout.readline, ""))
    os.kill(int(Path("running").read_text()), signal.SIGUSR2)
    status, _, calls = ended(process)
    assert (status, calls[-1]) == (ends_with, "got")
