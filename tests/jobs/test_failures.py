"""Jobs that go wrong under a real mpirun: they end in seconds, with a non-zero status, and say who and why."""

from __future__ import annotations

import itertools
import re
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from tests.jobs import JobResult, environment, no_shared_memory_left, run_job, run_process

#: Seconds within which a job must have ended after a failure; starting and MPI's own clean-up included.
LIMIT_SECONDS = 300

#: Seconds after an exception on one rank within which all processes of its job must have ended.
END_SECONDS = 60

STEPS = """
import os, signal, sys, time
import numpy
from mpidist.world import world_communicator
from mpidist.collectives.engine import Engine

communicator = world_communicator()
rank, size = communicator.rank, communicator.size
fused = Engine(communicator)

def steps(count, shape=(4, 3), **options):
    for _ in range(count):
        fused([numpy.ones(shape, "float32")], names=["w"], **options)

def say(line):
    os.write(1, f"{line}\\n".encode())  # in one piece: launchers mix what ranks write in several

def fail(error):
    say(f"failing at {time.time()}")
    raise error

steps(100)
BAD = 1
"""

KILL = "os.kill(os.getpid(), signal.SIGKILL)"

#: Put before `STEPS`, takes the system's files without a name away: memory is shared through one in /dev/shm then.
NAMED_FILES = """
import os
del os.memfd_create
"""


def _run(body: str, ranks: int = 3, before: str = "", **env: str) -> JobResult:
    with no_shared_memory_left(), tempfile.TemporaryDirectory() as folder:
        env = {"TMPDIR": folder, **env}
        result = run_job(ranks, before + STEPS + body, timeout_seconds=LIMIT_SECONDS, env=env)
        assert not list(Path(folder).glob("mpidist*")), "temporary files were left behind"
    return result


def _ended_in_time(result: JobResult) -> bool:
    failed_at = [float(moment) for moment in re.findall(r"failing at ([0-9.]+)", result.stdout)]
    return result.ended_at < min(failed_at) + END_SECONDS


def _last_said(result: JobResult) -> str:
    """Return the last thing any rank printed: what follows it may only be the launcher's own."""
    match = re.search(r"mpidist: rank (\d+) of \d+ failed.*?\n(.*)mpidist: end of rank \1\n", result.stderr, re.DOTALL)
    assert match, f"no rank said that it failed:\n{result.stderr}"
    after = result.stderr[match.end() :]
    assert "Traceback" not in after and "mpidist:" not in after, after
    return match.group(2)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback_last(nodes):
    result = _run('if rank == BAD: fail(ValueError("boom"))\nsteps(1)', ranks=4, MPIDIST_VIRTUAL_NODES=nodes)
    assert result.returncode != 0 and _ended_in_time(result)
    assert "mpidist: rank 1 of 4 failed" in result.stderr
    assert _last_said(result).endswith("ValueError: boom\n")


def test_an_exception_while_the_others_compute_ends_the_job_too():
    result = _run('if rank == BAD: fail(ValueError("boom"))\ntime.sleep(600)')
    assert result.returncode != 0 and _ended_in_time(result)
    assert _last_said(result).endswith("ValueError: boom\n")


def test_the_same_exception_on_all_ranks_is_printed_once():
    result = _run('fail(KeyError("everywhere"))')
    assert result.returncode != 0 and _ended_in_time(result)
    assert result.stderr.count("Traceback") == 1
    assert "KeyError: 'everywhere'" in _last_said(result)


def test_ranks_that_fail_each_by_its_own_error_do_not_mix_what_they_print():
    result = _run('fail(ValueError("".join(f"line {line} of rank {rank}\\n" for line in range(3000))))', ranks=3)
    assert result.returncode != 0 and _ended_in_time(result)
    # a rank that is late, on a busy machine, may be ended before its turn
    said = re.findall(
        r"^(?:mpidist: rank|(?:ValueError: )?line \d+ of rank|mpidist: end of rank) (\d)", result.stderr, re.MULTILINE
    )
    turns = [rank for rank, _ in itertools.groupby(said)]
    assert turns and len(turns) == len({*turns}), turns
    assert said.count(turns[0]) == 3002


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_collective_that_one_rank_never_joins_ends_at_its_deadline_and_names_it(nodes):
    result = _run("if rank == BAD: time.sleep(600)\nsteps(1, timeout_seconds=1)", ranks=4, MPIDIST_VIRTUAL_NODES=nodes)
    assert result.returncode != 0
    error = _last_said(result)
    assert "TransportTimeoutError" in error
    assert re.search(r"all_reduce\(sum\) of w float32\[4, 3\] \(call 102\) waited 1.*s for rank 1 \(", error), error


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_rank_that_is_stopped_in_a_transfer_is_named_at_the_deadline(nodes):
    body = """
from mpidist.transports.node_memory import SharedSegments
def stop(segments, rank, turn, said=SharedSegments.say_reduced):
    os.kill(os.getpid(), signal.SIGSTOP)
if rank == BAD: SharedSegments.say_reduced = stop
steps(1, shape=(1000, 1000))
"""
    result = _run(body, ranks=4, MPIDIST_VIRTUAL_NODES=nodes, MPIDIST_TIMEOUT_SECONDS="5")
    assert result.returncode != 0
    error = _last_said(result)
    called = r"all_reduce\(sum\) of w float32\[1000, 1000\] \(call \d+\)"
    assert re.search(called + r" waited 5.* s for rank 1 \(.*\), which came to this call", error), error


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_rank_that_changes_a_shape_is_named_with_both_shapes(nodes):
    result = _run("steps(1, shape=(4, 5) if rank == BAD else (4, 3))", ranks=4, MPIDIST_VIRTUAL_NODES=nodes)
    assert result.returncode != 0
    error = _last_said(result)
    assert "CollectiveMismatchError" in error
    assert "rank 1 passed 'w' float32 (4, 5), ranks 0, 2, 3 passed 'w' float32 (4, 3)" in error


def test_a_mismatch_is_raised_on_every_rank_and_can_be_caught():
    body = """
from mpidist.errors import CollectiveMismatchError
try:
    steps(1, shape=(4, 5) if rank == BAD else (4, 3))
except CollectiveMismatchError as error:
    say(f"caught on {rank} {'rank 1 passed' in str(error)}")
steps(1)
"""
    result = _run(body)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"caught on {rank} True" for rank in range(3)]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_rank_that_leaves_early_with_status_0_is_named(nodes):
    result = _run("if rank == BAD: sys.exit(0)\nsteps(1)", ranks=4, MPIDIST_VIRTUAL_NODES=nodes)
    assert result.returncode != 0
    assert re.search(r"rank 1 \(.*\) left .*after 101 collective calls.*in call 102", _last_said(result))


@pytest.mark.parametrize(
    ("nodes", "bad", "text"),
    [
        # between nodes the deadline tells: who leaves says so to rank 0 there
        ("1", "sys.exit(0)", r"rank 1 \(.*\) left .*while this rank is in receive from rank 1"),
        *((nodes, KILL, r"rank 1\b.*(died|exited on)|Killed \(signal 9\)") for nodes in "12"),
        *(
            (nodes, "time.sleep(30)", r"receive from rank 1 waited 2.* s for rank 1 \(.*\)\. Each send")
            for nodes in "12"
        ),
    ],
    ids=["left", "killed", "killed on another node", "late", "late on another node"],
)
def test_a_rank_that_never_sends_is_named_by_the_one_that_receives(nodes, bad, text):
    body = f"if rank == BAD: {bad}\nif rank == 3: communicator.receive(BAD, timeout_seconds=2)\ntime.sleep(20)"
    result = _run(body, ranks=4, MPIDIST_VIRTUAL_NODES=nodes)
    assert result.returncode != 0
    assert re.search(text, result.stderr + result.stdout), result.stderr


def test_after_a_deadline_that_was_caught_every_call_raises_the_same_and_the_job_fails():
    body = """
from mpidist.errors import TransportTimeoutError
if rank == BAD: time.sleep(5)
texts = []
for _ in range(2):
    try:
        steps(1, timeout_seconds=1)
    except TransportTimeoutError as error:
        texts.append(str(error))
say(f"{rank} {len(texts)} {len(set(texts))}")
"""
    result = _run(body)
    assert result.returncode != 0
    assert {"0 2 1", "2 2 1"} <= set(result.stdout.splitlines())


def test_a_killed_rank_ends_the_job():
    result = _run("if rank == BAD: os.kill(os.getpid(), signal.SIGKILL)\nsteps(1)")
    assert result.returncode != 0
    # Open MPI's mpirun leaves the survivors time to say it; MPICH's kills them at once and names the process.
    assert re.search(r"rank 1\b.*(died|exited on)|Killed \(signal 9\)", result.stderr + result.stdout)


def test_a_killed_rank_is_named_by_mpidist_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STEPS + "if rank == BAD: os.kill(os.getpid(), signal.SIGKILL)\nsteps(1)")
    command = [sys.executable, "-m", "mpidist", "run", "-n", "3", str(script)]
    named = r"mpidist run: (rank 1|one of ranks [\d, ]*\b1\b.*) \(.*\) was ended by signal 9"
    result = run_process(command, environment(), LIMIT_SECONDS)
    assert result.returncode == 128 + signal.SIGKILL
    assert re.search(named, result.stderr), result.stderr


def test_a_forked_child_is_no_rank():
    body = """
child = os.fork()
if child == 0:
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
steps(10)
say(f"done {rank}")
"""
    result = _run(body)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["done 0", "done 1", "done 2"]


def test_no_shared_memory_falls_back_to_messages():
    result = _run('steps(5)\nsay(f"done {rank}")', MPIDIST_SHARED_MEMORY="0")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["done 0", "done 1", "done 2"]


@pytest.mark.parametrize(
    "end", ["", 'if rank == BAD: fail(ValueError("boom"))', "if rank == BAD: os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_file_for_shared_memory_is_not_left_behind_however_the_job_ends(end):
    """`_run` looks what stays in /dev/shm; the ranks say that there has been such a file."""
    body = """
with open("/proc/self/maps") as maps:
    mapped = any("/mpidist-" in line and "(deleted)" in line for line in maps)
say(f"mapped {rank} {mapped}")
steps(1)
"""
    result = _run(body + end + "\nsteps(1)", before=NAMED_FILES)
    assert (result.returncode == 0) == (end == ""), result.stderr
    assert {"mapped 0 True", "mapped 1 True", "mapped 2 True"} <= set(result.stdout.splitlines())


STANDOFF = """
import sys
from mpi4py import MPI
import numpy, mpidist
from mpidist.errors import TransportTimeoutError

rank, size = mpidist.rank(), mpidist.size()
array = numpy.zeros((1000, 300), "f4")
try:
    mpidist.send(array, (rank + 1) % size) if sys.argv[1] == "send" else mpidist.receive((rank + 1) % size)
except TransportTimeoutError as error:
    assert "wait for each other" in str(error) and "start() one of the sends" in str(error), error
    what = "send of float32[1000, 300] to" if sys.argv[1] == "send" else "receive from"
    for each in range(size):
        assert f"waits in {what} rank {(each + 1) % size}" in str(error), error
    found = MPI.COMM_WORLD.gather("told")  # mpidist's own channel has ended
    if rank == 0:
        print(found, flush=True)
    MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(
    "env", [{}, {"MPIDIST_VIRTUAL_NODES": "2", "MPIDIST_SHARED_MEMORY": "0"}], ids=["node", "nodes"]
)
@pytest.mark.parametrize(("ranks", "verb"), [(2, "send"), (3, "send"), (2, "receive")])
def test_ranks_that_wait_for_each_others_sends_or_receives_are_all_told(ranks, verb, env):
    result = run_job(ranks, STANDOFF, [verb], env=env)
    assert str(["told"] * ranks) in result.stdout, result.stdout + result.stderr
