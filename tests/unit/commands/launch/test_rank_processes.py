"""Processes of a job, found by the token in their environment."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from mpidist.commands.launch.rank_processes import end_processes, processes_of, ranks_of
from mpidist.commands.launch.watchdog import OVER, start_watchdog
from mpidist.options import RUN_TOKEN

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
        env={**os.environ, RUN_TOKEN: token, "PMI_RANK": "0"},
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


def test_the_watchdog_ends_a_job_whose_supervisor_is_gone(job, tmp_path):
    token, process, _ = job
    folder = tmp_path / "pipes"
    folder.mkdir()
    start_watchdog(token, str(folder)).communicate(b"", timeout=20)
    assert process.wait(timeout=20) == -9
    assert not folder.exists()


def test_the_watchdog_starts_in_a_folder_with_modules_named_as_pythons(job, tmp_path, monkeypatch):
    token, process, _ = job
    for name in ("platform", "shutil", "signal", "difflib"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a module of the user')")
    monkeypatch.chdir(tmp_path)
    start_watchdog(token, str(tmp_path / "pipes")).communicate(b"", timeout=20)
    assert process.wait(timeout=20) == -9


def test_the_watchdog_stays_when_all_processes_of_the_job_are_told_to_end(job, tmp_path):
    token, process, _ = job
    watchdog = start_watchdog(token, str(tmp_path))
    while int(_ignored(watchdog.pid), 16) & 1 << (signal.SIGTERM - 1) == 0:
        assert watchdog.poll() is None
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        watchdog.send_signal(signum)
    watchdog.communicate(b"", timeout=20)
    assert process.wait(timeout=20) == -9


def test_the_watchdog_outlives_a_job_that_has_started_this_one(job, tmp_path, monkeypatch):
    token, process, _ = job
    outer = uuid.uuid4().hex
    monkeypatch.setenv(RUN_TOKEN, outer)
    watchdog = start_watchdog(token, str(tmp_path))
    assert end_processes(outer) == []
    watchdog.communicate(b"", timeout=20)
    assert process.wait(timeout=20) == -9


def _ignored(process):
    """Return the mask of the signals that a process ignores."""
    return re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{process}/status").read_text())[1]


def test_the_watchdog_leaves_a_job_alone_that_is_over(job, tmp_path):
    token, process, _ = job
    start_watchdog(token, str(tmp_path)).communicate(OVER, timeout=20)
    assert process.poll() is None
    assert tmp_path.exists()
