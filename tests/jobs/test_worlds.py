"""Jobs whose programs bring communicators of their own: `mpidist.init`, several worlds, and what goes wrong in them."""

from __future__ import annotations

import re
import sys

import pytest

from tests.jobs import JobResult, environment, run_job, run_process

#: Seconds within which a job must have ended, the start of MPI included.
LIMIT_SECONDS = 300

HEAD = """
import os, sys, threading, time
from mpi4py import MPI
import numpy
import mpidist
from mpidist.world import world_communicator

everyone = MPI.COMM_WORLD
rank, size = everyone.rank, everyone.size

def say(*what):
    os.write(1, (" ".join(map(str, what)) + "\\n").encode())  # in one piece: launchers mix what ranks write in several

def total(value):
    values = numpy.full(1000, float(value))
    world_communicator().all_reduce(values)
    return values[0]
"""


def _run(ranks: int, body: str, before: str = "", **env: str) -> JobResult:
    return run_job(ranks, before + HEAD + body, timeout_seconds=LIMIT_SECONDS, env=env)


def _said(result: JobResult) -> list[str]:
    """Return the lines that ranks said of a job that went well, sorted."""
    assert result.returncode == 0, result.stdout + result.stderr
    return sorted(result.stdout.split("\n")[:-1])


MEMBERS = """
comm = everyone.Split(MPI.UNDEFINED if rank == 0 else rank % 2, rank)
if rank:
    world = mpidist.init(comm)
    assert mpidist.init() is world and mpidist.init(comm) is world
    comm.Free()
    strategy = mpidist.MultiWorkerMirroredStrategy()
    members = mpidist.all_gather_object(rank)
    say(rank, mpidist.rank(), mpidist.size(), strategy.num_replicas_in_sync, total(rank), members)
    resolver = mpidist.cluster_resolver.MPIClusterResolver()
    assert (resolver.task_id, resolver.topology.size) == (mpidist.rank(), mpidist.size())
else:
    say(rank, "in none")
everyone.Barrier()
"""


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_members_of_an_ensemble_have_worlds_of_their_own(nodes):
    expected = ["0 in none", "1 0 2 2 4.0 [1, 3]", "2 0 1 1 2.0 [2]", "3 1 2 2 4.0 [1, 3]"]
    assert _said(_run(4, MEMBERS, MPIDIST_VIRTUAL_NODES=nodes)) == expected


def test_parameter_servers_are_dealt_out_among_the_ranks_of_the_world():
    body = """
comm = everyone.Split(MPI.UNDEFINED if rank == 0 else 0, rank)
if rank == 0:
    say("outside")
    sys.exit()
mpidist.init(comm)
strategy = mpidist.ParameterServerStrategy(num_ps=1)
with strategy.scope():
    w, optimizer = mpidist.Variable(numpy.zeros(3)), mpidist.optimizers.SGD(1.0)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
for _ in range(4):
    coordinator.schedule(lambda: optimizer.apply_gradients([(numpy.ones(3), w)]))
coordinator.join()
say(rank, w.value.tolist(), mpidist.rank(), mpidist.size())  # a worker has a world of its own
"""
    result = _run(4, body)
    assert _said(result) == ["1 [-4.0, -4.0, -4.0] 0 1", "outside"]
    assert "roles of 3 ranks" in result.stderr and "rank 2  ps 0" in result.stderr


@pytest.mark.parametrize("level", ["single", "funneled"])
def test_a_program_starts_mpi_with_a_thread_level_of_its_own(level):
    body = """
try:
    mpidist.init(everyone)
    say(total(1))
except mpidist.errors.LaunchError as error:
    say(error)
"""
    said = _said(_run(2, body, f"import mpi4py; mpi4py.rc.thread_level = {level!r}\n"))
    if level == "single" and said != ["2.0"] * 2:  # a library may give more than it was asked for
        assert all("started MPI with THREAD_SINGLE, and mpidist needs THREAD_FUNNELED" in line for line in said)
    else:
        assert said == ["2.0"] * 2


def test_a_thread_level_for_the_main_thread_is_refused_in_another_thread():
    body = """
def other():
    try:
        mpidist.init(everyone)
        say("made")
    except mpidist.errors.LaunchError as error:
        say(error)

thread = threading.Thread(target=other)
thread.start()
thread.join()
say(MPI.Query_thread() == MPI.THREAD_FUNNELED)
"""
    said = _said(_run(1, body, "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n"))
    if "True" in said:
        assert "needs THREAD_SERIALIZED in this thread" in said[1]
    else:
        assert said == ["False", "made"]


def test_a_program_may_leave_the_start_of_mpi_to_mpidist():
    script = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import mpidist
assert not MPI.Is_initialized()
mpidist.init(MPI.COMM_WORLD)
assert mpidist.all_gather_object(mpidist.rank()) == [0, 1] and MPI.Is_initialized()
"""
    result = run_job(2, script, timeout_seconds=LIMIT_SECONDS)
    assert result.returncode == 0, result.stderr


REFUSED = {
    "the world is made": (
        "mpidist.rank()",
        "everyone.Split(0, -rank)",
        "already, in a world of other ranks than these 2",
    ),
    "mpi is over": ("MPI.Finalize()", "MPI.COMM_WORLD", "MPI has been finalized"),
    "mpi is switched off": ("os.environ['MPIDIST_NO_MPI'] = '1'", "MPI.COMM_WORLD", "MPIDIST_NO_MPI=1 keeps every"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_init_that_comes_too_late_is_refused(why):
    before, comm, text = REFUSED[why]
    body = f"""
{before}
try:
    mpidist.init({comm})
except RuntimeError as error:
    say(error)
"""
    assert all(text in line for line in _said(_run(2, body)))


def test_a_communicator_of_one_in_a_process_started_by_hand():
    body = (
        "say(mpidist.rank(), mpidist.init(MPI.COMM_SELF).size)\nsay(mpidist.new_world(MPI.COMM_WORLD).size, total(3))\n"
    )
    result = run_process([sys.executable, "-c", HEAD + body], environment(), LIMIT_SECONDS)
    assert _said(result) == ["0 1", "1 3.0"]


HALVES = """
world = mpidist.new_world(everyone.Split(rank // 2, rank))
def work():
    with world:
        for step in range(50):
            assert total(1) == 2
"""


def test_a_deadline_in_one_world_names_ranks_of_both_kinds_and_leaves_the_others_alone():
    body = (
        HALVES
        + """
work()
if rank == 2:
    try:
        work()
    except mpidist.errors.TransportTimeoutError as error:
        say("late", error)
elif rank == 3:
    time.sleep(60)
else:
    for _ in range(50):
        work()
    say("done")
    time.sleep(60)
"""
    )
    result = _run(4, body, MPIDIST_TIMEOUT_SECONDS="5")
    assert result.returncode != 0
    assert result.stdout.count("done") == 2
    (late,) = re.findall("late (.*)", result.stdout)
    assert late.startswith("rank 0 of 2 (rank 2 of COMM_WORLD): all_reduce")
    assert re.search(r"waited \d+\.\d s for rank 1 \(\S+, rank 3 of COMM_WORLD\)", late)


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_an_exception_in_one_world_ends_the_job(nodes):
    body = (
        HALVES
        + """
work()
if rank == 3:
    raise ValueError("boom")
if rank == 2:
    work()
while True:
    work()
"""
    )
    result = _run(4, body, MPIDIST_VIRTUAL_NODES=nodes)
    assert result.returncode != 0
    assert "mpidist: rank 1 of 2 (rank 3 of COMM_WORLD) failed on" in result.stderr
    assert result.stderr.count("ValueError: boom") >= 1 and "mpidist: end of rank 1" in result.stderr


def test_ranks_of_several_worlds_are_told_of_an_exception_in_each():
    body = """
comms = [everyone.Split(0 if inside else MPI.UNDEFINED, rank) for inside in (rank < 2, rank > 0)]
worlds = [mpidist.new_world(comm) for comm in comms if comm != MPI.COMM_NULL]
for world in worlds:
    with world:
        assert total(1) == 2
if rank == 1:
    time.sleep(0.5)
    raise ValueError("boom")
with worlds[0]:
    try:
        total(1)
    except mpidist.errors.RankFailedError as error:
        say(error)
        raise
"""
    result = _run(3, body)
    assert result.returncode != 0
    said = sorted(line for line in result.stdout.split("\n") if "failed while" in line)
    assert [line.partition(" (")[0] for line in said] == ["rank 0 of 2", "rank 1 of 2"]
    assert all("rank 1 of COMM_WORLD) failed while this rank was in all_reduce" in line for line in said)
    assert "ValueError: boom" in result.stderr


CROSSED = """
pairs = {pairs}
worlds = {{}}
for pair in pairs:
    comm = everyone.Split(0 if rank in pair else MPI.UNDEFINED, rank)
    if rank in pair:
        worlds[pair] = mpidist.new_world(comm)
mine = [pair for pair in pairs if rank in pair]
if rank == {turned}:
    mine.reverse()
try:
    for pair in mine:
        with worlds[pair]:
            total(1)
    say("through")
except mpidist.errors.TransportError as error:
    say(type(error).__name__, error)
    raise
"""


@pytest.mark.parametrize(
    "ranks, pairs, turned",
    [(2, "[(0, 1), (1, 0)]", 1), (3, "[(0, 1), (1, 2), (2, 0)]", 0), (4, "[(0, 1), (1, 2), (2, 3), (3, 0)]", 0)],
)
def test_worlds_used_in_different_orders_are_refused(ranks, pairs, turned):
    result = _run(ranks, CROSSED.format(pairs=pairs, turned=turned))
    assert result.returncode != 0
    (found,) = re.findall("TransportError (rank .*)", result.stdout)
    assert "all_reduce" in found and "waits in another world" in found and "none of them can go on" in found
    assert "in the same order" in found
    assert "through" not in result.stdout
    assert "Use worlds that have ranks in common in the same order" in result.stderr


def test_worlds_used_in_one_order_by_ranks_of_different_speed_are_right():
    body = """
worlds = [mpidist.new_world(everyone) for _ in range(3)]
for step in range(3):
    for world in worlds:
        time.sleep(0.3 * ((rank + step) % size))
        with world:
            assert total(1) == size
say("through")
"""
    assert _said(_run(3, body)) == ["through"] * 3


def test_a_world_for_each_thread():
    body = """
worlds = [mpidist.new_world(everyone) for _ in range(2)]
found = {}
def work(index):
    with worlds[index]:
        if rank == index:
            time.sleep(1)  # the other rank waits for this one in both worlds, in one thread each
        found[index] = [total(index + 1) for _ in range(20)]
threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
say(found == {0: [2.0] * 20, 1: [4.0] * 20})
"""
    assert _said(_run(2, body)) == ["True", "True"]


def test_a_rank_that_does_not_come_to_init_is_waited_for_with_a_deadline():
    body = """
comm = everyone.Split(0, rank)
if rank == 1:
    time.sleep(60)
mpidist.init(comm)
"""
    result = _run(2, body, MPIDIST_TIMEOUT_SECONDS="1.5", MPIDIST_WARN_SECONDS="0.5")
    assert result.returncode != 0
    (warning, error) = re.findall(r"rank 0 of 2: mpidist.init has waited (\d+\.\d) s .* \(ranks 0, 1 of", result.stderr)
    assert 0.5 <= float(warning) <= float(error) and float(error) >= 1.5
    assert "TransportTimeoutError" in result.stderr


def test_worlds_on_several_nodes_end_together():
    body = """
worlds = [mpidist.new_world(everyone.Split(rank % 2, rank)), mpidist.new_world(everyone)]
for step in range(10):
    for world in worlds:
        with world:
            assert total(1) == world.size
for _ in range(5):
    brief = mpidist.new_world(everyone)
    with brief:
        assert total(1) == size
    brief.close()
if rank == 1:
    time.sleep(1)
say("done", len(set(world.topology.node_count for world in worlds)))
"""
    assert _said(_run(4, body, MPIDIST_VIRTUAL_NODES="2")) == ["done 1"] * 4


def test_traces_of_several_worlds_do_not_mix(tmp_path):
    body = (
        HALVES
        + """
work()
assert total(1) == size
"""
    )
    result = _run(4, body, MPIDIST_TRACE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in tmp_path.glob("*.trace.json")) == [
        f"rank-{rank:05d}.trace.json" for rank in range(4)
    ]
    folders = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(folders) == 2
    for folder in folders:
        assert sorted(path.name for path in folder.iterdir()) == ["rank-00000.trace.json", "rank-00001.trace.json"]
