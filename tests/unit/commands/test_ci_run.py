"""`.ci/run` makes environments beside its first stages, and waits for none but the one that a stage needs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT

#: Notes when a target begins and ends; one whose name is a file waits until the file is gone, or for a minute.
MAKE = """#!/bin/bash
target=${!#}
echo "begin $target" >>calls
trap 'echo "killed $target" >>calls; exit 1' TERM
for ((i = 0; i < 600; i++)); do [ -e "$target" ] || break; sleep 0.1; done
[ "$target" != test ] || rm -f slow-environment
[ "$target" != broken ] || until grep -q "begin slow-environment" calls; do sleep 0.05; done
echo "end $target" >>calls
[ "$target" != broken ]
"""


@pytest.fixture
def run(tmp_path: Path):
    """A function that runs a copy of the script for some stages, with a `make` that notes its calls."""
    for name, text in {".ci/run": (ROOT / ".ci" / "run").read_text(), "bin/make": MAKE}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def stages(*names: str) -> tuple[int, list[str]]:
        environ = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        line = [str(tmp_path / ".ci" / "run"), *names]
        done = subprocess.run(line, env=environ, stdout=subprocess.DEVNULL, timeout=60)
        return done.returncode, (tmp_path / "calls").read_text().splitlines()

    yield stages
    shutil.rmtree(tmp_path)


def test_a_stage_waits_for_its_own_environment_and_not_for_a_slow_one(run, tmp_path: Path):
    (tmp_path / "slow-environment").touch()
    status, calls = run("environment", "quick-environment", "test", "slow-environment")
    assert status == 0
    assert calls.index("end quick-environment") < calls.index("begin test") < calls.index("end slow-environment")
    assert (
        calls.count("begin quick-environment") == calls.count("begin slow-environment") == 2
    )  # beside, and as a stage


def test_a_run_that_fails_ends_what_is_being_made(run, tmp_path: Path):
    (tmp_path / "slow-environment").touch()
    status, calls = run("environment", "broken", "slow-environment")
    assert status == 1 and "killed slow-environment" in calls and "end slow-environment" not in calls
