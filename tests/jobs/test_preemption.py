"""Jobs that are told to end under a real mpirun: they save on all ranks at one step, exit, and go on from there."""

from __future__ import annotations

import re

import pytest

from tests.jobs import run_job

STEPS = """
import os, signal, sys
import numpy
import mpidist

folder, tell, ranks, name = sys.argv[1], int(sys.argv[2]), [int(rank) for rank in sys.argv[3].split(",")], sys.argv[4]
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.extended.replica_id
with strategy.scope():
    v = mpidist.Variable(numpy.zeros(3), name="v")
checkpoint = mpidist.Checkpoint(v=v)
config = mpidist.experimental.TerminationConfig(exit_code=17)
handler = mpidist.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, checkpoint, folder, config)

def step():
    if handler.total_run_calls == tell and rank in ranks:
        os.kill(os.getpid(), getattr(signal, name))
    total = strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", numpy.full(3, rank + 1.0)))
    v.assign_add(total * (handler.total_run_calls + 1))

while handler.total_run_calls < 12:
    handler.run(step)
os.write(1, f"rank {rank} ends with {v.value.tolist()}\\n".encode())
"""


@pytest.mark.parametrize("nodes", ["1", "2"])
@pytest.mark.parametrize(("ranks", "told", "name"), [(2, "1", "SIGTERM"), (3, "0,2", "SIGUSR1")])
def test_a_job_that_is_told_to_end_goes_on_where_it_was(tmp_path, nodes, ranks, told, name):
    env = {"MPIDIST_VIRTUAL_NODES": nodes}
    ended = run_job(ranks, STEPS, [str(tmp_path), "4", told, name], env=env)
    assert ended.returncode == 17, ended.stderr
    assert "ends with" not in ended.stdout
    # told in the fifth step, known in front of the sixth, and all stop in front of the seventh
    assert "the job was told to end: saved after 6 steps; it exits" in ended.stderr
    resumed = run_job(ranks, STEPS, [str(tmp_path), "-1", "0", name], env=env)
    assert resumed.returncode == 0, resumed.stderr
    total = float(ranks * (ranks + 1) // 2 * 78)
    found = sorted(re.findall(r"rank (\d) ends with \[(\S+), (\S+), (\S+)\]", resumed.stdout))
    assert found == [(str(rank), *[f"{total}"] * 3) for rank in range(ranks)]


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_rank_that_is_killed_ends_the_job_all_the_same(tmp_path, nodes):
    script = STEPS.replace("os.kill(os.getpid(), getattr(signal, name))", "os.kill(os.getpid(), signal.SIGKILL)")
    ended = run_job(3, script, [str(tmp_path), "4", "1", "SIGKILL"], env={"MPIDIST_VIRTUAL_NODES": nodes})
    assert ended.returncode not in (0, 17), ended.stderr
    # MPICH's launcher may end the others before they can say who it was, and says so itself
    assert re.search(r"rank 1\b|SIGNAL: 9|signal 9|SIGNALED|KILLED", ended.stderr + ended.stdout), ended.stderr
    assert "the job was told to end" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


DISTURBED = """
import os, signal, sys
import numpy
import mpidist

folder, first, second = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.extended.replica_id
with strategy.scope():
    v = mpidist.Variable(numpy.zeros(3), name="v")

class Disturbing:  # a part of the checkpoint
    told = False

    def state(self):
        if self.told:
            os.kill(os.getpid(), getattr(signal, second))
        return {"n": 1}

    def restore(self, state):
        pass

part = Disturbing()
config = mpidist.experimental.TerminationConfig(signals=first)
manager = mpidist.CheckpointManager(mpidist.Checkpoint(v=v, part=part), folder)
handler = mpidist.experimental.PreemptionCheckpointHandler(None, manager, termination_config=config)

def step():
    if handler.total_run_calls == 4 and rank == 1:
        os.kill(os.getpid(), getattr(signal, first[0]))
    part.told = handler.total_run_calls >= 4
    v.assign_add(strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", numpy.ones(3))))

while handler.total_run_calls < 100:
    handler.run(step)
"""


@pytest.mark.parametrize("first", ["SIGTERM,SIGUSR1", "SIGUSR1"])
@pytest.mark.parametrize("second", ["SIGTERM", "SIGUSR1"])
def test_a_second_signal_while_all_ranks_save_does_not_disturb_them(tmp_path, first, second):
    ended = run_job(2, DISTURBED, [str(tmp_path), first, second])
    assert ended.returncode == 42, ended.stderr
    said = re.findall(r"the job was told to end: .*", ended.stderr)
    assert said == [
        f"the job was told to end: {what}" for what in ("it saves after 6 steps", "saved after 6 steps; it exits")
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1.h5", "requeue"]


CHILDREN = """
import multiprocessing, os, sys

import numpy
import mpidist

strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.extended.replica_id
with strategy.scope():
    v = mpidist.Variable(numpy.zeros(3), name="v")
handler = mpidist.experimental.PreemptionCheckpointHandler(None, mpidist.Checkpoint(v=v), sys.argv[1])
handler.run(lambda: v.assign_add(strategy.run(lambda: mpidist.get_replica_context().all_reduce("sum", numpy.ones(3)))))
fork = multiprocessing.get_context("fork")

def wait(started):
    started.set()
    multiprocessing.Event().wait()

def begun(**options):
    started = fork.Event()
    process = fork.Process(target=wait, args=(started,), **options)
    process.start()
    started.wait()
    return process

child = begun()
child.terminate()
child.join()
with fork.Pool(2) as pool:
    squares = pool.map(abs, [-1, 2])
pool.join()
own = os.fork()
if not own:
    sys.exit(5)
status = os.WEXITSTATUS(os.waitpid(own, 0)[1])
strategy.barrier()
os.write(1, f"rank {rank}: {child.exitcode} {squares} {status} {v.value.tolist()}\\n".encode())
begun(daemon=True)  # the end of the program terminates it, and waits for it
"""


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_forked_children_end_as_without_a_handler(tmp_path, nodes):
    ended = run_job(2, CHILDREN, [str(tmp_path)], env={"MPIDIST_VIRTUAL_NODES": nodes})
    assert ended.returncode == 0, ended.stderr
    expected = [f"rank {rank}: -15 [1, 2] 5 {[2.0] * 3}" for rank in range(2)]
    assert sorted(ended.stdout.splitlines()) == expected
