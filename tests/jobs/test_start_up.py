"""``mpidist run`` when a rank does not come to the first strategy, and what is left behind of jobs that fail."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from mpidist.commands.launch.probe import without_launcher
from tests.helpers.launch import ROOT, launcher, run_job, run_process

#: Rank 1 does something before the first strategy, which all others go to.
SCRIPT = """
import os, sys, threading
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")))
if rank == 1:
    {}
import mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
print("rank", rank, "of", strategy.num_replicas_in_sync, flush=True)
"""

WAITING = "rank 1 ended before all ranks had joined; ranks 0, 2 wait for it in MPI's start-up"


def run(tmp_path, script, *options, ranks=3, **settings):
    path = tmp_path / "script.py"
    path.write_text(script)
    environ = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT), **settings}
    return run_process([sys.executable, "-m", "mpidist", "run", "-n", str(ranks), *options, str(path)], environ, 300)


def test_a_rank_that_raises_before_the_first_strategy(tmp_path):
    result = run(tmp_path, SCRIPT.format("raise ValueError('no data')"))
    assert result.returncode == 1
    assert "\nValueError: no data\n" in result.stderr
    assert result.stderr.endswith("mpidist run: rank 1 failed first; its traceback is above\n")
    # Open MPI's launcher ends the job by itself when a rank's exit status is not 0
    assert (WAITING in result.stderr) == (launcher().vendor != "Open MPI")


def test_a_rank_that_exits_before_the_first_strategy(tmp_path):
    result = run(tmp_path, SCRIPT.format("sys.exit(0)"))
    assert result.returncode == 1
    assert WAITING in result.stderr
    assert "was ended by signal" not in result.stderr


def test_a_late_rank_is_named_once_and_the_job_goes_on(tmp_path):
    # comes when it has been missed, alone or with rank 2: the warning goes to a file that it reads
    late = f"""while "not come to it" not in open({str(tmp_path / "stderr")!r}).read():
        threading.Event().wait(0.05)"""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(late))
    environ = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT), "MPIDIST_WARN_SECONDS": "0.5"}
    command = f'exec "$0" -m mpidist run -n 3 {script} 2>{tmp_path / "stderr"}'
    result = run_process(["sh", "-c", command, sys.executable], environ, 300)
    assert result.returncode == 0
    assert sorted(result.stdout.split("\n")) == ["", "rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    assert (tmp_path / "stderr").read_text().count("mpidist run: warning: ") == 1


def test_a_rank_that_never_comes(tmp_path):
    result = run(tmp_path, SCRIPT.format("threading.Event().wait()"), MPIDIST_TIMEOUT_SECONDS="1")
    assert result.returncode == 1
    assert "rank 1 has not come to it. The job was ended" in result.stderr


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("way", ["sys.exit(0)", "from mpi4py import MPI; sys.exit(0)"])
def test_under_another_launcher_the_start_has_a_deadline_too(gone, way):
    script = SCRIPT.replace("rank == 1", f"rank == {gone}").format(way)
    result = run_job(3, script, timeout_seconds=300, env={"MPIDIST_WARN_SECONDS": "1", "MPIDIST_TIMEOUT_SECONDS": "4"})
    assert result.returncode != 0
    assert "has waited 1 s in MPI's start-up for the other ranks" in result.stderr
    assert "has waited 4 s in MPI's start-up for the other ranks. A rank has ended before it made" in result.stderr


def test_ranks_that_do_not_use_mpi_may_end_whenever_they_like(tmp_path):
    script = SCRIPT.partition("import mpidist")[0].format("sys.exit(0)") + "threading.Event().wait(4)\nprint('done')"
    result = run(tmp_path, script, MPIDIST_WARN_SECONDS="0.1", MPIDIST_TIMEOUT_SECONDS="1")
    assert (result.returncode, result.stdout.split()) == (0, ["done", "done"])
    assert "start-up" not in result.stderr


def test_a_variable_that_cannot_be_read_is_told_once(tmp_path):
    result = run(tmp_path, "import mpidist", MPIDIST_WARN_SECONDS="soon")
    assert result.returncode == 1
    assert result.stderr.count("MPIDIST_WARN_SECONDS='soon'") == 1


# -- what is left behind ----------------------------------------------------------------------------------------------

#: Every rank names the shared memory that MPI has given it; then one is killed.
KILLED = """
import os, signal, mpidist
strategy = mpidist.MultiWorkerMirroredStrategy()
with open("/proc/self/maps") as file:
    names = {line.split(None, 5)[5].strip() for line in file if " /dev/shm/" in line}
print("\\n".join(name for name in names if not name.endswith("(deleted)")), flush=True)
strategy.reduce("sum", 1.0, axis=None)
if strategy.extended.replica_id == 1:
    os.kill(os.getpid(), signal.SIGKILL)
strategy.reduce("sum", 1.0, axis=None)
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="not Linux")
@pytest.mark.parametrize("options", [(), ("--quiet",)])
def test_no_shared_memory_is_left_behind(tmp_path, options):
    result = run(tmp_path, KILLED, *options, ranks=2)
    assert result.returncode != 0
    names = set(result.stdout.split())
    assert names
    assert [name for name in names if Path(name).exists()] == []
    said = "removed what MPI had left behind: /dev/shm/mpich_shm_" in result.stderr
    assert said == (launcher().vendor == "MPICH" and not options)


#: Rank 0 notes the session folder of its launcher, and the shared memory of MPI, and kills a process.
FOLDERS = """
import os, signal, sys, threading
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    folder, launcher = os.environ["PMIX_SERVER_TMPDIR"], os.getppid()
    with open("/proc/%d/stat" % launcher) as file:
        run = int(file.read().rpartition(")")[2].split()[1])
    with open("/proc/self/maps") as file:
        segments = [line.split(None, 5)[5].strip() for line in file if "/sm_segment." in line]
    with open(os.path.join(os.environ["NOTES"], "folders"), "w") as file:
        file.write("\\n".join([folder if os.path.isdir(folder) else "none", *{{*map(os.path.dirname, segments)}}]))
    os.kill({}, signal.SIGKILL)
threading.Event().wait()
"""

has_folders = pytest.mark.skipif(
    launcher().vendor != "Open MPI" or not Path("/proc/self/maps").exists(), reason="of Open MPI, on Linux"
)


@has_folders
@pytest.mark.parametrize("killed", ["os.getpid()", "launcher", "run"])
def test_a_job_has_folders_of_its_own_that_go_with_it(tmp_path, killed):
    place = tmp_path / ("long" * 40)
    place.mkdir()
    result = run(tmp_path, FOLDERS.format(killed), ranks=2, TMPDIR=str(place), NOTES=str(tmp_path))
    assert result.returncode != 0
    session, segments = (tmp_path / "folders").read_text().split("\n")
    assert session.startswith(f"{place}/mpidist-run-")
    assert segments.startswith("/dev/shm/sm_segments.")
    # where mpidist run was killed, its watchdog removes them, and nobody waits for that
    end = time.monotonic() + 60
    while (left := [*place.iterdir(), *Path("/dev/shm").glob(Path(segments).name)]) and time.monotonic() < end:
        time.sleep(0.01)
    assert left == []


@has_folders
@pytest.mark.parametrize("way", ["variable", "argument", "file"])
def test_a_session_folder_stays_where_the_user_has_placed_it(tmp_path, way):
    name, place = "prte_tmpdir_base", tmp_path / "placed"
    (tmp_path / ".prte").mkdir()
    (tmp_path / ".prte" / "mca-params.conf").write_text(f"{name} = {place}" if way == "file" else "")
    options = ["--launcher-args", f"--prtemca {name} {place}"] if way == "argument" else []
    variables = {f"PRTE_MCA_{name}": str(place)} if way == "variable" else {}
    script = "import os; print(os.environ['PMIX_SERVER_TMPDIR'])"
    result = run(tmp_path, script, *options, ranks=1, HOME=str(tmp_path), **variables)
    assert result.stdout.startswith(f"{place}/ompi."), result.stderr


@has_folders
def test_shared_memory_stays_where_the_user_has_placed_it(tmp_path):
    script = FOLDERS.format("os.getpid()")
    result = run(tmp_path, script, ranks=2, NOTES=str(tmp_path), OMPI_MCA_btl_sm_backing_directory=str(tmp_path))
    assert result.returncode != 0
    assert (tmp_path / "folders").read_text().split("\n")[1:] == [str(tmp_path)]
