"""NCCL that fails, or a rank that is killed, while the others wait for the GPU: the job ends by itself, and says why.

A job, as ``test_killed.py``.  Only emulated NCCL fails when it is told to.
"""

from __future__ import annotations

import signal
import sys

import pytest

from tests.gpu import library
from tests.jobs import environment, run_process

pytestmark = pytest.mark.gpu(only=True)

#: After so long the job is ended and the test fails; compilers are in it.
LIMIT_SECONDS = 180

#: The failure is in a sum of rank 1, under way; `how` the host waits for it.
SCRIPT = """
import os, sys
import cupy
import mpidist
from mpidist.arrays import as_host

how, variable = sys.argv[1:]
strategy = mpidist.MultiWorkerMirroredStrategy()
rank, ones = mpidist.rank(), cupy.ones(3)

def reduced(op, given):
    return strategy.run(lambda: mpidist.get_replica_context().all_reduce(op, given))

with strategy.scope():
    weights = mpidist.Variable(cupy.zeros(3))
optimizer = mpidist.optimizers.SGD(1.0, skip_nonfinite=True)
for _ in range(2):
    assert cupy.asnumpy(reduced("SUM", ones)).tolist() == [mpidist.size()] * 3
if rank == 1:
    os.environ[variable] = "1"
if how == "answer":
    strategy.run(lambda: optimizer.apply_gradients([(ones, weights)]))
    print("went on with", optimizer.iterations)
total = reduced("SUM", ones)
if how == "own":
    found = cupy.asnumpy(total)
elif how == "read":
    found = as_host(total)
elif how == "staged":
    found = reduced("PRODUCT", total.astype("c8"))
print("went on with", found)
"""


def outcome(tmp_path, text, *given):
    """Return what a job of a script prints on stderr, how it ends, and what it prints else."""
    library.require()
    if not library.is_emulated():
        pytest.skip("NCCL fails when it is told to where it is emulated: MPIDIST_TEST_ON=emulated")
    script = tmp_path / "script.py"
    script.write_text(text)
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", str(script), *given]
    result = run_process(command, environment(), LIMIT_SECONDS)
    assert "went on" not in result.stdout, result.stdout
    return result.stderr, result.returncode, result.stdout


@pytest.mark.parametrize("how", ["read", "staged", "answer", "own"])
def test_an_asynchronous_error_is_raised_where_the_host_waits(tmp_path, how):
    told, status, _ = outcome(tmp_path, SCRIPT, how, "EMULATED_NCCL_FAILS")
    assert status == 1, told
    assert "rank 1 of 2: what was begun by NCCL 2.32.3 failed: NCCL_ERROR_REMOTE_ERROR" in told
    assert ("has not noticed it" in told) == (how == "own")


@pytest.mark.parametrize("how", ["answer", "own"])
def test_a_rank_that_is_killed_inside_a_call_is_named(tmp_path, how):
    told, status, _ = outcome(tmp_path, SCRIPT, how, "EMULATED_NCCL_KILLS")
    assert status == 128 + signal.SIGKILL, told
    assert "mpidist run: rank 1 (" in told


#: Rank 0 has begun a sum that nobody takes, behind `taken` ones, which are right.
LEFT = """
import os, sys
import cupy, numpy
import mpidist
from mpidist.collectives import early_sums
from mpidist.world import world_communicator

early_sums._LEAST_BUCKET_BYTES = 64
strategy = mpidist.MultiWorkerMirroredStrategy()
rank, kind = mpidist.rank(), cupy.zeros(0, "f4")
strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", cupy.ones(3)))
engine, signatures = world_communicator().engine(), [(name, numpy.dtype("f4"), (500,)) for name in "abc"]
plan = engine.early_plan(signatures, "sum", kind)
sums = engine.bind_early(plan, 0, ("flags", numpy.dtype("f4"), (1,)), 1)
given = [cupy.full(500, rank + 1, "f4") for _ in sums.plan.buckets]
for _ in range(int(sys.argv[1])):
    for index, each in enumerate(given):
        sums.buckets.fill(index, [each])
    assert sums(True)
    for index, each in enumerate(given):
        sums.buckets.take(index, [each], 0.5)
if rank == 0:
    sums.buckets.fill(0, [given[0]])
    sums.move_on(1)
print("right" if all((each == 1.5).all() for each in map(cupy.asnumpy, given[1:])) else given, rank, flush=True)
"""


@pytest.mark.parametrize("taken", [1, 2])
def test_a_job_ends_well_with_a_sum_under_way_that_nobody_takes(tmp_path, taken):
    told, status, said = outcome(tmp_path, LEFT, str(taken))
    assert status == 0, told
    assert sorted(said.splitlines()) == ["right 0", "right 1"]


#: Rank 1 stops where NCCL connects it with rank 0, in the first call that needs it.
STOPS = """
import os
os.environ["MPIDIST_TIMEOUT_SECONDS"] = "4"
import cupy
import mpidist

strategy = mpidist.MultiWorkerMirroredStrategy()
ones = cupy.ones(3)
total = strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", ones))
assert cupy.asnumpy(total).tolist() == [2] * 3
if mpidist.rank() == 1:
    os.environ["EMULATED_NCCL_STOPS"] = "1"
try:
    mpidist.all_to_all(cupy.arange(2))
except mpidist.errors.TransportTimeoutError:
    try:
        print("went on with", mpidist.arrays.as_host(total))
    except mpidist.errors.TransportError as error:
        print("refused:", error)
    raise
"""


def test_a_rank_that_stops_while_nccl_connects_two_ranks_is_a_deadline_for_the_other(tmp_path):
    told, status, said = outcome(tmp_path, STOPS)
    assert status == 1, told
    assert "TransportTimeoutError: rank 0 of 2: " in told, told
    assert "refused: work of NCCL 2.32.3 was broken off" in said
