"""Keras models whose variables are on servers, with the backend that the environment names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy
import pytest

from tests.helpers.launch import LIMIT_SECONDS, environment, run_command, run_job, run_process
from tests.helpers.pages import blocks

SCRIPT = Path(__file__).with_name("served_models.py")

#: JAX compiles for long; what does not depend on the backend runs with the other one.
IS_QUICK = os.environ.get("KERAS_BACKEND") == "torch"
quick = pytest.mark.skipif(not IS_QUICK, reason="with PyTorch")


@pytest.mark.parametrize(
    "name, ranks",
    [
        pytest.param("alone", 1, marks=quick),
        ("alone", 3),
        ("workers", 4),
        ("together", 4),
        pytest.param("restoring", 1, marks=quick),
    ],
)
def test_a_model_on_servers(name, ranks, tmp_path):
    job = run_command(ranks, [sys.executable, str(SCRIPT), name, str(tmp_path)], env={"OMP_NUM_THREADS": "1"})
    assert job.returncode == 0, job.stdout + job.stderr
    assert job.stdout.count("done") == 1  # workers do not come back


@quick
def test_an_evaluator_beside_the_training(tmp_path):
    roles = {"MPIDIST_ROLES": "chief:1,worker:1,ps:1,evaluator:1", "OMP_NUM_THREADS": "1"}
    job = run_command(4, [sys.executable, str(SCRIPT), "beside", str(tmp_path)], env=roles)
    assert job.returncode == 0, job.stdout + job.stderr
    losses, expected = (numpy.load(tmp_path / f"{name}.npy") for name in ("losses", "expected"))
    numpy.testing.assert_allclose(losses, expected, rtol=1e-5)


@quick
def test_the_example_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (block,) = [each for each in blocks() if each.how == "keras_job"]
    job = run_job(3, block.code, env={"OMP_NUM_THREADS": "1"})
    assert job.returncode == 0, job.stdout + job.stderr
    assert (tmp_path / "model.keras").exists()


@quick
@pytest.mark.parametrize("name", ["killed", "killed_later", "killed_together"])
def test_a_worker_that_is_killed(name, tmp_path):
    launched = [sys.executable, "-m", "mpidist", "run", "--fault-tolerant", "-n", "4"]
    job = run_process([*launched, str(SCRIPT), name, str(tmp_path)], environment(), LIMIT_SECONDS)
    assert "done" in job.stdout and "worker 1" in job.stderr, job.stdout + job.stderr
