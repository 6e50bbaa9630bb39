"""Processes of a job, found by the token in their environment."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from mpidist.commands.rank_processes import TOKEN, end_processes, processes_of, ranks_of
from mpidist.commands.watchdog import OVER

#: A process that starts a child; the child says that it is there, and both wait for their input to end.
SCRIPT = """
import subprocess, sys
code = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
subprocess.Popen([sys.executable, "-c", code], stdin=sys.stdin)
sys.stdin.read()
"""


@pytest.fixture
def job():
    """A token, a process that carries it as rank 0 would, and that process's child."""
    token = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, TOKEN: token, "PMI_RANK": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    child = int(process.stdout.readline())
    yield token, process, child
    process.kill()
    process.communicate()


def test_processes_and_their_children_are_found(job):
    token, process, child = job
    assert sorted(processes_of(token)) == sorted([process.pid, child])
    assert processes_of(uuid.uuid4().hex) == {}


def test_ranks_are_without_their_children(job):
    token, process, _ = job
    assert ranks_of(token) == [process.pid]


def test_all_are_ended(job):
    token, process, _ = job
    assert end_processes(token) == []
    assert process.wait(timeout=20) == -9
    assert processes_of(token) == {}


def watchdog(token, folder):
    command = [sys.executable, "-m", "mpidist.commands.watchdog", token, str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def test_the_watchdog_ends_a_job_whose_supervisor_is_gone(job, tmp_path):
    token, process, _ = job
    folder = tmp_path / "pipes"
    folder.mkdir()
    watchdog(token, folder).communicate(b"", timeout=20)
    assert process.wait(timeout=20) == -9
    assert not folder.exists()


def test_the_watchdog_leaves_a_job_alone_that_is_over(job, tmp_path):
    token, process, _ = job
    watchdog(token, tmp_path).communicate(OVER, timeout=20)
    assert process.poll() is None
    assert tmp_path.exists()
