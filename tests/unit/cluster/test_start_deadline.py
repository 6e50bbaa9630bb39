"""The deadline of MPI's start speaks and acts while Python itself cannot."""

import resource
import subprocess
import sys

import pytest

#: `PyDLL` holds Python's lock while it waits, as mpi4py does in MPI_Init.
SCRIPT = """
import ctypes
from mpidist.cluster.launchers import Launcher
from mpidist.cluster.start_deadline import start_deadline

with start_deadline({launcher}):
    ctypes.PyDLL(None).usleep({microseconds})
print("came through")
"""


def _run(launcher, seconds=30.0, **settings):
    script = SCRIPT.format(launcher=launcher, microseconds=int(seconds * 1e6))
    environ = {"PYTHONPATH": ":".join(sys.path), **settings}
    return subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=60)


def _launcher(rank):
    return f"Launcher('100 % mpirun', 3, {rank})"


def test_a_rank_that_waits_too_long_says_so_and_ends():
    done = _run(_launcher(0), MPIDIST_TIMEOUT_SECONDS="0.6", MPIDIST_WARN_SECONDS="0.2")
    assert (done.returncode, done.stdout) == (1, "")
    warning, error = done.stderr.splitlines()
    assert "mpidist: warning: rank 0 of 3 (" in warning and "has waited 0.2 s in MPI's start-up" in warning
    assert "mpidist: error: rank 0 of 3 (" in error and "has waited 0.6 s in MPI's start-up" in error


def test_only_the_lowest_ranks_warn():
    done = _run(_launcher(2), MPIDIST_TIMEOUT_SECONDS="0.6", MPIDIST_WARN_SECONDS="0.2")
    assert done.returncode == 1 and "warning" not in done.stderr and "rank 2 of 3" in done.stderr


@pytest.mark.parametrize(
    "launcher, settings",
    [
        (_launcher(0), {"MPIDIST_TIMEOUT_SECONDS": "60"}),
        (_launcher(0), {"MPIDIST_TIMEOUT_SECONDS": "0", "MPIDIST_WARN_SECONDS": "0"}),
        (_launcher(0), {"MPIDIST_TIMEOUT_SECONDS": "0.1", "MPIDIST_RUN_FOLDER": "/nowhere"}),  # mpidist run watches
        (None, {"MPIDIST_TIMEOUT_SECONDS": "0.1"}),  # no launcher, no other ranks
    ],
)
def test_who_comes_through_is_left_alone(launcher, settings):
    done = _run(launcher, seconds=0.5, **settings)
    assert (done.returncode, done.stdout, done.stderr) == (0, "came through\n", "")


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_SIGPENDING"), reason="timers have no limit here")
def test_a_process_that_may_have_no_timers_starts_all_the_same(monkeypatch):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_SIGPENDING, (0, 0))"
    monkeypatch.setattr(sys.modules[__name__], "SCRIPT", limit + SCRIPT)
    done = _run(_launcher(0), seconds=0.1, MPIDIST_TIMEOUT_SECONDS="60")
    assert (done.returncode, done.stdout) == (0, "came through\n")
    assert "MPI's start-up has no deadline: [Errno 11] the C library has made no timer" in done.stderr
