"""A rank that is killed between two all-reduces of arrays on a GPU: the job ends by itself, and says who it was.

A job, and no parallel test: it starts ranks, and runs on one process itself.
"""

from __future__ import annotations

import re
import signal
import sys

import pytest

from tests.gpu import library
from tests.jobs import environment, run_process

pytestmark = pytest.mark.gpu

#: After so long the job is ended and the test fails; its start is in it, and so are the compilers of CuPy.
LIMIT_SECONDS = 180
#: Within which it must have ended after the kill.
END_SECONDS = 60

SCRIPT = """
import importlib, os, signal, sys, time
import mpidist

xp = importlib.import_module(sys.argv[1])
strategy = mpidist.MultiWorkerMirroredStrategy()
rank = mpidist.rank()
given = [xp.asarray([1.0] * count) for count in (3, 500_000)]

def total():
    found = strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", given))
    return [float(each[-1]) for each in found]

for _ in range(5):
    assert total() == [float(mpidist.size())] * 2
if rank == 1:
    os.write(1, f"killed at {time.time()}\\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)
for _ in range(1000):
    total()
print("went on without rank 1")
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_ends_the_job_and_is_named(tmp_path, ranks):
    library.require()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    name = "numpy" if library.is_numpy() else "cupy"
    command = [sys.executable, "-m", "mpidist", "run", "-n", str(ranks), str(script), name]
    result = run_process(command, environment(), LIMIT_SECONDS)
    killed_at = re.search(r"killed at ([0-9.]+)", result.stdout)
    assert killed_at, result.stdout + result.stderr
    assert result.returncode == 128 + signal.SIGKILL, result.stderr
    named = r"mpidist run: (rank 1|one of ranks [\d, ]*\b1\b.*) \(.*\) was ended by signal 9"
    assert re.search(named, result.stderr), result.stderr
    assert "went on" not in result.stdout
    assert result.ended_at < float(killed_at[1]) + END_SECONDS
