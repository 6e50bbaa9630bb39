"""`.ci/cluster` says of every part that a machine cannot run why it did not, and passes."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT

TESTS = {"tests/netns": "--require-netns", "tests/slurm": "--require-slurm -m brief"}


@pytest.fixture
def call(tmp_path: Path):
    """A function that runs a copy of the script where programs of the machine are others, by name and shell text.

    The clusters of the folders in `starting` can be started.
    """
    for path in (".ci/cluster", "tests/netns/up", "tests/slurm/up", "tests/netns/down", "tests/slurm/down"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)

    def run(starting: Iterable[str] = (), **programs: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "bin").mkdir()
        for folder in starting:
            (tmp_path / folder / "up").write_text("#!/bin/sh\n")
        for name, text in {"python": 'echo "$@"; exit 0', "ip": ":", "tc": ":", **programs}.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        environ = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
        line = [str(tmp_path / ".ci" / "cluster"), "python", "ran"]
        return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)

    return run


def _left_out(folder: Path) -> list[str]:
    return (folder / "build" / "left_out").read_text().splitlines()


HDF5 = "not run here: parallel HDF5: its h5py takes minutes to compile; make test-mpio runs it"


@pytest.mark.parametrize(
    ("programs", "why"),
    [
        ({"id": "echo 1000"}, "needs root"),
        ({"id": "echo 0", "unshare": "exit 1"}, "may not make namespaces here"),
    ],
    ids=["no root", "no namespaces"],
)
def test_what_this_machine_cannot_run_is_said_by_part(call, tmp_path: Path, programs: dict[str, str], why: str):
    done = call(**programs)
    expected = [
        f"not run here: two hosts: netns-up: {why}; make test-netns runs it",
        f"not run here: Slurm: slurm-up: {why}; make test-slurm runs it",
        HDF5,
    ]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr
    assert _left_out(tmp_path) == expected


def test_slurm_that_cannot_be_installed_is_left_out_and_the_hosts_run(call, tmp_path: Path):
    nothing = {"dpkg-query": "exit 1", "apt-get": "echo E: no network; exit 100"}
    done = call(["tests/netns"], id="echo 0", unshare=":", **nothing)
    assert done.returncode == 0 and "-m pytest" in done.stdout and "tests/netns --ran-log ran/netns" in done.stdout
    packages = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libpmix-dev"
    slurm = f"not run here: Slurm: slurm-up: cannot install {packages}; make test-slurm runs it"
    assert _left_out(tmp_path) == [slurm, HDF5]


def test_where_all_can_be_had_all_run_and_none_may_be_skipped(call, tmp_path: Path):
    done = call(TESTS)
    assert done.returncode == 0 and _left_out(tmp_path) == [HDF5], done.stderr
    for folder, options in TESTS.items():
        assert f"{folder} --ran-log ran/{folder[6:]} {options}\n" in done.stdout


def test_a_test_that_fails_is_a_failure_and_the_others_run_all_the_same(call):
    done = call(TESTS, python='echo "$@"; exit 1')
    assert done.returncode == 1 and all(folder in done.stdout for folder in TESTS)
