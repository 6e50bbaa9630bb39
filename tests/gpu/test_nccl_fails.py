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
    found = reduced("MIN", total)
print("went on with", found)
"""


def outcome(tmp_path, how, variable):
    """Return what the job prints on stderr, and how it ends."""
    library.require()
    if not library.is_emulated():
        pytest.skip("NCCL fails when it is told to where it is emulated: MPIDIST_TEST_ON=emulated")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mpidist", "run", "-n", "2", str(script), how, variable]
    result = run_process(command, environment(), LIMIT_SECONDS)
    assert "went on" not in result.stdout, result.stdout
    return result.stderr, result.returncode


@pytest.mark.parametrize("how", ["read", "staged", "answer", "own"])
def test_an_asynchronous_error_is_raised_where_the_host_waits(tmp_path, how):
    told, status = outcome(tmp_path, how, "EMULATED_NCCL_FAILS")
    assert status == 1, told
    assert "rank 1 of 2: what was begun by NCCL 2.32.3 failed: NCCL_ERROR_REMOTE_ERROR" in told
    assert ("has not noticed it" in told) == (how == "own")


@pytest.mark.parametrize("how", ["answer", "own"])
def test_a_rank_that_is_killed_inside_a_call_is_named(tmp_path, how):
    told, status = outcome(tmp_path, how, "EMULATED_NCCL_KILLS")
    assert status == 128 + signal.SIGKILL, told
    assert "mpidist run: rank 1 (" in told
