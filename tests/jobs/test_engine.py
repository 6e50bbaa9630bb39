"""Jobs that end in the middle of a segment, on every way through memory; and machines that forbid one of the ways."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.grid import grid
from tests.jobs import ROOT, JobResult, no_shared_memory_left, run_command, run_job
from tests.jobs.test_failures import NAMED_FILES

#: Seconds within which a job must have ended, its start included; the deadline of its calls is far behind that.
LIMIT_SECONDS, DEADLINE_SECONDS = 300, 1800

START = """
import os, signal, sys
import numpy
import mpidist
from mpidist.collectives.ways import bucket_reduction, pieces
from mpidist.world import world_communicator
from mpidist.collectives.reductions import update
from mpidist.collectives.engine import Engine

communicator = world_communicator()
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
#: the third copy of a segment, or slice of an update.
IN_COPY = """
whole = pieces.Pieces.gather
def gather(self, *args):
    armed()
    return whole(self, *args)
pieces.Pieces.gather = gather
"""
IN_UPDATE = """
class SGD(mpidist.optimizers.SGD):
    def update_slice(self, *args):
        armed()
        return super().update_slice(*args)
"""
ALL_REDUCE = """
fused = Engine(communicator, algorithm=ALGORITHM)
def step():
    fused([numpy.ones(1_500_000, "f4"), numpy.ones(7, "f4")])
"""
BUFFERS = """
from mpidist.collectives.reductions.gradient_buffers import GradientBuffers
from mpidist.collectives.ways import shared_sum
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
    buffers.reduced("sum", None)
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
    "two levels": (4, 2, IN_COPY + ALL_REDUCE, "two_level"),
    "buffers": (3, 1, BUFFERS, "auto"),
    "update": (3, 1, IN_UPDATE + APPLY, "shared_memory"),
    "update on two nodes": (4, 2, IN_UPDATE + APPLY, "two_level"),
}

RUN = """
step()
step()
with open("/proc/self/maps") as maps:
    shared = [line for line in maps if "mpidist" in line and "(deleted)" in line]
    say(f"rank {rank} shares memory {'with' if any('/mpidist-' in line for line in shared) else 'without'} a name")
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
    # Memory without a name goes with the last process, and `run_job` looks for those; a file with one would stay.
    files = NAMED_FILES if how == "kill" else ""
    script = f"HOW, ALGORITHM = {how!r}, {algorithm!r}\n" + files + START + body + RUN
    with no_shared_memory_left(), tempfile.TemporaryDirectory() as folder:
        env = {
            "MPIDIST_VIRTUAL_NODES": str(nodes),
            "MPIDIST_ALGORITHM": algorithm,
            "MPIDIST_TIMEOUT_SECONDS": str(DEADLINE_SECONDS),
            "TMPDIR": folder,
            **env,
        }
        result = run_job(ranks, script, timeout_seconds=LIMIT_SECONDS, env=env)
        assert not list(Path(folder).glob("mpidist*")), "temporary files were left behind"
    kinds = re.findall(r"shares memory (\w+) a name", result.stdout)
    assert kinds == ["with" if files else "without"] * ranks, result.stdout + result.stderr
    return result


#: Every way, and every end; with EVERY_GRID, as `make test-all` sets it, every end on every way.
ENDS = [
    (name, how)
    for number, name in enumerate(WAYS)
    for how in ("kill", "raise", "interrupt")
    if how == "kill" or number == 0 or os.environ.get("EVERY_GRID")
]


@pytest.mark.parametrize(("name", "how"), ENDS)
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


#: Ranks and nodes: uneven ones, and with EVERY_GRID, as `make test-all` sets it, others.
GRIDS = grid([(3, 2)], [(2, 2), (4, 2), (5, 3)])


@pytest.mark.parametrize(("ranks", "nodes"), GRIDS)
def test_the_grid_of_the_engine_on_several_nodes(ranks: int, nodes: int):
    command = [sys.executable, "-m", "pytest", "-q", "tests/parallel/test_engine.py", "--with-mpi", "--color=no"]
    env = {"MPIDIST_VIRTUAL_NODES": str(nodes)}
    result = run_command(ranks, [*command, f"--rootdir={ROOT}", f"--confcutdir={ROOT}"], 600, env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"\n\d+ passed", result.stdout) and "skipped" not in result.stdout


VALUES = """
for step in range(3):
    for count in (1, 1001, 700_001):
        values = fused([numpy.full(count, rank + step, dtype) for dtype in ("f4", "f8", "f2", "i4")])
        total = step * size + size * (size - 1) // 2
        assert all((each == total).all() for each in values), (step, count)
fused_for_update = mpidist.MultiWorkerMirroredStrategy()
with fused_for_update.scope():
    v = mpidist.Variable(numpy.zeros(700_001, "f4"))
    optimizer = mpidist.optimizers.SGD(1.0)
fused_for_update.run(optimizer.apply_gradients, args=([(numpy.full(700_001, rank + 1, "f4"), v)],))
assert (v.value == -size * (size + 1) // 2).all()
"""

NO_MEMORY = """
import errno, os
from mpidist.cluster.launchers import detect_launcher

def refuse(fd, offset, length):
    raise OSError(errno.ENOSPC, "No space left on device")

if detect_launcher().rank == 0:  # who makes the memory of the node
    os.posix_fallocate = refuse
"""


def test_a_node_without_room_for_shared_memory_says_so_once_and_uses_messages(tmp_path: Path):
    body = START + "fused = Engine(communicator)\n" + VALUES + 'say(f"shared {communicator.facts().has_segments}")'
    env = {"MPIDIST_TUNING_FOLDER": str(tmp_path)}
    result = run_job(3, NO_MEMORY + body, env=env)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["shared False"] * 3
    (said,) = re.findall(r"mpidist: .*", result.stderr)
    assert re.search(r"\d+ bytes of shared memory cannot be had: .*No space left.*use messages instead", said), said


def test_gradient_buffers_for_which_there_is_no_room_are_an_error_on_all_ranks_and_the_job_goes_on():
    body = """
from mpidist.errors import TransportError
strategy = mpidist.MultiWorkerMirroredStrategy()
with strategy.scope():
    v = mpidist.Variable(numpy.zeros(1000, "f4"))
def refuse(fd, offset, length):
    raise OSError(28, "No space left on device")
os.posix_fallocate = refuse
try:
    strategy.extended.gradient_buffers([v])
except TransportError as error:
    say(f"rank {rank}: {error}")
fused = Engine(communicator)
"""
    result = run_job(3, START + body + VALUES, env={"MPIDIST_ALGORITHM": "shared_memory"})
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"rank \d: no shared memory on this node; local rank 0: \d+ bytes", result.stdout)) == 3
