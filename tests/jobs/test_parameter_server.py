"""`ParameterServerStrategy` in real processes: every worker runs the script, and servers hold what it trains."""

from __future__ import annotations

import re
import signal
import sys

import pytest

from tests.helpers.grid import grid
from tests.helpers.launch import launcher
from tests.jobs import environment, run_job, run_process

needs_ulfm = pytest.mark.skipif(
    launcher().vendor != "Open MPI", reason="MPICH's launcher ends a job of which a rank dies"
)

TRAIN = """
import sys
import numpy
import mpidist
from mpidist.experimental.partitioners import FixedShardsPartitioner

ranks_per_worker, steps, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
strategy = mpidist.ParameterServerStrategy(
    variable_partitioner=FixedShardsPartitioner(2), ranks_per_worker=ranks_per_worker,
    num_ps=int(sys.argv[4]) if len(sys.argv) > 4 else None,
)
extended = strategy.extended
with strategy.scope():
    w = mpidist.Variable(numpy.zeros((5, 3), "float64"), name="w")
    b = mpidist.Variable(numpy.float64(0), name="b")
    done = mpidist.Variable(0, aggregation="ONLY_FIRST_REPLICA", name="done")
    optimizer = mpidist.optimizers.SGD(1.0)
checkpoint = mpidist.Checkpoint(w=w, b=b, optimizer=optimizer)
manager = mpidist.CheckpointManager(checkpoint, folder)
manager.restore_or_initialize()

def step():
    # integers, so that no order of adding changes the sum; of a worker's ranks, the last has the gradient
    mine = float(extended.replica_id == extended.num_replicas - 1)
    optimizer.apply_gradients([(numpy.full((5, 3), mine), w), (numpy.float64(2 * mine), b)])
    done.assign_add(1)

for _ in range(steps):
    strategy.run(step)
workers = len(strategy._roles.trainers)
while int(done.read_value()) < workers * steps:  # all have sent their last, and it has been applied, before `done`
    pass
extended.pull()
total = optimizer.iterations
assert (w.value == -total).all() and float(b.value) == -2 * total, (w.value, b.value, total)
assert total % (workers * steps) == 0, total
manager.save()
print(f"rank {strategy._rank}: {total} steps of {workers} workers", flush=True)
"""


def train(tmp_path, ranks, *arguments, **env):
    result = run_job(ranks, TRAIN, [arguments[0], "3", str(tmp_path), *arguments[1:]], env=env)
    assert result.returncode == 0, result.stderr
    return result, sorted(re.findall(r"rank (\d+): (\d+) steps of (\d+) workers", result.stdout))


@pytest.mark.parametrize(
    "ranks, arguments, workers",
    grid([(4, ("1", "2"), 2), (6, ("2", "2"), 2)], [(3, ("1", "1"), 2), (8, ("1", "3"), 5), (8, ("3", "2"), 2)]),
)
def test_every_step_of_every_worker_counts_once(tmp_path, ranks, arguments, workers):
    result, lines = train(tmp_path, ranks, *arguments)
    trainers = ranks - int(arguments[-1])
    assert lines == [(str(rank), str(3 * workers), str(workers)) for rank in range(trainers)]
    assert result.stderr.count(f"roles of {ranks} ranks (num_ps={arguments[-1]})") == 1


def test_a_job_goes_on_with_other_ranks_and_shards(tmp_path):
    train(tmp_path, 3, "1", "1")
    _, lines = train(tmp_path, 6, "2", "2")
    assert {steps for _, steps, _ in lines} == {"12"}
    _, lines = train(tmp_path, 1, "1")
    assert lines == [("0", "15", "1")]


def test_roles_from_the_environment(tmp_path):
    result, lines = train(tmp_path, 4, "1", MPIDIST_ROLES="ps:2,worker:*")
    assert [rank for rank, *_ in lines] == ["2", "3"]
    assert re.search(r"ranks 0-1 +ps 0-1 .*\n +ranks 2-3 +worker 0-1", result.stderr)


def test_servers_of_other_nodes(tmp_path):
    result, lines = train(tmp_path, 6, "1", MPIDIST_VIRTUAL_NODES="2")
    assert {steps for _, steps, _ in lines} == {"12"}  # one server a node: 4 of 6 ranks train
    assert "(one ps a node)" in result.stderr


def test_without_shared_memory(tmp_path):
    _, lines = train(tmp_path, 4, "1", "1", MPIDIST_SHARED_MEMORY="0")
    assert {steps for _, steps, _ in lines} == {"9"}


CONFIG = """
import json, os, runpy, sys
from mpi4py import MPI

rank, tasks = MPI.COMM_WORLD.rank, [("ps", 0), ("worker", 1), ("chief", 0), ("worker", 0)]
cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
kind, index = tasks[rank]
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})
"""


def test_roles_of_tf_config(tmp_path):
    script = CONFIG + TRAIN + "print(extended.device_name, extended.number, extended.is_chief)"
    result = run_job(4, script, ["1", "3", str(tmp_path)])
    assert result.returncode == 0, result.stderr
    assert sorted(re.findall(r"/job.*", result.stdout)) == [
        "/job:chief/replica:0/task:0/device:CPU:0 0 True",
        "/job:worker/replica:0/task:0/device:CPU:0 1 False",
        "/job:worker/replica:0/task:1/device:CPU:0 2 False",
    ]


def test_ranks_that_cannot_be_dealt(tmp_path):
    result = run_job(2, TRAIN, ["1", "3", str(tmp_path), "2"])
    assert result.returncode != 0
    assert "There must be at least one worker." in result.stderr
    assert "MPIDIST_ROLES=worker:1,ps:1 is possible; or start `mpidist run -n 4 SCRIPT`" in result.stderr


FAILS = """
import numpy, mpidist
strategy = mpidist.ParameterServerStrategy(num_ps=1)
with strategy.scope():
    v = mpidist.Variable(numpy.zeros(3), name="v")
if strategy.extended.number == 1:
    raise RuntimeError("this worker fails")
while True:
    strategy.run(lambda: v.assign_add(numpy.ones(3)))
"""


def test_a_worker_that_fails_ends_the_job():
    result = run_job(4, FAILS)
    assert result.returncode != 0
    assert "this worker fails" in result.stderr


BOUNDED = """
import sys
import numpy
import mpidist

kinds = {"stale": mpidist.parameter_server.StaleSynchronous(1), "backup": mpidist.parameter_server.BackupWorkers(1)}
strategy = mpidist.ParameterServerStrategy(num_ps=2, consistency=kinds[sys.argv[1]])
with strategy.scope():
    variables = [mpidist.Variable(numpy.zeros(3)) for _ in range(2)]
    optimizer = mpidist.optimizers.SGD(1.0)

def step():
    optimizer.apply_gradients([(numpy.ones(3), v) for v in variables])

if sys.argv[2] == "coordinator":
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    for _ in range(30):
        coordinator.schedule(step)
    coordinator.join()
    made = 30
else:
    for _ in range(10):
        strategy.run(step)
    made = 10
steps = optimizer.iterations
assert steps >= made if sys.argv[2] == "graph" else 0 < steps <= made, steps
if sys.argv[1:] == ["stale", "coordinator"]:
    assert steps == made
if sys.argv[2] == "coordinator":
    strategy.extended.pull()
    # each server takes the first gradients that come to it; the count is that of the one with the most
    assert max(-v.value.max() for v in variables) == steps, (steps, [v.value for v in variables])
print("done")
"""


@pytest.mark.parametrize(
    "kind, style, trainers",
    grid(
        [("stale", "graph", 3), ("backup", "coordinator", 1)],
        [("backup", "graph", 3), ("stale", "coordinator", 1)],
    ),
)
def test_workers_that_wait_for_each_other(kind, style, trainers):
    # a chief that only schedules makes no steps, and nobody waits for it
    result = run_job(5, BOUNDED, [kind, style], env={"MPIDIST_TIMEOUT_SECONDS": "120"})
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("done") == trainers


LAST_PUSH_FAILS = """
import numpy
import mpidist

class Refuses(mpidist.optimizers.SGD):
    def renew_slice(self, *arguments):
        raise ArithmeticError("not today")

strategy = mpidist.ParameterServerStrategy(num_ps=1)
with strategy.scope():
    w = mpidist.Variable(numpy.zeros(3))
    optimizer = Refuses(1.0)
if strategy.extended.number == 1:
    strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(3), w)]))
"""


def test_a_push_that_fails_at_the_end_of_the_program_is_its_error():
    result = run_job(3, LAST_PUSH_FAILS)
    assert result.returncode != 0
    assert re.search(r"rank 1 of 3 failed.*ServerError: ps 0 .*push 1: ArithmeticError: not today", result.stderr, re.S)


#: Three workers and two servers.  The second worker kills a rank, itself for one, in its 11th step.
DYING = """
import os, signal, sys
import numpy
import mpidist

victim, policy, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
policies = {
    "async": None,
    "stale": mpidist.parameter_server.StaleSynchronous(0),
    "backup": mpidist.parameter_server.BackupWorkers(2),
}
strategy = mpidist.ParameterServerStrategy(num_ps=2, consistency=policies[policy], on_server_failure=mode)
with strategy.scope():
    variables = [mpidist.Variable(numpy.zeros(3)) for _ in range(2)]
    ended = mpidist.Variable(0)
    optimizer = mpidist.optimizers.SGD(1.0)

def step():
    optimizer.apply_gradients([(1 + 0 * v.value, v) for v in variables])

def kill(rank):
    control = strategy._whole.control
    os.kill(control.board.pids[control.board_ranks.index(rank)], signal.SIGKILL)

# a server's memory outlives it: who reads and writes it there notices its end when it looks around, now and then
for n in range(30 if victim < 3 else 1_000_000):
    if strategy.extended.number == 1 and n == 10:
        strategy.extended.pull()
        kill(victim)
    strategy.run(step)
strategy.extended.pull()
ended.assign_add(1)
while policy != "backup" and int(ended.read_value()) < 2:  # with backup workers, the others wait for who waits here
    pass
strategy.extended.pull()
os.write(1, f"rank {strategy._rank} ends with {[sorted({*v.value.tolist()}) for v in variables]}\\n".encode())
"""


def run_dying(folder, *arguments, tolerant=True):
    path = folder / "script.py"
    path.write_text(DYING)
    options = ["--fault-tolerant"] if tolerant else []
    command = [sys.executable, "-m", "mpidist", "run", *options, "-n", "5", str(path), *map(str, arguments)]
    return run_process(command, environment({"MPIDIST_TIMEOUT_SECONDS": "120"}), timeout_seconds=300)


@needs_ulfm
@pytest.mark.parametrize("policy", grid(["stale"], ["async", "backup"]))
def test_the_others_go_on_without_a_worker_that_is_killed(tmp_path, policy):
    result = run_dying(tmp_path, 1, policy, "end")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"mpidist run: rank 1 \(process .*\) was ended by signal 9", result.stderr), result.stderr
    lines = sorted(result.stdout.splitlines())
    assert [line[:17] for line in lines] == ["rank 0 ends with ", "rank 2 ends with "]
    if policy != "backup":  # which makes one step of two pushes
        assert {line[17:] for line in lines} == {"[[-70.0], [-70.0]]"}, lines  # 30 + 10 + 30, on either server


def test_a_job_that_does_not_tolerate_it_ends_with_the_name_of_the_worker_that_was_killed(tmp_path):
    result = run_dying(tmp_path, 1, "stale", "end", tolerant=False)
    assert result.returncode == 128 + signal.SIGKILL
    assert " ends with " not in result.stdout
    named = r"mpidist run: (rank 1|one of ranks [\d, ]*\b1\b.*) \(.*\) was ended by signal 9"
    assert re.search(named, result.stderr), result.stderr


@needs_ulfm
@pytest.mark.parametrize("victim, mode", grid([(4, "restore")], [(4, "end"), (3, "restore")]))
def test_a_server_that_is_killed_ends_the_job_where_every_worker_runs_the_program(tmp_path, victim, mode):
    result = run_dying(tmp_path, victim, "async", mode)
    assert result.returncode not in (0, 124)
    assert " ends with " not in result.stdout
    assert re.search(rf"ps {victim - 3} \(rank {victim}.* died.*start the job again", result.stderr, re.I), (
        result.stderr
    )
