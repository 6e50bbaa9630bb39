"""``mpidist doctor`` on this machine alone: what a process sees of itself, and the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.commands import doctor, doctor_rank
from mpidist.commands.launch.cores import visible_cores
from mpidist.diagnosis.case import Case
from mpidist.diagnosis.finding import fail, ok, warn


def test_a_process_sees_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("MPIDIST_ALGORITHM", "ring")
    seen = doctor_rank.observe(str(tmp_path), "Open MPI 5", asks_mpi=False)
    assert seen.core_count == visible_cores().count and {*seen.processors} == os.sched_getaffinity(0)
    assert seen.environ["MPIDIST_ALGORITHM"] == "ring" and seen.environ["PWD"] == os.getcwd()
    assert seen.software["MPI"] == "Open MPI 5"
    assert seen.folder.error == "" and seen.folder.free_bytes > 0 and list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there(tmp_path):
    assert doctor_rank.observe(str(tmp_path / "none"), "", False).folder.error == "No such file or directory"


def test_a_working_folder_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    seen = doctor_rank.observe(".", "", False)
    assert seen.environ["PWD"] == "none (No such file or directory)"
    assert seen.folder.error == "No such file or directory"


def test_a_folder_without_locks(tmp_path, monkeypatch):
    def refuse(file, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(doctor_rank.fcntl, "flock", refuse)
    assert doctor_rank.observe(str(tmp_path), "", False).folder.lock_error == "ENOLCK No locks available"


def test_a_library_may_lie_in_a_folder_whose_name_has_spaces(tmp_path, monkeypatch):
    expected, lines = doctor_rank._threads(), Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split(maxsplit=5)[5] for line in lines if doctor_rank._LIBRARY.search(line))
    link = tmp_path / "of a user" / "libopenblas.so"
    link.parent.mkdir()
    link.symlink_to(library)
    for path, threads in ((link, expected), (link.parent / "none" / link.name, None)):
        shown = f"7f00-7f01 r-xp 00000000 08:01 17   {path}\n"
        monkeypatch.setattr(doctor_rank.Path, "read_text", lambda _, shown=shown: shown)
        assert doctor_rank._threads() == threads


def test_threads_are_those_that_the_library_has():
    # OpenBLAS of NumPy's wheel takes the variable when it is loaded
    code = "from mpidist.commands import doctor_rank; print(doctor_rank._threads())"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    shown = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert shown.stdout in ("1\n", "None\n"), shown.stderr


@pytest.mark.parametrize("chosen, expected", [(None, "none"), ("pmix", "pmix")])
def test_what_srun_can_do(chosen, expected, monkeypatch):
    monkeypatch.delenv("SLURM_MPI_TYPE", raising=False)
    if chosen:
        monkeypatch.setenv("SLURM_MPI_TYPE", chosen)
    monkeypatch.setattr(doctor, "offered_plugins", lambda: ("none", "pmix", "pmix_v4"))
    monkeypatch.setattr(doctor, "said", lambda command, seconds: "MpiDefault              = none\nMpiParams = (null)\n")
    assert doctor._srun() == (("none", "pmix", "pmix_v4"), expected)


def test_without_srun(monkeypatch):
    monkeypatch.setattr(doctor, "offered_plugins", lambda: ())
    assert doctor._srun() == (None, "")


@pytest.mark.parametrize(
    "findings, status, named",
    [
        ([ok("all is well")], 0, "healthy"),
        ([ok("a"), warn("slow", "make it fast")], 1, "warnings"),
        ([warn("slow", "make it fast"), fail("gone", "mkdir x")], 2, "broken"),
    ],
)
def test_page_and_json_say_the_same(findings, status, named, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "detect_launcher", lambda: None)
    monkeypatch.setattr(doctor, "_alone", lambda folder: Case(()))
    monkeypatch.setattr(doctor, "diagnose", lambda case: [each.named("MPI") for each in findings])
    assert doctor.main([]) == status
    page = capsys.readouterr().out.splitlines()
    assert page[: len(findings)] == [str(each.named("MPI")) for each in findings]
    assert doctor.main(["--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == named
    assert [each["level"] for each in found["findings"]] == [each.level for each in findings]
    assert [each["cure"] for each in found["findings"]] == [each.cure for each in findings]


def test_ranks_that_cannot_be_started_are_a_finding(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "detect_launcher", lambda: None)
    monkeypatch.setattr(doctor, "_alone", lambda folder: Case(()))
    monkeypatch.setattr(doctor, "diagnose", lambda case: [ok("found").named("mpirun")])
    monkeypatch.setattr(doctor.sys, "executable", "/bin/false")
    assert doctor.main(["--launch"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ok    mpirun: found"
    assert lines[1].startswith("FAIL  world: mpidist run: status 1  -> mpidist run -n 2")


def test_a_number_of_components_that_is_none_is_told_in_a_line(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_HET_SIZE", "two")
    assert doctor.main([]) == 2
    expected = "mpidist doctor: SLURM_HET_SIZE: expected the number of the Slurm job's components; got 'two'\n"
    assert capsys.readouterr() == ("", expected)
