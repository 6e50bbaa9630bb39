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


#: What the scripts ask the machine for; nothing is installed here.
MACHINE = {
    "python": 'echo "$@"; exit 0',
    "ip": ":",
    "tc": ":",
    "dpkg-query": "exit 1",
    "apt-get": "echo E: no network; exit 100",
    "mpirun.openmpi": 'echo "$@"',
}
SCRIPTS = (".ci/cluster", "Makefile", "setup.cfg", "tests/hdf5/build-parallel-h5py") + tuple(
    f"{folder}/{script}" for folder in TESTS for script in ("up", "down")
)


@pytest.fixture
def call(tmp_path: Path):
    """A function that runs a copy of the script where programs of the machine are others, by name and shell text.

    The clusters of the folders in `starting` can be started, and an h5py can be built where `builds`.
    """
    for path in SCRIPTS:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)

    def run(starting: Iterable[str] = (), builds: bool = False, **programs: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "bin").mkdir()
        for folder in starting:
            (tmp_path / folder / "up").write_text("#!/bin/sh\n")
        if builds:
            build = "#!/bin/sh\nmkdir -p $1/bin && cp bin/python $1/bin\n"
            (tmp_path / "tests" / "hdf5" / "build-parallel-h5py").write_text(build)
        for name, text in {**MACHINE, **programs}.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        environ["PATH"] = f"{tmp_path}/bin:{environ['PATH']}"
        line = [str(tmp_path / ".ci" / "cluster"), "python", "ran"]
        return subprocess.run(line, env=environ, capture_output=True, text=True, timeout=120)

    return run


def _left_out(folder: Path) -> list[str]:
    return (folder / "build" / "left_out").read_text().splitlines()


def _hdf5(why: str) -> str:
    packages = "gcc libc6-dev openmpi-bin libopenmpi-dev libhdf5-openmpi-dev"
    return f"not run here: parallel HDF5: build-parallel-h5py: {why} {packages}; make test-mpio runs it"


@pytest.mark.parametrize(
    ("programs", "why", "hdf5"),
    [
        ({"id": "echo 1000"}, "needs root", "needs root and apt-get to install"),
        ({"id": "echo 0", "unshare": "exit 1"}, "may not make namespaces here", "cannot install"),
    ],
    ids=["no root", "no namespaces"],
)
def test_what_this_machine_cannot_run_is_said_by_part(
    call, tmp_path: Path, programs: dict[str, str], why: str, hdf5: str
):
    done = call(**programs)
    expected = [
        f"not run here: two hosts: netns-up: {why}; make test-netns runs it",
        f"not run here: Slurm: slurm-up: {why}; make test-slurm runs it",
        _hdf5(hdf5),
    ]
    assert (done.returncode, done.stdout.splitlines()) == (0, expected), done.stderr
    assert _left_out(tmp_path) == expected


def test_slurm_that_cannot_be_installed_is_left_out_and_the_hosts_run(call, tmp_path: Path):
    done = call(["tests/netns"], id="echo 0", unshare=":")
    assert done.returncode == 0 and "-m pytest" in done.stdout and "tests/netns --ran-log ran/netns" in done.stdout
    packages = "slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libpmix-dev"
    slurm = f"not run here: Slurm: slurm-up: cannot install {packages}; make test-slurm runs it"
    assert _left_out(tmp_path) == [slurm, _hdf5("cannot install")]


def test_where_all_can_be_had_all_run_and_none_may_be_skipped(call, tmp_path: Path):
    done = call(TESTS, builds=True)
    assert done.returncode == 0 and not (tmp_path / "build" / "left_out").exists(), done.stderr
    for folder, options in TESTS.items():
        assert f"{folder} --ran-log ran/{folder[6:]} {options}\n" in done.stdout
    assert "-n 2 .venv-hdf5/bin/python -m pytest -q tests/hdf5 --with-mpi --ran-log build/ran/hdf5\n" in done.stdout


def test_the_reason_is_pip_s_where_the_script_has_none(call, tmp_path: Path):
    done = call(TESTS, builds=True, python='echo "$@"; [ "$2" != pip ] || { echo "ERROR: no index" >&2; exit 1; }')
    assert done.returncode == 0, done.stderr
    assert _left_out(tmp_path) == ["not run here: parallel HDF5: ERROR: no index; make test-mpio runs it"]


@pytest.mark.parametrize("program", ["python", "mpirun.openmpi"])
def test_a_test_that_fails_is_a_failure_and_the_others_run_all_the_same(call, program: str):
    done = call(TESTS, builds=True, **{program: 'echo "$@"; [ "$2" = pip ] || exit 1'})
    assert done.returncode != 0 and all(folder in done.stdout for folder in (*TESTS, "tests/hdf5"))
