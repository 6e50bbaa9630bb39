"""Keras models whose variables are on servers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.helpers.launch import run_command

SCRIPT = Path(__file__).with_name("served_models.py")


@pytest.mark.parametrize("name, ranks", [("alone", 1), ("alone", 3), ("workers", 4)])
def test_a_model_on_servers(name, ranks, tmp_path):
    job = run_command(ranks, [sys.executable, str(SCRIPT), name, str(tmp_path)])
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("done") == 1  # workers do not come back


def test_a_worker_that_is_killed(tmp_path):
    job = run_command(4, ["mpidist", "run", "--fault-tolerant", "-n", "4", str(SCRIPT), "killed", str(tmp_path)])
    assert job.stdout.count("done") == 1, job.stdout + job.stderr
