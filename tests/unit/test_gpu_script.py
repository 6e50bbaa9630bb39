"""``tests/gpu/run``: its table, with a Python that prints what tests print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.suite import results as launches
from benchmarks.suite.results import Launch
from benchmarks.suite.rows import row_of
from tests.gpu import results

SCRIPT = Path(__file__).parents[1] / "gpu" / "run"

PYTHON = f"""
case "$*" in
  *tests.gpu.results*) exec {sys.executable} "$@" ;;
  *test_killed*) echo '1 passed, 1 deselected in 0.10s' ;;
  *"-n 1"*) echo '3 skipped in 0.10s' ;;
  *"-n 2"*) printf '..'; exit 3 ;;
esac
"""


def script_with(folder, python):
    """Return the environment of the script, with a Python that is a few lines for the shell."""
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{python}\n")
    path.chmod(0o755)
    before = {name: text for name, text in os.environ.items() if name != "KERAS_BACKEND"}
    found = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return {**before, "PATH": found, "OUT": str(folder), "DEVICE": "", "NO_MPS": "1"}


def test_the_table_tells_of_each_part_how_it_ended_and_what_was_counted(tmp_path):
    """A part that was ended in the middle of a line hides no other; tests that were all skipped have not passed."""
    given = script_with(tmp_path, PYTHON)
    result = subprocess.run([SCRIPT], env={**given, "PARTS": "staged2 killed one lost"}, capture_output=True)
    assert result.returncode == 1
    rows = [line.split() for line in (tmp_path / "table.txt").read_text().splitlines()]
    assert [[row[0], *row[3:]] for row in rows] == [
        ["staged2", "failed", "(3)"],
        ["killed", "passed", *"1 passed, 1 deselected in 0.10s".split()],
        ["one", "failed", "(5)", *"3 skipped in 0.10s".split()],
        ["lost", "failed", "(2)"],
    ]
    found = json.loads((tmp_path / "results.json").read_text())
    told = {part["name"]: (part["status"], part["counts"]) for part in found["parts"]}
    assert told["killed"] == ("passed", {"passed": 1, "deselected": 1}) and found["about"]["mpidist"]
    assert told["staged2"] == ("failed (3)", {}) and told["one"] == ("failed (5)", {"skipped": 3})
    page = (tmp_path / "results.md").read_text()
    assert page.startswith("# On a GPU" if isinstance(found["about"]["cards"], list) else "# Without a card")
    assert "| passed | 1 passed, 1 deselected |" in page and "Nothing was measured." in page


@pytest.mark.parametrize("part, tests, backend", [
    ("staged2", "tests/gpu --ignore=.*test_torch.py --ignore=.*test_jax.py --ignore=.*test_keras.py$", ""),
    ("kerasnccl2", "-n 2 .*tests/gpu/test_keras.py$", "torch"),
    ("kerasjax2", "-n 2 .*tests/gpu/test_keras.py$", "jax"),
    ("killed", "tests/gpu/test_killed.py tests/gpu/test_parameter_server.py -k", ""),
])  # fmt: skip
def test_what_a_part_runs(tmp_path, part, tests, backend):
    """Those of a framework run in parts of its own, and jobs in one process."""
    given = script_with(tmp_path, f'echo "${{KERAS_BACKEND-}}: $*" >>{tmp_path}/ran.txt')
    subprocess.run([SCRIPT], env={**given, "PARTS": part}, capture_output=True)
    (ran,) = [line for line in (tmp_path / "ran.txt").read_text().splitlines() if "-m pytest" in line]
    assert ran.startswith(f"{backend}: ") and re.search(tests, ran), ran


def plan(**environ):
    """Return the limits by part, if all use theirs up."""
    lines = subprocess.run([SCRIPT, "--plan"], env={**os.environ, **environ}, capture_output=True, text=True).stdout
    return {name: int(seconds) for name, seconds, _ in map(str.split, lines.splitlines())}


def test_no_part_takes_the_time_of_those_behind_it():
    """Where all use up their limits there is time for all; where there is less time each has a share."""
    limits = plan()
    assert len(limits) == 18 and sum(limits.values()) <= 480 and min(limits.values()) >= 15
    assert plan(LIMIT="485")["staged2"] == limits["staged2"] + 5, "what is to spare goes to the first"
    assert plan(PARTS="staged2 jax2", LIMIT="480") == {"staged2": 110, "jax2": 60}
    assert plan(PARTS="staged2 killed", LIMIT="26") == {"staged2": 17, "killed": 9}


def test_the_cores_alone_have_a_run_of_their_own_that_fits():
    """In 7 minutes each part has what is kept for it; in 5 each has a share, and no part is without."""
    parts = "cores2 cores4 cores8 cores16 firststeps8"
    limits, short = plan(PARTS=parts, LIMIT="420"), plan(PARTS=parts, LIMIT="300")
    kept = {"cores2": 60, "cores4": 60, "cores8": 60, "cores16": 90, "firststeps8": 50}
    assert all(limits[name] >= kept[name] for name in parts.split()) and sum(limits.values()) == 420
    assert all(short[name] >= kept[name] * 300 // 320 for name in parts.split()) and sum(short.values()) <= 300
    assert not {*limits} & {*plan()}


def test_the_page_has_what_this_run_measured_and_judges_a_card_alone(tmp_path):
    """What an earlier run left there is none of it; without a card no target is said to be reached."""
    row = row_of("gpt", 100, "float32", "mpidist", "ours", [1e-3], ("DDP", 1e-3))
    overlapped = {"gpt: overlapped": {"part of the sums": 0.5, "turns": 4}}
    launch = Launch(
        "gpu-steps", [], 2, "An MPI 1.0", "", {}, [row, replace(row, who="DDP", kind="peer")], {}, overlapped
    )
    (tmp_path / "parts.tsv").write_text("steps2\t30\t80\tpassed\t\n")
    for name in ("gpu-1.json", "about.json", "gpu-steps-2.json", "all-reduce-16-cores-8.json"):
        launches.write(tmp_path / name, [launch])
        os.utime(tmp_path / name, (time := 1e9 + len(list(tmp_path.iterdir())), time))
    for cards, verdict in (([{"name": "A card"}], True), ({"missing": "nvidia-smi"}, False)):
        (tmp_path / "about.json").write_text(json.dumps({"cards": cards}))
        os.utime(tmp_path / "about.json", (1e9 + 3, 1e9 + 3))
        results.write(tmp_path, 31, 480)
        page = (tmp_path / "results.md").read_text()
        assert ("reached" in page) == verdict and page.startswith("# On a GPU") == verdict
        assert "part of the sums 0.5" in page and "| steps2 | 30 | 80 | passed |  |" in page
        assert json.loads((tmp_path / "results.json").read_text())["benchmarks"] == [
            "all-reduce-16-cores-8.json",
            "gpu-steps-2.json",
        ]
