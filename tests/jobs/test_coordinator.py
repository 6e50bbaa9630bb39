"""A chief that schedules functions, in real processes: what is counted, what is carried, how jobs end."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.grid import grid
from tests.helpers.launch import launcher
from tests.jobs import JobResult, environment, run_job, run_process

needs_ulfm = pytest.mark.skipif(
    launcher().vendor != "Open MPI", reason="MPICH's launcher ends a job of which a rank dies"
)

BEGIN = """
import logging, os, signal, sys, threading, time
import numpy
import mpidist

strategy = mpidist.ParameterServerStrategy(num_ps={num_ps})
with strategy.scope():
    total = mpidist.Variable(numpy.zeros(4, "int64"))
    w = mpidist.Variable(numpy.zeros(3, "float32"))
    optimizer = mpidist.optimizers.SGD(0.5)

def count(x):
    total.assign_add(numpy.full(4, x))
    return x

def train(x):
    optimizer.apply_gradients([(numpy.full(3, x, "float32"), w)])

def train_in_run(iterator):
    return strategy.run(lambda x: train(x), args=(next(iterator),))

def fail(text):
    raise ValueError(text)

def worker():
    time.sleep(0.001)
    return mpidist.coordinator.experimental_get_current_worker_index()

coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
assert strategy.cluster_resolver.task_type == "chief"
"""

END = """
coordinator.join()
print("the chief is done", flush=True)
"""

ALL_SORTS = """
values = [coordinator.schedule(count, args=(n,)) for n in range(500)]
coordinator.join()
assert coordinator.done()
assert coordinator.fetch(values) == list(range(500))
assert total.value.tolist() == [sum(range(500))] * 4, total.value  # nothing lost, nothing twice

for n in range(200):
    coordinator.schedule(train, args=(n,))
coordinator.join()
assert w.value.tolist() == [-0.5 * sum(range(200))] * 3, w.value
assert optimizer.iterations == 200

# functions that workers have not come to: carried, and bound to the same variables and optimizers
step_size = 4
def later(x):
    train(step_size * x)
    return int(total.value[0])

assert coordinator.schedule(later, args=(1,)).fetch() == sum(range(500))
assert coordinator.schedule(lambda: (count(1), count(step_size))).fetch() == (1, 4)
assert total.value[0] == sum(range(500)) + 5
assert w.value[0] == -0.5 * (sum(range(200)) + 4) and optimizer.iterations == 201

# data sets: every worker has all of it
def numbers():
    return mpidist.data.Dataset.range(1, 4).repeat()

iterator = iter(coordinator.create_per_worker_dataset(numbers))
before = float(w.value[0])
for _ in range(30):
    coordinator.schedule(train_in_run, args=(iterator,))
coordinator.join()
assert optimizer.iterations == 231
assert 15 <= 2 * (before - float(w.value[0])) / 2 <= 45, w.value

iterator = iter(coordinator.create_per_worker_dataset(mpidist.data.Dataset.range(3)))
for _ in range(3 * WORKERS + 1):
    coordinator.schedule(train_in_run, args=(iterator,))
try:
    coordinator.join()
except mpidist.errors.OutOfRangeError as error:
    assert "train_in_run asked for the next element" in str(error), error
else:
    raise AssertionError("no error at the end of the data set")

assert {*coordinator.fetch([coordinator.schedule(worker) for _ in range(200)])} == {*range(WORKERS)}

# arrays of some megabytes, there and back
x = numpy.arange(1 << 20, dtype="float32")
for value in [coordinator.schedule(numpy.negative, args=(x + n,)) for n in range(4)]:
    found = value.fetch()
    assert found.dtype == x.dtype and abs(found[7] + 7) < 4
    found[:] = 0  # the chief's own
"""


@pytest.mark.parametrize(("ranks", "num_ps"), grid([(3, 1), (8, 3)], [(4, 1), (6, 2)]))
def test_all_sorts_of_functions(ranks, num_ps):
    script = BEGIN.format(num_ps=num_ps) + ALL_SORTS.replace("WORKERS", str(ranks - 1 - num_ps)) + END
    result = run_job(ranks, script)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("the chief is done") == 1, result.stdout


def test_messages_in_place_of_shared_memory():
    script = BEGIN.format(num_ps=1) + ALL_SORTS.replace("WORKERS", "2") + END
    result = run_job(4, script, env={"MPIDIST_SHARED_MEMORY": "0"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the chief is done" in result.stdout


def test_an_error_shows_worker_function_and_the_traceback_there():
    result = run_job(3, BEGIN.format(num_ps=1) + "coordinator.schedule(fail, args=('no such row',))" + END)
    assert result.returncode != 0
    assert "the chief is done" not in result.stdout
    text = result.stderr
    assert "worker 0 (rank 1) ran fail, which raised" in text
    assert re.search(r'File ".*script.py", line \d+, in fail\n *raise ValueError\(text\)', text), text
    assert text.count("ValueError: no such row") == 2  # there, and as the error of the chief
    assert "mpidist: rank 0 of 3 failed" in text


def test_an_error_that_is_caught_leaves_the_job_working():
    body = """
values = [coordinator.schedule(fail, args=("first",))]
try:
    for _ in range(2000):
        values.append(coordinator.schedule(count, args=(1,)))
    coordinator.join()
except ValueError as error:
    assert str(error) == "first"
else:
    raise AssertionError("no error")
ran = 0
for value in values[1:]:
    try:
        ran += value.fetch()
    except mpidist.errors.CancelledError as error:
        assert "fail, scheduled earlier, failed" in str(error) or "a function that was scheduled earlier" in str(error)
assert total.value[0] == ran
coordinator.schedule(count, args=(3,))
coordinator.join()
assert total.value[0] == ran + 3
"""
    result = run_job(4, BEGIN.format(num_ps=1) + body + END)
    assert result.returncode == 0, result.stdout + result.stderr


def test_what_was_not_joined_ends_with_the_program():
    body = """
logging.basicConfig()
for _ in range(20):
    coordinator.schedule(time.sleep, args=(0.05,))
print("the chief is done", flush=True)
"""
    result = run_job(4, BEGIN.format(num_ps=1) + body)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the chief is done" in result.stdout
    assert re.search(r"\d+ functions were never run: call join\(\)", result.stderr)


def test_an_error_that_nobody_asked_for_is_told_at_the_end():
    body = "coordinator.schedule(fail, args=('nobody asks',))\nprint('the chief is done', flush=True)"
    result = run_job(4, BEGIN.format(num_ps=1) + body)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "a function failed, and nothing has asked since: call join()" in result.stderr
    assert "ran fail, which raised" in result.stderr and "ValueError: nobody asks" in result.stderr


def test_a_script_without_cloudpickle_says_what_it_needs():
    body = "sys.modules['cloudpickle'] = None\ncoordinator.schedule(lambda: 1)"
    result = run_job(3, BEGIN.format(num_ps=1) + body + END)
    assert result.returncode != 0
    assert re.search(
        r"MissingDependencyError: function <lambda> is not known .*cloudpickle.*pip install", result.stderr
    )


def test_workers_without_a_chief_cannot_be_coordinated():
    result = run_job(3, BEGIN.format(num_ps=1), env={"MPIDIST_ROLES": "worker:2,ps:1"})
    assert result.returncode != 0
    assert "ValueError: a ClusterCoordinator needs a rank whose role is chief" in result.stderr
    assert "MPIDIST_ROLES=chief:1,worker:2,ps:1" in result.stderr


def test_an_evaluator_evaluates_every_checkpoint_until_the_end(tmp_path):
    script = f"""
import numpy
import mpidist

strategy = mpidist.ParameterServerStrategy()
task = strategy.cluster_resolver.task_type
with strategy.scope():
    w = mpidist.Variable(numpy.zeros(3, "float32"))
    optimizer = mpidist.optimizers.SGD(0.5)
folder = {str(tmp_path)!r}

if task == "evaluator":
    evaluator = mpidist.SidecarEvaluator(
        lambda data: {{"first": float(w.value[0])}},
        None,
        folder,
        checkpoint=mpidist.Checkpoint(w=w),
        poll_seconds=0.01,
    )
    results = evaluator.start()
    print("evaluated", [(result.path.name, result.logs["first"]) for result in results], flush=True)
else:
    def train(x):
        optimizer.apply_gradients([(numpy.full(3, x, "float32"), w)])

    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
    manager = mpidist.CheckpointManager(mpidist.Checkpoint(w=w, optimizer=optimizer), folder, max_to_keep=None)
    for epoch in range(3):
        for n in range(10):
            coordinator.schedule(train, args=(1.0,))
        coordinator.join()
        manager.save()
    print("the chief is done", flush=True)
"""
    result = run_job(4, script, env={"MPIDIST_ROLES": "chief:1,worker:1,ps:1,evaluator:1"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the chief is done" in result.stdout
    expected = [(f"checkpoint-{number}.h5", -5.0 * number) for number in (1, 2, 3)]
    assert f"evaluated {expected}" in result.stdout, result.stdout


DYING = """
def dies(x):
    if mpidist.coordinator.experimental_get_current_worker_index() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.001)
    return count(x)
"""

KILLED = (
    BEGIN.format(num_ps=1).replace("\ndef worker()", DYING + "\ndef worker()")
    + """
logging.basicConfig()
values = [coordinator.schedule(count, args=(n,)) for n in range(100)]
values += [coordinator.schedule(dies, args=(n,)) for n in range(100, 200)]
coordinator.join()
assert coordinator.fetch(values) == list(range(200))
assert total.value.tolist() == [sum(range(200))] * 4, total.value
assert {*coordinator.fetch([coordinator.schedule(worker) for _ in range(100)])} == {0, 2}
"""
    + END
)


def run_tolerant(ranks: int, script: str, folder: Path, env: Mapping[str, str] | None = None) -> JobResult:
    """Run a script by ``mpidist run --fault-tolerant``."""
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "mpidist", "run", "--fault-tolerant", "-n", str(ranks), str(path)]
    return run_process(command, environment(env), timeout_seconds=300)


@needs_ulfm
def test_the_functions_of_a_worker_that_is_killed_run_on_others(tmp_path):
    result = run_tolerant(5, KILLED, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the chief is done" in result.stdout
    assert re.search(
        r"worker 1 \(rank 2\).* died: its process \d+ is gone .*functions run again elsewhere", result.stderr
    )


def test_a_worker_that_is_killed_ends_a_job_that_does_not_tolerate_it():
    result = run_job(5, KILLED)
    assert result.returncode != 0
    assert "the chief is done" not in result.stdout
    # Open MPI's mpirun mostly leaves the survivors time to say it, else it names the rank; MPICH's kills them at once.
    assert re.search(r"rank 2\b.*(died|exited on)|Killed \(signal 9\)", result.stderr + result.stdout)


#: A worker that dies while it changes a server's variables itself.
DYING_IN_ITS_TURN = """
def dies(x):
    if mpidist.coordinator.experimental_get_current_worker_index() == 1:
        from mpidist.parameter_server.copies import Variables
        Variables.commit = lambda self, *arguments: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.001)
    return train(x)
"""

KILLED_IN_ITS_TURN = (
    BEGIN.format(num_ps=1).replace("\ndef worker()", DYING_IN_ITS_TURN + "\ndef worker()")
    + """
for n in range(300):
    coordinator.schedule(dies if n >= 100 else train, args=(n,))
coordinator.join()
assert w.value.tolist() == [-sum(range(300)) / 2] * 3, w.value
assert optimizer.iterations == 300, optimizer.iterations
assert {*coordinator.fetch([coordinator.schedule(worker) for _ in range(100)])} == {0, 2}
"""
    + END
)


#: Steps of 1 with a slot: the velocity comes to -1, and is 1 short of it in all.
KILLED_WITH_SLOTS = (
    KILLED_IN_ITS_TURN.replace("SGD(0.5)", "SGD(0.5, momentum=0.5)")
    .replace("numpy.full(3, x,", "numpy.full(3, 1,")
    .replace("w.value.tolist() == [-sum(range(300)) / 2] * 3", "numpy.allclose(w.value, -299, atol=1e-3)")
)


@needs_ulfm
@pytest.mark.parametrize("script", [KILLED_IN_ITS_TURN, KILLED_WITH_SLOTS], ids=["plain", "slots"])
def test_a_worker_that_is_killed_in_its_turn_leaves_variables_whole_and_the_turn_to_others(script, tmp_path):
    result = run_tolerant(5, script, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the chief is done" in result.stdout
    assert re.search(r"worker 1 \(rank 2\).* died", result.stderr)


@needs_ulfm
def test_when_the_last_worker_is_killed_the_job_ends(tmp_path):
    script = KILLED.replace("get_current_worker_index() == 1", "get_current_worker_index() >= 0")
    result = run_tolerant(4, script, tmp_path)
    assert result.returncode != 0
    assert "the chief is done" not in result.stdout
    assert re.search(r"PeerLostError: .*schedules functions on worker [01] .*no worker is left", result.stderr)


SERVER_KILLED = """
import logging, os, signal, time
import numpy
import mpidist

logging.basicConfig()
policies = {
    "async": None,
    "stale": mpidist.parameter_server.StaleSynchronous(1),
    "backup": mpidist.parameter_server.BackupWorkers(1),
}
strategy = mpidist.ParameterServerStrategy(num_ps=2, on_server_failure=MODE, consistency=policies[POLICY])
with strategy.scope():
    variables = [mpidist.Variable(numpy.zeros(4, "float32"), name=f"v{n}") for n in range(5)]
    optimizer = mpidist.optimizers.SGD(0.5, momentum=0.5)

def train(x):
    time.sleep(0.0005)
    optimizer.apply_gradients([(numpy.full(4, x, "float32"), variable) for variable in variables])
    return x

def kill_server():
    control = strategy._whole.control
    os.kill(control.board.pids[control.board_ranks.index(strategy._roles.servers[VICTIM])], signal.SIGKILL)

def check():
    state = optimizer.state()  # asks the servers, all of which must be there: values lie in memory that outlives them
    first = variables[0].value[0]
    assert all((variable.value == first).all() for variable in variables), [v.value for v in variables]
    slots = [value for name, value in state.items() if name.endswith("/momentum")]
    assert len(slots) == 5 and all((slot == slots[0]).all() for slot in slots), state
    return float(first), int(optimizer.iterations)

coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
manager = mpidist.CheckpointManager(mpidist.Checkpoint(variables=variables, optimizer=optimizer), FOLDER)
assert manager.restore_or_initialize() is None  # as programs begin that may have run before
if RESTORES:
    coordinator.restore_from(manager)
for _ in range(30):
    coordinator.schedule(train, args=(1.0,))
coordinator.join()
manager.save()
saved, iterations = check()
assert iterations == 30

values = [coordinator.schedule(train, args=(float(n),)) for n in range(100)]
assert values[10].fetch() == 10.0
if SAVES:  # with nothing scheduled: the chief's own requests meet the end of the server
    coordinator.join()
kill_server()
if SAVES:
    manager.save()
    assert coordinator.restores[0].undone == 100, coordinator.restores
coordinator.join()
assert coordinator.fetch(values) == [float(n) for n in range(100)]
now, iterations = check()
assert (now, iterations) == (saved, 30) if SAVES else now < saved and 30 < iterations <= 130, (now, iterations)
assert [restore.servers for restore in coordinator.restores] == [(VICTIM,)], coordinator.restores
assert len({variable.device for variable in variables}) == 1

# new variables find a server too
with strategy.scope():
    more = [mpidist.Variable(float(n)) for n in range(3)]
assert coordinator.schedule(lambda: [float(each.value) for each in more]).fetch() == [0.0, 1.0, 2.0]
for _ in range(20):
    coordinator.schedule(train, args=(1.0,))
coordinator.join()
assert check()[1] == iterations + 20
manager.save()
print("the chief is done", flush=True)
"""


def server_killed(folder: Path, **constants: object) -> str:
    defaults = {"FOLDER": str(folder / "checkpoints"), "MODE": "restore", "VICTIM": 1, "RESTORES": True}
    constants = {**defaults, "POLICY": "async", "SAVES": False, **constants}
    return "".join(f"{name} = {value!r}\n" for name, value in constants.items()) + SERVER_KILLED


@needs_ulfm
@pytest.mark.parametrize(
    ("victim", "policy", "ranks"),  # of the first server, workers ask whether they may go on
    grid([(0, "stale", 5)], [(1, "async", 5), (1, "stale", 5), (0, "backup", 4), (1, "backup", 4)]),
)
def test_what_a_server_held_is_restored_on_the_others(tmp_path, victim, policy, ranks):
    env = {"MPIDIST_TIMEOUT_SECONDS": "120"}
    result = run_tolerant(ranks, server_killed(tmp_path, VICTIM=victim, POLICY=policy), tmp_path, env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the chief is done" in result.stdout
    said = r"died: its process .*all variables are those of \S*checkpoint-1.h5, on the servers that are left"
    assert re.search(rf"ps {victim}: .* {said}", result.stderr), result.stderr


@needs_ulfm
def test_a_save_with_nothing_scheduled_restores_what_a_server_held(tmp_path):
    env = {"MPIDIST_TIMEOUT_SECONDS": "120"}
    result = run_tolerant(4, server_killed(tmp_path, SAVES=True), tmp_path, env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the chief is done" in result.stdout
    assert re.search(r"checkpoint-1.h5, .* left; 100 functions that had finished since are undone", result.stderr)


@needs_ulfm
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"MODE": "end"}, "start the job again,? (and restore|from) its newest checkpoint"),
        ({"RESTORES": False}, r"nothing says what to restore: call ClusterCoordinator.restore_from\(manager\)"),
    ],
    ids=["end", "no manager"],
)
def test_a_server_that_is_killed_ends_the_job_with_a_clear_message(tmp_path, options, text):
    result = run_tolerant(5, server_killed(tmp_path, **options), tmp_path)
    assert result.returncode != 0
    assert "the chief is done" not in result.stdout
    # the chief sees it itself, or hears it from the other server or a worker, which ended because of it
    assert re.search(rf"(PeerLost|RankFailed)Error: .*ps 1(: | \()rank 4 .* died.*{text}", result.stderr), result.stderr
    assert (tmp_path / "checkpoints" / "checkpoint-1.h5").exists()


GROUPS = """
import time
import numpy
import mpidist

strategy = mpidist.ParameterServerStrategy(num_ps=1, ranks_per_worker=2)
with strategy.scope():
    w = mpidist.Variable(numpy.zeros(3, "float32"))
    optimizer = mpidist.optimizers.SGD(0.5)

def replica_id():
    return mpidist.get_replica_context().replica_id_in_sync_group

def train(x):
    def on_replica():
        optimizer.apply_gradients([(numpy.full(3, x * (1 + replica_id()), "float32"), w)])
        return strategy.num_replicas_in_sync

    return strategy.run(on_replica)

def fail_on(failing):
    def on_replica():
        if replica_id() == failing:
            raise ValueError(f"on replica {failing}")
        return mpidist.get_replica_context().all_reduce("SUM", 1.0)

    return strategy.run(on_replica)

def doubled(x):
    return 2 * x

def worker():
    time.sleep(0.001)
    return mpidist.coordinator.experimental_get_current_worker_index()

def take(iterator):
    mine = next(iterator)
    return strategy.gather(numpy.asarray(mine), axis=0).tolist(), len(mine)

coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
values = [coordinator.schedule(train, args=(1.0,)) for _ in range(20)]
coordinator.join()
assert coordinator.fetch(values) == [2] * 20
assert w.value.tolist() == [-0.5 * 3 * 20] * 3 and optimizer.iterations == 20
assert (coordinator.schedule(doubled, args=(numpy.arange(5000.0),)).fetch() == numpy.arange(0, 10000, 2)).all()

two = 2.0
assert coordinator.schedule(lambda: (train(two), strategy.num_replicas_in_sync)).fetch() == (2, 2)
assert w.value.tolist() == [-0.5 * 3 * 22] * 3

for failing in (0, 1):
    coordinator.schedule(fail_on, args=(failing,))
    try:
        coordinator.join()
    except ValueError as error:
        assert str(error) == f"on replica {failing}", error
    else:
        raise AssertionError("no error")
coordinator.schedule(train, args=(1.0,))
coordinator.join()
assert w.value.tolist() == [-0.5 * 3 * 23] * 3
assert {*coordinator.fetch([coordinator.schedule(worker) for _ in range(200)])} == {0, 1}

dataset = mpidist.data.Dataset.range(8).batch(4).repeat()
distribute = strategy.experimental_distribute_dataset
for given in (distribute(dataset), lambda: distribute(dataset)):
    iterator = iter(coordinator.create_per_worker_dataset(given))
    for batch, rows in coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(6)]):
        assert batch in ([0, 1, 2, 3], [4, 5, 6, 7]) and rows == 2, (batch, rows)
"""


def test_workers_of_several_ranks():
    result = run_job(6, GROUPS + END)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the chief is done" in result.stdout


IDLE_GROUPS = """
import sys
import numpy
import mpidist

policies = {"stale": mpidist.parameter_server.StaleSynchronous(0), "backup": mpidist.parameter_server.BackupWorkers(2)}
strategy = mpidist.ParameterServerStrategy(num_ps=1, ranks_per_worker=2, consistency=policies[sys.argv[1]])
with strategy.scope():
    w = mpidist.Variable(numpy.zeros(3, "float32"))
    optimizer = mpidist.optimizers.SGD(1.0)

def train():
    def on_replica():
        optimizer.apply_gradients([(numpy.ones(3, "float32") + 0 * w.value, w)])

    strategy.run(on_replica)

coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
for _ in range(7):
    coordinator.schedule(train).fetch()  # one at a time: the other worker has nothing to do meanwhile
if sys.argv[1] == "stale":
    assert w.value.tolist() == [-14.0] * 3 and optimizer.iterations == 7, (w.value, optimizer.iterations)
print("the chief is done", flush=True)
"""


@pytest.mark.parametrize("policy", grid(["stale"], ["backup"]))
def test_a_worker_of_several_ranks_that_has_no_work_holds_nobody_back(policy):
    result = run_job(6, IDLE_GROUPS, [policy], env={"MPIDIST_TIMEOUT_SECONDS": "120"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the chief is done" in result.stdout


def test_an_evaluator_is_not_coordinated():
    result = run_job(4, BEGIN.format(num_ps=1) + END, env={"MPIDIST_ROLES": "chief:1,worker:1,ps:1,evaluator:1"})
    assert result.returncode != 0
    assert "RuntimeError: rank 3 is the evaluator" in result.stderr and "SidecarEvaluator" in result.stderr
