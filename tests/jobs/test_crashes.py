"""Jobs that are killed at random moments, writing included, and resumed: they end as if they had never been killed.

``KILLS`` (default 5) says how many kills there are; ``make test-crashes`` makes 50.  Moments are drawn with a fixed
seed: the n-th call of a function on one rank, in all of the run or while a checkpoint is being saved; or so many
microseconds after a save has begun, which may be in the middle of a call of the file system.
"""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

import numpy
import pytest

from tests.jobs import run_job

KILLS = int(os.environ.get("KILLS", "5"))
RANKS = 2
ENV = {"MPIDIST_DETERMINISTIC": "1"}

#: Trains 40 steps with a checkpoint every 3; prints how many calls it made, and which of them while saving.
TRAIN = """
import json, os, signal, sys, time
import numpy
import mpidist

folder, result = sys.argv[1:3]
victim, moment, timed_save, microseconds = (int(text) for text in sys.argv[3:7])
calls, saving, seconds = 0, [], []

WAITING = tuple(f"/mpidist/{folder}/" for folder in ("runtime", "transports", "collectives"))

def count(frame, event, argument):
    global calls
    if any(folder in frame.f_code.co_filename for folder in WAITING):
        return  # how often a rank looks around while it waits is another number every time
    calls += 1
    if calls == moment:
        os.kill(os.getpid(), signal.SIGKILL)

strategy = mpidist.MultiWorkerMirroredStrategy()
rank = strategy.extended.replica_id
generator = numpy.random.default_rng(7)
with strategy.scope():
    w = mpidist.Variable(generator.normal(size=(6, 3)).astype("float32"), name="w")
    b = mpidist.Variable(numpy.zeros(3, "float32"), name="b")
    seen = mpidist.Variable(0.0, name="seen", dtype="float64", synchronization="ON_READ", aggregation="SUM")
    optimizer = mpidist.optimizers.Adam(0.05, weight_decay=0.01, global_clipnorm=0.5)
x = numpy.sin(numpy.arange(37 * 6)).reshape(37, 6).astype("float32")
dataset = mpidist.data.Dataset.from_arrays(x).shuffle(seed=3).batch(7)
batches = strategy.experimental_distribute_dataset(dataset)
checkpoint = mpidist.Checkpoint(w=w, b=b, seen=seen, optimizer=optimizer, batches=batches, random=generator)
manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=2)
manager.restore_or_initialize()

def step(rows, noise):
    error = numpy.tanh((rows + noise) @ w.value + b.value) / 7
    optimizer.apply_gradients([(rows.T @ error, w), (error.sum(axis=0), b)])
    seen.assign_add(numpy.float64(len(rows)))

if rank == victim or victim < 0:
    sys.setprofile(count)
while optimizer.iterations < 40:
    for rows in batches:
        strategy.run(step, args=(rows, generator.normal(size=6).astype("float32")))
        if optimizer.iterations % 3 == 0:
            began, at = calls, time.perf_counter()
            if rank == victim and optimizer.iterations == timed_save:
                signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)  # nobody handles it: the process is gone
            manager.save(optimizer.iterations)
            saving.append((began, calls))
            signal.setitimer(signal.ITIMER_REAL, 0)
            seconds.append(time.perf_counter() - at)
        if optimizer.iterations == 40:
            break
manager.save(40)  # which removes what a killed one has left, the last too
sys.setprofile(None)
with strategy.scope():
    total = float(seen.value)
slots = {f"slot{i}{name}": s for i, v in enumerate((w, b)) for name, s in optimizer.slots(v).items()}
if rank == 0:
    numpy.savez(result, w=w.value, b=b.value, seen=total, drawn=generator.random(3), **slots)
if victim < 0:
    os.write(1, f"rank {rank} calls {json.dumps([calls, saving, seconds])}\\n".encode())
"""


class Job:
    """One training, run again until it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.result = folder / "run", folder / "result.npz"

    def run(self, ranks: int = RANKS, victim: int = -1, moment: int = 0, save: int = 0, microseconds: int = 0):
        """Run it; a victim is killed at its call number `moment`, or some time after it has begun a save."""
        numbers = [str(number) for number in (victim, moment, save, microseconds)]
        done = run_job(ranks, TRAIN, [str(self.folder), str(self.result), *numbers], env=ENV)
        assert (done.returncode == 0) == self.result.exists(), done.stderr
        return done

    def killed(self, *when: int) -> bool:
        """Run, be killed at a moment, and return whether the job has come to that moment."""
        done = self.run(RANKS, *when)
        said = done.stderr + done.stdout
        assert done.returncode == 0 or re.search("died|[Kk]illed|signal|SIGNAL|KILLED", said), said
        return done.returncode != 0

    def arrays(self) -> dict[str, numpy.ndarray]:
        """Return the result, and prove that nothing but whole checkpoints is left."""
        left = sorted(path.name for path in self.folder.iterdir())
        assert left == ["checkpoint-39.h5", "checkpoint-40.h5"]
        return dict(numpy.load(self.result))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The result of a training that is never killed, and for each rank its calls, those in saves, and their seconds."""
    job = Job(tmp_path_factory.mktemp("whole"))
    done = job.run()
    assert done.returncode == 0, done.stderr
    found = dict(re.findall(r"rank (\d) calls (.*)", done.stdout))
    moments = [json.loads(found[str(rank)]) for rank in range(RANKS)]
    return job.arrays(), moments


def drawn_moment(numbers: random.Random, moments) -> tuple[int, int, int, int]:
    """Return a rank, and a moment of its run: any call, one while it saves, or any time in a save."""
    victim = numbers.randrange(RANKS)
    calls, saving, seconds = moments[victim]
    kind = numbers.choice(["call", "save", "time"])
    if kind == "time":
        save = numbers.randrange(len(seconds))
        return victim, 0, 3 * (save + 1), numbers.randint(1, int(1e6 * seconds[save]))
    first, last = (1, calls) if kind == "call" else numbers.choice(saving)
    return victim, numbers.randint(first, last), 0, 0


def test_killed_and_resumed_it_ends_with_the_same_bits(reference, tmp_path):
    expected, moments = reference
    numbers, kills, rounds = random.Random(KILLS), 0, 0
    while kills < KILLS:
        rounds += 1
        job = Job(tmp_path / str(rounds))
        job.folder.mkdir(parents=True)
        while not job.result.exists() and kills < KILLS:
            kills += job.killed(*drawn_moment(numbers, moments))
        if not job.result.exists():
            assert job.run().returncode == 0
        found = job.arrays()
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }, rounds


def test_resumed_on_another_number_of_ranks_it_ends_within_rounding(reference, tmp_path):
    expected, moments = reference
    job = Job(tmp_path)
    _, saving, _ = moments[0]
    assert job.killed(0, sum(saving[5]) // 2)
    assert job.run(3).returncode == 0
    for name, array in job.arrays().items():
        numpy.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
