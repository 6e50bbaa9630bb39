"""The life of a job under a real Slurm: it is told to end, saves, is queued again, and goes on where it was."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from mpidist.jobs.request import Request
from mpidist.jobs.script import fill_in
from tests.helpers.grid import grid
from tests.helpers.launch import ROOT
from tests.slurm.cluster import Slurm, plugin

#: How often ranks leave that all end as quickly as they can: one of them is the last.
RUNS = 3

STEPS = """
import os, signal, sys
import numpy
import mpidist

strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.extended.replica_id
with strategy.scope():
    v = mpidist.Variable(numpy.zeros(3), name="v")
held = [[number] for number in range(int(sys.argv[2]) if rank else 0)]  # which takes time to free, after the end of MPI
handler = mpidist.experimental.PreemptionCheckpointHandler(None, mpidist.Checkpoint(v=v), sys.argv[1])

def step():
    if handler.total_run_calls == 4 and rank == 2:
        os.kill(os.getpid(), signal.SIGUSR1)
    v.assign_add(strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", numpy.ones(3))))

while handler.total_run_calls < 100:
    handler.run(step)
"""


@pytest.mark.parametrize("number", [*range(RUNS), "ranks that take long to end"])
def test_ranks_that_leave_together_keep_their_status(slurm: Slurm, tmp_path: Path, number: int | str):
    """Slurm ends ranks by SIGTERM as soon as one has left with a status that is not 0."""
    script = tmp_path / "script.py"
    script.write_text(STEPS)
    options = ["--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1"]
    held = "1000000" if isinstance(number, str) else "0"
    result = slurm.srun(sys.executable, str(script), str(tmp_path / "run"), held, options=options)
    assert result.returncode == 42, result.stderr
    assert result.stderr.count("the job was told to end: saved after 6 steps; it exits") == 1
    assert (tmp_path / "run" / "requeue").read_text() == "saved after 6 steps\n"


def _documented(checkpoints: Path, *arguments: str, restarts: int = 20) -> str:
    """Return the batch script of the documentation, for this cluster and these arguments of the example."""
    text = (ROOT / "docs" / "slurm.md").read_text()
    script = re.search(r"^```bash\n(#!/bin/bash\n.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert script
    changes = {
        r"--ntasks-per-node=4 ": "--ntasks-per-node=2 ",
        r"--cpus-per-task=4 ": "--cpus-per-task=2 ",
        r"source .*": "",
        r"--mpi=pmix": f"--mpi={plugin()}",
        r"checkpoints=.*": f"checkpoints={checkpoints}",
        r"restarts=20": f"restarts={restarts}",
        r"python train.py --epochs 60": f"{sys.executable} {ROOT}/examples/train.py {' '.join(arguments)}",
    }
    found = script[1]
    for before, after in changes.items():
        found, count = re.subn(before, after, found, count=1)
        assert count == 1, before
    return found


@pytest.mark.parametrize("by", grid(["a signal"], ["scontrol requeue"]))
def test_the_documented_script_is_queued_again_and_goes_on_with_the_same_bits(slurm: Slurm, tmp_path: Path, by: str):
    arguments = ["--model", "mlp", "--epochs", "60", "--save-parameters"]
    whole = slurm.sbatch(_documented(tmp_path / "whole", *arguments, str(tmp_path / "whole.npz")))
    assert whole.returncode == 0, whole.stdout
    with slurm.submitted(_documented(tmp_path / "run", *arguments, str(tmp_path / "run.npz"))) as job:
        job.wait_for(r"epoch 2/60")
        tell = {"a signal": ["scancel", "--signal=USR1"], "scontrol requeue": ["scontrol", "requeue"]}[by]
        assert slurm.client(*tell, job.number).returncode == 0
        result = job.ended()
    assert result.returncode == 0, result.stdout
    saved = re.search(r"the job was told to end: saved after (\d+) steps; it exits", result.stdout)
    assert saved and f"resumed from {tmp_path}/run/checkpoint-{saved[1]}.h5" in result.stdout
    assert not (tmp_path / "run" / "requeue").exists()
    expected, found = numpy.load(tmp_path / "whole.npz"), numpy.load(tmp_path / "run.npz")
    assert expected.files and sorted(found) == sorted(expected)
    for name in expected:
        numpy.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def test_the_documented_script_is_not_queued_again_for_ever(slurm: Slurm, tmp_path: Path):
    with slurm.submitted(_documented(tmp_path, "--model mlp --epochs 100000", restarts=1)) as job:
        for start in (1, 2):
            job.wait_for("global batch 128 rows", start)
            job.wait_for(r"epoch \d+/100000  ", job.printed.count("/100000  ") + 1)
            assert slurm.client("scancel", "--signal=USR1", job.number).returncode == 0
            job.wait_for("told to end: saved after", start)
        result = job.ended()
    assert result.returncode == 42, result.stdout
    assert result.stdout.count("\nqueued again: it has saved\n") == 1
    assert "\nnot queued again, after 1 times: it has saved\n" in result.stdout
    assert (tmp_path / "requeue").exists()


def _printed(folder: Path, *arguments: str) -> str:
    """Return the batch script of `mpidist job --requeue`, for this cluster and these arguments of the example."""
    example = str(ROOT / "examples" / "train.py")
    words = (*arguments, "--checkpoint", "{checkpoints}", "--resume")
    size = {"nodes": 2, "ranks_per_node": 2, "cores": 2, "requeue": 20}
    asked = Request("slurm", example, words, python=sys.executable, mpi=plugin(), scratch=str(folder), **size)
    return fill_in(asked, "mpidist job")


@pytest.mark.parametrize(
    "script, said",
    [
        (_documented, "queued again: node2 does not answer"),
        (_printed, ".* node2 does not answer: the job goes back to the queue"),
    ],
    ids=["the page's script", "mpidist job --requeue"],
)
def test_a_lost_node_is_named_and_the_job_goes_on_when_it_is_back(
    slurm: Slurm, tmp_path: Path, script: Callable[..., str], said: str
):
    """By the script, or by Slurm, if that sees the loss first: ranks of MPICH that are left wait until then."""
    with slurm.submitted(script(tmp_path, "--model", "mlp", "--epochs", "80")) as job:
        try:
            job.wait_for(r"epoch 2/80")
            slurm.crash("node2")
            job.wait_for(rf"\n({said}|srun: error: Node failure on node2)")
        finally:
            slurm.repair("node2")
        result = job.ended()
    assert result.returncode == 0, result.stdout
    assert re.search(r"resumed from \S+/checkpoint-\d+\.h5\n", result.stdout)
