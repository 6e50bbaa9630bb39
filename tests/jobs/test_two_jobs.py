"""Two real processes that save into one directory: one succeeds, the other is told who it is; and the dead give way."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

SAVES = """
import sys
import numpy
import mpidist

folder, first, saves = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
w = mpidist.Variable(numpy.zeros(50_000), name="w")
checkpoint = mpidist.Checkpoint(w=w)
manager = mpidist.CheckpointManager(checkpoint, folder)
print("ready", flush=True)
sys.stdin.readline()
for number in range(saves):
    w.assign(numpy.full(50_000, first + number))
    try:
        path = manager.save()
    except mpidist.errors.CheckpointError as error:
        print("refused", str(error), flush=True)
        continue
    checkpoint.restore(path)  # whole, and its own
    print("saved", "own" if (w.value == first + number).all() else "ANOTHER'S", path.name, flush=True)
sys.stdin.readline()
"""


def started(folder, first, saves=40):
    command = [sys.executable, "-c", SAVES, str(folder), str(first), str(saves)]
    job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert job.stdout.readline() == "ready\n", job.communicate()[1]
    job.stdin.write("go\n")
    job.stdin.flush()
    return job


def lines_of(job, count):
    return [job.stdout.readline().strip() for _ in range(count)]


def test_one_of_two_jobs_saves_and_the_other_is_told_of_it(tmp_path):
    jobs = [started(tmp_path, 1000), started(tmp_path, 2000)]
    told = [lines_of(job, 40) for job in jobs]
    for job in jobs:
        _, errors = job.communicate("end\n", timeout=60)
        assert job.returncode == 0, errors
    winner = next(number for number, lines in enumerate(told) if all(line.startswith("saved own") for line in lines))
    for line in told[1 - winner]:
        assert re.match(rf"refused .*another job .*process {jobs[winner].pid} on .*Give every job a directory", line), (
            line
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{number}.h5" for number in (38, 39, 40)]


def test_a_job_goes_on_after_one_that_was_killed(tmp_path):
    first = started(tmp_path, 1000, 5)
    assert [line.split()[:2] for line in lines_of(first, 5)] == [["saved", "own"]] * 5
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert (tmp_path / ".owner").exists()
    second = started(tmp_path, 2000, 1)
    assert lines_of(second, 1) == ["saved own checkpoint-6.h5"]
    _, errors = second.communicate("end\n", timeout=60)
    assert (second.returncode, (tmp_path / ".owner").exists()) == (0, False), errors
