"""What scripts for PBS Pro, LSF, Grid Engine and Flux do when they run, with programs that note how they are called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from mpidist.jobs.request import Request
from mpidist.jobs.script import fill_in

NOTE = '#!/bin/bash\necho "{name} $*" >>"{calls}"\n'

#: Two nodes of three ranks with two cores each, in the words of each scheduler.
ENVIRONMENT = {
    "pbs": {"PBS_JOBID": "7.server", "PBS_NODEFILE": "nodes", "PBS_O_WORKDIR": "."},
    "lsf": {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "n1 6 n2 6"},
    "sge": {"JOB_ID": "7", "PE_HOSTFILE": "nodes"},
    "flux": {},
}
NODES = {"pbs": "n1\nn1\nn1\nn2\nn2\nn2\n", "sge": "n1 6 all.q@n1 UNDEFINED\nn2 6 all.q@n2 UNDEFINED\n"}

#: How each puts a job back: the exit status of the script, and what it calls.
REQUEUED = {
    "pbs": (42, "qsub -v RESTARTS=1 {folder}/job.sh"),
    "lsf": (42, None),
    "sge": (42, "qsub -v RESTARTS=1 {folder}/job.sh"),
    "flux": (42, "flux --parent batch --env=RESTARTS=1 {folder}/job.sh"),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the script of a request to its end; the file ``ranks`` has what the ranks do, in bash."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "bin").mkdir()
    for name in ("python3", "flux", "qsub"):
        starts = '[ "$1" != run ] || . ./ranks\n' if name == "flux" else ". ./ranks\n" if name == "python3" else ""
        (tmp_path / "bin" / name).write_text(NOTE.format(name=name, calls=tmp_path / "calls") + starts)
        (tmp_path / "bin" / name).chmod(0o755)

    def to_end(scheduler, ranks, **fields):
        (tmp_path / "nodes").write_text(NODES.get(scheduler, ""))
        (tmp_path / "ranks").write_text(ranks)
        (tmp_path / "calls").write_text("")
        size = {"nodes": 2, "ranks_per_node": 3, "cores": 2, "name": "digits", "requeue": 2}
        mpi = {"mpi": "pmix"} if scheduler == "flux" else {}
        asked = Request(**{"scheduler": scheduler, "script": "train.py", **size, **mpi, **fields})
        (tmp_path / "job.sh").write_text(fill_in(asked, "mpidist job"))
        environ = {name: value for name, value in os.environ.items() if name != "SCRATCH"}
        environ |= {"PATH": f"{tmp_path / 'bin'}:{environ['PATH']}", **ENVIRONMENT[scheduler]}
        # a shell cannot trap what was ignored when it was started, as INT is in what another shell has put aside
        line = ["env", "--default-signal=INT", "bash", "job.sh"]
        done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return done.returncode, done.stdout, Path("calls").read_text().splitlines()

    return to_end


@pytest.mark.parametrize("scheduler", ["pbs", "lsf", "sge"])
def test_ranks_are_started_on_the_nodes_that_the_scheduler_names(run, scheduler):
    status, printed, calls = run(scheduler, "exit 0", arguments=("--epochs", "2"))
    assert (status, calls) == (
        0,
        ["python3 -m mpidist run -n 6 --hosts n1:3,n2:3 -x OMP_NUM_THREADS train.py --epochs 2"],
    )
    assert "2 nodes (n1:3,n2:3), restart 0" in printed


def test_flux_starts_ranks_itself(run):
    status, _, calls = run("flux", "exit 3")
    assert status == 3
    assert [call for call in calls if call.startswith("flux run")] == [
        "flux run -N 2 -n 6 -c 2 -o pmi=pmix python3 train.py"
    ]


@pytest.mark.parametrize("scheduler", REQUEUED)
def test_ranks_that_have_saved_go_on_in_a_new_start(run, scheduler, tmp_path):
    expected, call = REQUEUED[scheduler]
    status, _, calls = run(scheduler, "exit 42")
    assert status == expected
    folder = "./digits" if scheduler == "pbs" else str(tmp_path / "digits")
    assert [each for each in calls if each.startswith(("qsub", "flux --parent"))] == (
        [call.format(folder=folder)] if call else []
    )


def test_restarts_have_a_limit_where_the_exit_status_requeues(run):
    save = "touch digits/checkpoints/$RANDOM; exit 42"
    assert [run("lsf", save, requeue=1)[0] for _ in range(2)] == [42, 1]


@pytest.mark.parametrize("scheduler", ["pbs", "lsf", "sge"])
def test_a_timer_tells_the_ranks_before_the_time_limit(run, scheduler):
    """One second after the start; the ranks would go on for a minute."""
    ranks = "trap 'exit 42' USR1; for _ in {1..600}; do sleep 0.1; done"
    status, printed, _ = run(scheduler, ranks, time=61, save_before=60)
    assert status == REQUEUED[scheduler][0] and "USR1: the ranks are told to save" in printed


@pytest.mark.parametrize(
    "scheduler, signals", [("pbs", "TERM"), ("lsf", "INT TERM"), ("sge", "TERM"), ("flux", "TERM")]
)
def test_a_job_that_is_ended_from_outside_waits_for_its_ranks_and_does_not_go_back(run, scheduler, signals):
    for signal in signals.split():
        status, printed, calls = run(scheduler, f"kill -{signal} $PPID; sleep 0.2; exit 42")
        assert f"{' or '.join(signals.split())}: the job is ended from outside" in printed
        assert "the ranks ended with status 42" in printed and "back to the queue" not in printed
        assert status == (1 if scheduler == "lsf" else 42)  # of a 42 LSF would requeue
        assert len(calls) == 1 + (scheduler == "flux"), calls


@pytest.mark.parametrize(
    "scheduler, fields, message",
    [
        ("lsf", {"memory": 1024}, "--memory: its unit is the site's"),
        ("sge", {"gpus_per_node": 2}, "--gpus-per-node: the resource's name is the site's"),
        ("pbs", {"servers": 1}, "--servers: scripts for Slurm only have it"),
        ("flux", {"gpus_per_node": 2}, "expected one for each, got 2 GPUs and 3 ranks a node"),
    ],
)
def test_what_a_scheduler_does_not_have_is_refused_with_what_to_do(run, scheduler, fields, message):
    with pytest.raises(ValueError) as refused:
        run(scheduler, "exit 0", **fields)
    assert message in str(refused.value) and "expected" in str(refused.value)
