"""``mpidist doctor`` on real ranks: one page, whoever starts it."""

from __future__ import annotations

import json
import os
import sys

from mpidist.commands.launch.probe import without_launcher
from tests.helpers.launch import ROOT, run_command, run_process


def doctor(*arguments, **variables):
    environ = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT), **variables}
    return run_process([sys.executable, "-m", "mpidist", *arguments], environ, 300)


def broken(result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.startswith("FAIL")]


def test_two_ranks_print_one_page(tmp_path):
    # treated as two nodes, so that pairs of nodes and clocks are measured too
    variables = {"MPIDIST_VIRTUAL_NODES": "2", "OMP_NUM_THREADS": "1"}
    result = doctor("run", "--quiet", "-n", "2", "-m", "mpidist", "doctor", "--folder", str(tmp_path), **variables)
    lines = result.stdout.splitlines()
    assert broken(result) == [] and result.returncode in (0, 1), result.stderr
    assert sum(line.startswith("ok    world: 2 ranks, as many as") for line in lines) == 1
    assert "ok    all-reduce: 1.05 MB, right on 2 ranks" in lines
    assert any(line.startswith("ok    thread level: THREAD_MULTIPLE") for line in lines)
    assert any("node pairs: 1 pair: " in line or "node pairs: " in line and "Gbit/s" in line for line in lines)
    assert any(line.startswith("ok    clocks: at most ") for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_ranks_without_mpi_print_one_page():
    result = run_command(2, [sys.executable, "-m", "mpidist", "doctor"], env={"MPIDIST_NO_MPI": "1"})
    (line,) = broken(result)
    assert line.startswith("FAIL  world: MPIDIST_NO_MPI=1 is set") and line.endswith("-> unset MPIDIST_NO_MPI")
    assert result.returncode == 2


def test_alone_it_starts_nothing_unless_it_is_asked_to(tmp_path):
    alone = json.loads(doctor("doctor", "--json", "--folder", str(tmp_path)).stdout)
    (world,) = [each for each in alone["findings"] if each["check"] == "world"]
    assert world["text"].startswith("one process, started by hand")
    assert not [each for each in alone["findings"] if each["check"] == "all-reduce"]
    launched = doctor("doctor", "--launch", "--json", "--folder", str(tmp_path))
    findings = {each["check"]: each for each in json.loads(launched.stdout)["findings"]}
    assert findings["all-reduce"]["level"] == "ok" and "2 ranks" in findings["world"]["text"], launched.stdout
    assert "mpirun" in findings  # which only the process alone looks for


def test_a_folder_that_is_missing_is_broken_on_one_page(tmp_path):
    path = tmp_path / "none"
    result = run_command(2, [sys.executable, "-m", "mpidist", "doctor", "--folder", str(path)])
    (line,) = broken(result)
    assert line.startswith(f"FAIL  folder: {path}: ranks 0, 1 (") and line.endswith(f"-> mkdir -p {path}")
    assert result.returncode == 2
