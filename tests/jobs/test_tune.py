"""``mpidist tune`` on real ranks, and what later launches make of it."""

from __future__ import annotations

import json
import os
import sys

import pytest

from mpidist.commands.launch.probe import without_launcher
from tests.helpers.launch import ROOT, run_process

pytestmark = pytest.mark.measures

#: What the command says when another program took the time that one half of its measurement lacks.
DISTURBED = "other programs use these hosts"
SMALL = ["--largest", "64KiB", "--seconds", "0.1"]


@pytest.fixture
def mpidist(tmp_path):
    """Run the command with a store of its own, again where other programs disturb its measurement."""

    def run(*arguments, **variables):
        environ = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT), **variables}
        environ["MPIDIST_TUNING_FOLDER"] = str(tmp_path / "tuning")
        for _ in range(20):
            result = run_process([sys.executable, "-m", "mpidist", *arguments], environ, 300)
            if DISTURBED not in result.stderr:
                break
        return result

    return run


def test_what_is_tuned_is_kept_and_shown(mpidist, tmp_path):
    tuned = mpidist("tune", "-n", "2", *SMALL)
    assert tuned.returncode == 0, tuned.stderr
    (path,) = (tmp_path / "tuning").iterdir()
    assert str(path) in tuned.stdout and "inside a node" in tuned.stdout
    table = tuned.stdout.partition("level")[2].partition("\n\nmeasured in")[0]
    for command in (["run", "--quiet", "-n", "2", "-m", "mpidist", "info"], ["info"]):
        shown = mpidist(*command)
        assert shown.returncode == 0, shown.stderr
        assert table in shown.stdout
    others = mpidist("run", "--quiet", "-n", "3", "-m", "mpidist", "info")
    assert table not in others.stdout and "nothing was measured for these ranks yet" in others.stdout


def test_json_and_a_dry_run(mpidist, tmp_path):
    tuned = mpidist("tune", "-n", "2", "--json", "--dry-run", *SMALL)
    assert tuned.returncode == 0, tuned.stderr
    found = json.loads(tuned.stdout)
    assert set(found) == {"model", "points", "segments", "segment_bytes"} and "native" in found["points"]
    assert not (tmp_path / "tuning").exists()


def test_virtual_nodes_have_both_levels(mpidist):
    tuned = mpidist("tune", "-n", "4", *SMALL, MPIDIST_VIRTUAL_NODES="2")
    assert tuned.returncode == 0, tuned.stderr
    assert "2 nodes x 2 ranks" in tuned.stdout
    assert "inside a node" in tuned.stdout and "between nodes" in tuned.stdout


def test_a_folder_that_cannot_be_written_is_said_and_is_a_failure(mpidist, tmp_path):
    (tmp_path / "tuning").write_text("in the way")
    tuned = mpidist("tune", "-n", "2", *SMALL)
    assert tuned.returncode != 0
    assert "cannot be kept" in tuned.stderr and "Traceback" not in tuned.stderr
