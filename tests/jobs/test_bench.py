"""``mpidist bench`` with real ranks: its table, its file, and launchers of one's own."""

from __future__ import annotations

import json
import os
import sys

import pytest

from mpidist.commands.launch.probe import without_launcher
from tests.helpers.launch import ROOT, run_command, run_process

pytestmark = pytest.mark.measures

LITTLE = ("--sizes", "4", "64KiB", "--rounds", "3")


def test_it_starts_ranks_itself_and_writes_a_file(tmp_path):
    path = tmp_path / "found.json"
    environ = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "mpidist", "bench", "--rounds", "3", "--sizes", "4", "64KiB", "--json", str(path)]
    result = run_process(line, environ, 300)
    assert result.returncode == 0, result.stderr
    found = json.loads(path.read_text())
    assert (found["format"], found["ranks"]) == ("mpidist bench 2", 2)
    assert [(row["work"], row["size"], row["who"]) for row in found["rows"]] == [
        *(("array", size, who) for size in (4, 65536) for who in ("mpidist", "Allreduce")),
        *(("list", 100_666_368, who) for who in ("mpidist", "Allreduce each", "Allreduce packed")),
    ]
    assert {row["wrong"] for row in found["rows"]} == {0}
    assert len([each for each in result.stdout.splitlines() if not each.startswith("#")]) == 7


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_launcher_of_ones_own(ranks):
    result = run_command(ranks, [sys.executable, "-m", "mpidist", "bench", "--no-list", *LITTLE], timeout_seconds=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" mpidist ") == 2, "rank 0 prints, and nobody else"
