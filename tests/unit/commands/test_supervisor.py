"""How a job ends whose launcher does not say what became of it."""

from __future__ import annotations

import os
import sys

import pytest

from mpidist.commands import supervisor


def run(script: str, **env: str) -> supervisor.Ended:
    """Supervise a launcher that only runs this script."""
    return supervisor.supervise([sys.executable, "-c", script], ["true"], 2, {**os.environ, **env}, 30.0)


ENDING = "print('MPI will try to terminate your MPI job as well)', file=sys.stderr, flush=True)"


def test_a_launcher_that_does_not_end_after_mpi_has_ended_the_job_is_ended(monkeypatch):
    monkeypatch.setattr(supervisor, "_ENDING_SECONDS", 0.2)
    ended = run(f"import sys, time; {ENDING}; time.sleep(60)")
    assert ended.status == 1 and not ended.timed_out
    assert "its launcher did not end within 0.2 s" in ended.stuck


def test_a_launcher_that_ends_then_keeps_its_status():
    ended = run(f"import sys; {ENDING}; sys.exit(14)")
    assert (ended.status, ended.stuck) == (14, "")


@pytest.mark.parametrize("tolerant", ["0", "1"])
def test_a_job_that_has_lost_a_host_has_failed(tolerant):
    said = "print('PRTE has lost communication with a remote daemon.', file=sys.stderr)"
    assert run(f"import sys; {said}", MPIDIST_FAULT_TOLERANT=tolerant).status == 1
    assert run("pass", MPIDIST_FAULT_TOLERANT=tolerant).status == 0
