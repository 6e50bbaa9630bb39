"""Jobs that end in the middle of a segment, on every way through memory; and machines that forbid one of the ways."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

from tests.jobs import JobResult, run_job

#: Seconds within which a job must have ended, its start included; the deadline of its calls is far behind that.
LIMIT_SECONDS, DEADLINE_SECONDS = 40, 600

START = """
import os, signal, sys
import numpy
import mpidist
from mpidist.collectives import bucket_reduction, direct_sum, pieces, remote_sum
from mpidist.collectives.communicator import Communicator
from mpidist.fusion import update
from mpidist.fusion.pipeline import FusedAllReduce

communicator = Communicator.world()
rank, size = communicator.rank, communicator.size
update.LEAST_BYTES = 1

def say(line):
    os.write(1, f"{line}\\n".encode())  # in one piece: launchers mix what ranks write in several

def end():
    say(f"rank {rank} ends in the middle")
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "raise":
        raise ValueError("boom")
    raise KeyboardInterrupt

class Armed:
    left = None

    def __call__(self):
        if Armed.left is not None and rank == size - 1:
            Armed.left -= 1
            if Armed.left < 0:
                end()

armed = Armed()
"""

#: By name: what is run before and with the end armed, how many ranks and nodes there are, and where the end comes: in
#: the third copy of a segment, reading of another rank's memory, or slice of an update.
IN_COPY = """
whole = pieces.Pieces.gather
def gather(self, *args):
    armed()
    return whole(self, *args)
pieces.Pieces.gather = gather
"""
IN_READ = """
whole = remote_sum.RemoteSum._fetch
def fetch(self, *args):
    armed()
    return whole(self, *args)
remote_sum.RemoteSum._fetch = fetch
"""
IN_UPDATE = """
class SGD(mpidist.optimizers.SGD):
    def update_slice(self, *args):
        armed()
        return super().update_slice(*args)
"""
ALL_REDUCE = """
fused = FusedAllReduce(communicator, algorithm=ALGORITHM)
def step():
    fused([numpy.ones(1_500_000, "f4"), numpy.ones(7, "f4")])
"""
BUFFERS = """
from mpidist.fusion.gradient_buffers import GradientBuffers
from mpidist.collectives import shared_sum
buffers = GradientBuffers(communicator, [("", numpy.dtype("f4"), (1_500_000,))])
whole = shared_sum.reduction
def reduction(op, namespace):
    add = whole(op, namespace)
    def combine(*args, **kwargs):
        armed()
        return add(*args, **kwargs)
    return combine
shared_sum.reduction = reduction
def step():
    buffers.all_reduce("sum", None)
"""
APPLY = """
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    v = mpidist.Variable(numpy.zeros(1_500_000, "f4"))
    optimizer = SGD(0.1)
def step():
    strategy.run(optimizer.apply_gradients, args=([(numpy.ones(1_500_000, "f4"), v)],))
"""
WAYS = {
    "segments": (3, 1, IN_COPY + ALL_REDUCE, "shared_memory"),
    "sum of two": (2, 1, IN_COPY + ALL_REDUCE, "shared_memory"),
    "reading": (3, 1, IN_READ + ALL_REDUCE, "remote_read"),
    "two levels": (4, 2, IN_COPY + ALL_REDUCE, "two_level"),
    "buffers": (3, 1, BUFFERS, "auto"),
    "update": (3, 1, IN_UPDATE + APPLY, "shared_memory"),
    "update by reading": (2, 1, IN_UPDATE + APPLY, "remote_read"),
    "update on two nodes": (4, 2, IN_UPDATE + APPLY, "two_level"),
}

RUN = """
step()
step()
Armed.left = 2
try:
    for _ in range(3):
        step()
except mpidist.errors.TransportError as error:
    say(f"rank {rank} got {type(error).__name__}: {error}")
    if "optimizer" in globals():
        try:
            v.value
        except mpidist.errors.TornVariableError:
            say(f"rank {rank} knows that the variable is torn")
    raise
say(f"rank {rank} came to the end")
"""


def _run(name: str, how: str, **env: str) -> JobResult:
    ranks, nodes, body, algorithm = WAYS[name]
    script = f"HOW, ALGORITHM = {how!r}, {algorithm!r}\n" + START + body + RUN
    before = _ours()
    with tempfile.TemporaryDirectory() as folder:
        env = {
            "MPIDIST_VIRTUAL_NODES": str(nodes),
            "MPIDIST_ALGORITHM": algorithm,
            "MPIDIST_TIMEOUT_SECONDS": str(DEADLINE_SECONDS),
            "TMPDIR": folder,
            **env,
        }
        result = run_job(ranks, script, timeout_seconds=LIMIT_SECONDS, env=env)
        assert not list(Path(folder).glob("mpidist*")), "temporary files were left behind"
    assert _ours() <= before, "shared memory was left behind"
    return result


def _ours() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("mpidist*")}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("how", ["kill", "raise", "interrupt"])
def test_a_rank_that_ends_in_the_middle_ends_the_job_long_before_the_deadline(name: str, how: str):
    result = _run(name, how)
    bad = WAYS[name][0] - 1
    assert result.returncode != 0
    assert f"rank {bad} ends in the middle\n" in result.stdout, result.stdout + result.stderr
    assert "came to the end" not in result.stdout
    said = [line for line in result.stdout.splitlines() if " got " in line]
    # where the launcher left the others time to say it, they named it
    assert all(re.search(rf"RankFailedError: rank \d of \d: .*\brank {bad} \(", line) for line in said), said
    if how == "kill":  # MPICH's launcher kills the others at once and names the process
        assert said or re.search(rf"rank {bad}\b.*(died|exited on)|Killed \(signal 9\)", result.stderr + result.stdout)
    else:
        cause = "ValueError: boom" if how == "raise" else "KeyboardInterrupt"
        assert cause in result.stderr, result.stderr
        if WAYS[name][1] == 1:
            assert len(said) == bad, result.stdout + result.stderr
            torn = [line for line in result.stdout.splitlines() if "torn" in line]
            assert len(torn) == (len(said) if name.startswith("update") else 0)
