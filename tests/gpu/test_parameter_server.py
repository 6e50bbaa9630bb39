"""Parameter servers and gradients on a GPU, which are staged on the way: a job, as ``test_killed.py``.

Gradients are whole numbers and do not depend on the variables: no order in which workers push them changes the sum.
"""

from __future__ import annotations

import sys

import pytest

from tests.gpu import library
from tests.jobs import environment, run_process

pytestmark = pytest.mark.gpu

#: After so long the job is ended and the test fails; compilers are in it.
LIMIT_SECONDS = 180

SCRIPT = """
import importlib, sys, time
import numpy
import mpidist
from benchmarks.suite.gpu import spin
from mpidist.experimental.partitioners import FixedShardsPartitioner

xp, ranks_per_worker, push_dtype = importlib.import_module(sys.argv[1]), int(sys.argv[2]), sys.argv[3] or None
strategy = mpidist.ParameterServerStrategy(
    num_ps=2, variable_partitioner=FixedShardsPartitioner(2), ranks_per_worker=ranks_per_worker, push_dtype=push_dtype
)
extended, STEPS = strategy.extended, 4
if xp is not numpy:
    assert "GPU" in extended.worker_devices[0], extended.worker_devices
mine = extended.replica_id + 1  # the replicas of a worker: their gradients are added
with strategy.scope():
    matrix = mpidist.Variable(xp.ones((5, 3)), name="matrix")
    table = mpidist.Variable(numpy.zeros((7, 2), "f4"), name="table")
    number = mpidist.Variable(0.0, name="number")
    done = mpidist.Variable(0, aggregation="ONLY_FIRST_REPLICA", name="done")
    optimizer = mpidist.optimizers.SGD(0.5)

def step():
    dense = xp.zeros((3, 5)).T
    if xp is not numpy:
        spin(xp)  # what is staged is not there yet
    dense += 2 * mine
    rows = mpidist.IndexedSlices(xp.full((3, 2), mine, "f4"), xp.asarray(numpy.array([6, 0, 6])), (7, 2))
    optimizer.apply_gradients([(dense, matrix), (rows, table), (xp.asarray(4.0 * mine), number)])
    done.assign_add(1)

for _ in range(STEPS):
    strategy.run(step)
workers = len(strategy._roles.trainers)
end = time.monotonic() + 60
while int(done.read_value()) < STEPS * workers:
    assert time.monotonic() < end, "steps are missing"
extended.pull()
total = STEPS * workers * sum(range(1, extended.num_replicas + 1)) / 2
rows = numpy.zeros((7, 2))
rows[[0, 6]] = [[-total], [-2 * total]]
assert isinstance(matrix.value, numpy.ndarray), type(matrix.value)
assert (matrix.value == 1 - 2 * total).all(), (matrix.value, total)
assert (table.value == rows).all(), (table.value, total)
assert float(number.value) == -4 * total, (number.value, total)
places = xp.asarray(numpy.array([6, 1]))
matrix.assign_add(xp.zeros((5, 3)))
table.scatter_add(mpidist.IndexedSlices(xp.zeros((2, 2), "f4"), places))
looked_up = table.sparse_read(places)
assert numpy.array_equal(looked_up, rows[[6, 1]]), looked_up
mean = strategy.reduce("MEAN", xp.full(3, float(mine)), axis=None)
assert float(mean[0]) == (extended.num_replicas + 1) / 2, mean
print(f"rank {strategy._rank} is right", flush=True)
"""


@pytest.mark.parametrize("ranks, ranks_per_worker, push_dtype", [(4, 1, ""), (4, 1, "float16"), (4, 2, ""), (6, 2, "")])
def test_dense_gradients_and_rows_of_a_gpu_are_pushed(tmp_path, ranks, ranks_per_worker, push_dtype):
    library.require()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    name = "numpy" if library.is_numpy() else "cupy"
    command = [sys.executable, "-m", "mpidist", "run", "-n", str(ranks), str(script)]
    result = run_process([*command, name, str(ranks_per_worker), push_dtype], environment(), LIMIT_SECONDS)
    assert result.returncode == 0, result.stdout + result.stderr
    told = sorted(line for line in result.stdout.splitlines() if "is right" in line)
    assert told == [f"rank {rank} is right" for rank in range(ranks - 2)], result.stdout + result.stderr
