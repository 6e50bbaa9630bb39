"""The frameworks' benchmarks run, and add what they measured to the results."""

from __future__ import annotations

import json
import os
import sys

import pytest

from benchmarks.suite import results
from tests.helpers.launch import run_command

_BACKEND = os.environ.get("KERAS_BACKEND", "jax")

#: Module, options, name of the results, and the kinds of a step that are measured at least.
_QUICK = ["--width", "8", "--steps", "3", "--epochs", "2", "--rounds", "1"]
_RUNS = {
    "keras": (
        "keras_step",
        _QUICK,
        f"keras_step-{_BACKEND}-2.json",
        {"alone", "mpi4py", "distributed", "reduction", "seam"},
    ),
    "jax": ("jax_trees", ["--case", "150", "--turns", "2"], "jax_trees-2.json", {"bare", "ours", "copy"}),
    "torch": ("torch_steps", ["--case", "150", "--turns", "2"], "torch_steps-2.json", {"nothing", "mpidist", "DDP"}),
}


@pytest.mark.parametrize("name", [_BACKEND] if _BACKEND == "torch" else [_BACKEND, "keras"])
def test_a_launch_is_added_to_those_before(name, tmp_path):
    module, options, file, kinds = _RUNS[name]
    (tmp_path / file).write_text(json.dumps({"command": [], "launches": ["one before"]}))
    words = [sys.executable, "-m", f"benchmarks.{module}", *options, "--save", str(tmp_path)]
    result = run_command(2, words, timeout_seconds=300)
    assert result.returncode == 0, result.stderr
    before, launch = json.loads((tmp_path / file).read_text())["launches"]
    assert before == "one before"
    (found,) = (launch.get("milliseconds") or launch["seconds"]).values()
    assert kinds <= set(found)
    assert all(found[kind] > 0 for kind in kinds - {"seam"})


@pytest.mark.skipif(_BACKEND != "torch", reason="it is PyTorch's, and runs once")
def test_steps_for_a_gpu_are_tried_on_the_host(tmp_path):
    """All contenders come to the mean of the ranks' gradients; the peer is PyTorch's own class, over Gloo."""
    path = tmp_path / "found.json"
    options = ["--device", "cpu", "--models", "tiny", "--seconds", "0.1", "--rounds", "3", "--json", str(path)]
    result = run_command(2, [sys.executable, "-m", "benchmarks", "gpu-steps", *options], timeout_seconds=300)
    assert result.returncode == 0, result.stderr
    (launch,) = results.read(path)
    assert not launch.missing
    assert {row.who: row.wrong for row in launch.rows} == {
        "mpidist": 0,
        "mpidist, all after the pass": 0,
        "mpidist, the sums alone": None,
        "no communication": None,
        "DDP": 0,
        "DDP, bucket views": 0,
    }
    assert {row.work for row in launch.rows} == {"tiny on the host"}, "no target is about the host"
    assert all(row.reference == "DDP" and row.turns == 3 and row.time_us > 0 for row in launch.rows)
    told = launch.machine["tiny on the host: overlapped"]
    assert told == {"part of the sums": None, "turns that overlapped": 0, "turns": 3}, "one node sums after the pass"
