"""``tests/gpu/run``: its table, with a Python that prints what tests print."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "gpu" / "run"

PYTHON = """#!/bin/sh
case "$*" in
  *test_killed*) echo '1 passed, 1 deselected in 0.10s' ;;
  *"-n 1"*) echo '3 skipped in 0.10s' ;;
  *"-n 2"*) printf '..'; exit 3 ;;
esac
"""


def test_the_table_tells_of_each_part_how_it_ended_and_what_was_counted(tmp_path):
    """A part that was ended in the middle of a line hides no other; tests that were all skipped have not passed."""
    python = tmp_path / "python3"
    python.write_text(PYTHON)
    python.chmod(0o755)
    given = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "OUT": str(tmp_path), "DEVICE": "", "NO_MPS": "1"}
    result = subprocess.run(
        [SCRIPT], env={**os.environ, **given, "PARTS": "staged2 killed one lost"}, capture_output=True
    )
    assert result.returncode == 1
    rows = [line.split() for line in (tmp_path / "table.txt").read_text().splitlines()]
    assert [[row[0], *row[3:]] for row in rows] == [
        ["staged2", "failed", "(3)"],
        ["killed", "passed", *"1 passed, 1 deselected in 0.10s".split()],
        ["one", "failed", "(5)", *"3 skipped in 0.10s".split()],
        ["lost", "failed", "(2)"],
    ]
