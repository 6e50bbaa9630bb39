"""What may go wrong with the save of a job that is told to end, on a real Slurm: the last whole checkpoint stays."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

from mpidist.jobs.request import Request
from mpidist.jobs.script import fill_in
from tests.slurm.cluster import BatchJob, Slurm, plugin

#: Steps without an end, until the file `enough` is there; a checkpoint after the second one of the first start.  Each
#: step adds the sum of all rows of a global batch of 12, whatever the number of ranks: 1 + 2 + ... + 12.
TRAINING = """
import os, sys
from pathlib import Path
import numpy
import mpidist

folder, size, enough = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    v = mpidist.Variable(numpy.zeros(size), name="v")
rows = numpy.arange(1.0, 13.0)
batches = strategy.experimental_distribute_dataset(mpidist.data.Dataset.from_arrays(rows).batch(12))
manager = mpidist.CheckpointManager(mpidist.Checkpoint(v=v), folder)
handler = mpidist.experimental.PreemptionCheckpointHandler(None, manager)
first = handler.total_run_calls

def say(*words):
    if mpidist.rank() == 0:
        print(*words, flush=True)

say("begins at", first, "on", mpidist.size(), "ranks")
BEFORE_THE_STEPS

def add(batch):
    total = mpidist.get_replica_context().all_reduce("sum", numpy.array([batch.sum(), enough.exists()]))
    v.assign_add(numpy.full(size, total[0]))
    return total[1]

def step():
    for batch in batches:
        return strategy.run(add, args=(batch,))

while not handler.run(step):
    if handler.total_run_calls == 2:
        manager.save()
        say("saved by itself")
say("done:", set(v.value) == {78.0 * handler.total_run_calls})
"""


def script(tmp_path: Path, *arguments: str, before: str = "", **fields: object) -> str:
    """Return the script of a job of two nodes with two ranks each, whose checkpoints are in `run`."""
    program = tmp_path / "program.py"
    program.write_text(TRAINING.replace("BEFORE_THE_STEPS", before))
    asked = {"nodes": 2, "ranks_per_node": 2, "name": "job", "python": sys.executable, "mpi": plugin(), **fields}
    words = (*(arguments or ("{checkpoints}", "4")), str(tmp_path / "enough"))
    return fill_in(Request("slurm", str(program), words, scratch=str(tmp_path), **asked), "mpidist job")


def told(slurm: Slurm, job: BatchJob) -> None:
    """Tell the ranks of a job to end, as its time limit does, when it has saved by itself."""
    job.wait_for("saved by itself")
    assert slurm.client("scancel", "--batch", "--signal=USR1", job.number).returncode == 0


def checkpoints(folder: Path) -> list[str]:
    """Return the names of what was saved, whole or not."""
    return sorted(path.name for path in folder.iterdir() if "checkpoint" in path.name)


@pytest.fixture
def disk(slurm: Slurm, tmp_path: Path):
    """A file system of 1 MB on the first node, where the chief is."""
    folder = tmp_path / "disk"
    folder.mkdir()
    on_node = ["srun", "--mpi=none", "--overlap", "--nodelist=node1", "--nodes=1", "--ntasks=1"]
    mounted = slurm.client(*on_node, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    assert mounted.returncode == 0, mounted.stderr
    yield folder
    left = slurm.client(*on_node, "sh", "-c", f"ls -A {folder}; umount {folder}")
    assert left.returncode == 0, left.stderr
    assert "checkpoint-1.h5" in left.stdout and ".partial" not in left.stdout, left.stdout


def test_a_full_disk_at_the_last_save_leaves_the_checkpoint_before_it(slurm: Slurm, tmp_path: Path, disk: Path):
    text = script(tmp_path, str(disk), "100000", requeue=3)
    with slurm.submitted(text) as job:
        told(slurm, job)
        ended = job.ended()
    assert ended.returncode in (1, 128 + signal.SIGKILL), ended.stdout  # pmi2 kills ranks before they end by themselves
    assert re.search(r"the job was told to end: it saves after \d+ steps", ended.stdout)
    error = re.findall(r"^\S*CheckpointError: (.*)", ended.stdout, re.MULTILINE)[-1]
    assert f"{disk}/checkpoint-2.h5 was not saved: rank 0: [Errno 28] No space left on device" in error
    assert f"the file needs 0.8 MB, and 0.2 MB are free in {disk}" in error
    assert "goes back to the queue" not in ended.stdout  # it would only find the disk full again
    with slurm.submitted(text) as job:
        job.wait_for("begins at 2 on 4 ranks")


def test_no_time_left_for_the_save_leaves_the_checkpoint_before_it(slurm: Slurm, tmp_path: Path):
    stuck = """
if not first and mpidist.rank() == 0:
    from mpidist.training import hdf5_file
    trailer = hdf5_file.add_trailer

    def add_trailer(file, ranges):
        if v.value[0] > 2 * 78:
            say("half of it is written")
            while True:
                os.sched_yield()
        trailer(file, ranges)

    hdf5_file.add_trailer = add_trailer
"""
    text, saved = script(tmp_path, before=stuck), tmp_path / "job" / "checkpoints"
    with slurm.submitted(text) as job:
        told(slurm, job)
        job.wait_for("half of it is written")
        assert slurm.client("scancel", job.number).returncode == 0  # SIGTERM, and SIGKILL after 5 seconds
        ended = job.ended()
    assert ended.returncode != 0
    assert re.search(r"told to end: it saves after \d+ steps", ended.stdout), ended.stdout
    assert "told to end: saved" not in ended.stdout
    assert len(checkpoints(saved)) == 2 and "checkpoint-1.h5" in checkpoints(saved)  # and what was begun
    with slurm.submitted(text) as job:
        job.wait_for("begins at 2 on 4 ranks")
        (tmp_path / "enough").touch()
        assert "done: True" in job.ended().stdout


def test_a_job_goes_on_with_another_number_of_ranks_when_it_gets_other_nodes(slurm: Slurm, tmp_path: Path):
    with slurm.submitted(script(tmp_path, requeue=3, cores=2)) as job:
        job.wait_for("saved by itself")
        slurm.client("scontrol", "update", "NodeName=node2", "State=DRAIN", "Reason=test")
        try:
            told(slurm, job)
            job.wait_for("goes back to the queue")
            job.wait_until(lambda: " PENDING " in slurm.client("squeue", "--format= %T ").stdout, "wait in the queue")
            smaller = slurm.client("scontrol", "update", f"JobId={job.number}", "NumNodes=1", "NumTasks=2", "NumCPUs=4")
            assert smaller.returncode == 0, smaller.stderr
            job.wait_for(r"begins at \d+", 2)
        finally:
            slurm.client("scontrol", "update", "NodeName=node2", "State=RESUME")
        (tmp_path / "enough").touch()
        ended = job.ended()
    assert ended.returncode == 0, ended.stdout
    starts = re.findall(r"begins at (\d+) on (\d) ranks", ended.stdout)
    assert [ranks for _, ranks in starts] == ["4", "2"] and int(starts[1][0]) > 2, ended.stdout
    assert "done: True" in ended.stdout
