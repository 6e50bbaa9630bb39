"""The launcher's command line: arguments in, a list and the reasons out."""

from __future__ import annotations

import os
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.commands.launch.command_line import command_line, other_python, program_command
from mpidist.commands.launch.cores import Cores
from mpidist.commands.launch.room import Room

SET = {"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "1", "UCX_DEBUG_SIGNO": "SIGHUP"}


def line(vendor="Open MPI", ranks=2, cores=4, restricted=False, environ=SET, root=False):
    return command_line("mpirun", vendor, ranks, Cores(cores, restricted), environ, root)


@pytest.mark.parametrize(
    "program, module, expected",
    [
        (["train.py", "--epochs", "3"], None, [sys.executable, "train.py", "--epochs", "3"]),
        ([], ["pytest", "-x"], [sys.executable, "-m", "pytest", "-x"]),
        (["./simulate", "train.py"], None, ["./simulate", "train.py"]),
    ],
)
def test_what_a_rank_executes(program, module, expected):
    assert program_command(program, module) == expected


def environment(folder, virtual=True):
    """Return the interpreter of a new environment: a link, as ``python -m venv`` makes it."""
    (folder / "bin").mkdir(parents=True)
    if virtual:
        (folder / "pyvenv.cfg").touch()
    python = folder / "bin" / "python3"
    python.symlink_to(os.path.realpath(sys.executable))
    return str(python)


def test_a_python_of_another_environment_is_another(tmp_path, monkeypatch):
    own, other = environment(tmp_path / "own"), environment(tmp_path / "other")
    monkeypatch.setattr(sys, "executable", own)
    assert other_python([other, "train.py"]) == other
    assert other_python([own, "train.py"]) is None
    monkeypatch.setenv("PATH", os.path.dirname(other))
    assert other_python(["python3"]) == other
    monkeypatch.setenv("PATH", os.path.dirname(own))
    assert other_python(["python3"]) is None


def test_two_links_to_a_python_without_environments_are_the_same(tmp_path, monkeypatch):
    one, two = environment(tmp_path / "one", virtual=False), environment(tmp_path / "two", virtual=False)
    monkeypatch.setattr(sys, "executable", one)
    assert other_python([two]) is None


@pytest.mark.parametrize("program", [[], ["./simulate"], ["train.py"], ["pythonista"], ["python0.0"]])
def test_what_is_no_python_is_not_another(program):
    assert other_python(program) is None


@pytest.mark.parametrize(
    "case, expected",
    [
        (dict(ranks=2, cores=4), ["--map-by", "slot:PE=2", "--bind-to", "core:if-supported"]),
        (dict(ranks=3, cores=4), ["--map-by", "slot:PE=1", "--bind-to", "core:if-supported"]),
        (dict(ranks=2, cores=4, restricted=True), ["--bind-to", "none"]),
        (
            dict(ranks=8, cores=4),
            ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"],
        ),
        (
            dict(ranks=1, cores=1, root=True),
            ["--allow-run-as-root", "--map-by", "slot:PE=1", "--bind-to", "core:if-supported"],
        ),
    ],
)
def test_open_mpi(case, expected):
    assert line("Open MPI", **case).arguments == ["mpirun", "-n", str(case["ranks"]), *expected]


@pytest.mark.parametrize(
    "case, expected",
    [
        (dict(ranks=2, cores=4), ["-bind-to", "core:2"]),
        (dict(ranks=2, cores=4, restricted=True), ["-bind-to", "none"]),
        (dict(ranks=8, cores=4, root=True), ["-bind-to", "none"]),
    ],
)
def test_mpich(case, expected):
    assert line("MPICH", **case).arguments == ["mpirun", "-n", str(case["ranks"]), *expected]


def test_ranks_that_share_cores_sleep_while_they_wait_under_mpich():
    heavy = "MPIR_CVAR_ENABLE_HEAVY_YIELD"
    assert line("MPICH", ranks=8).environ == {heavy: "1"}
    assert line("MPICH", ranks=4).environ == {}
    assert line("MPICH", ranks=8, environ={**SET, heavy: "0"}).environ == {}


def test_an_unknown_launcher_gets_no_arguments_of_others():
    assert line("Intel MPI", ranks=9, root=True).arguments == ["mpirun", "-n", "9"]


def test_variables_of_the_user_are_left_alone():
    assert line(environ=SET).environ == {}
    added = {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1", "UCX_DEBUG_SIGNO": "0"}
    for name in added:
        rest = {other: value for other, value in added.items() if other != name}
        assert line(environ={name: ""}, ranks=2, cores=4).environ == rest


def test_a_terminal_shows_whole_lines_by_itself():
    environ = {"OMP_NUM_THREADS": "8", "UCX_DEBUG_SIGNO": "0"}
    assert command_line("mpirun", "Open MPI", 2, Cores(2, False), environ, root=False, terminal=True).environ == {}


@given(
    vendor=st.sampled_from(["Open MPI", "MPICH", "Intel MPI"]),
    ranks=st.integers(1, 300),
    cores=st.integers(1, 300),
    restricted=st.booleans(),
    root=st.booleans(),
)
def test_threads_and_bound_cores_never_exceed_the_cores(vendor, ranks, cores, restricted, root):
    found = line(vendor, ranks, cores, restricted, {}, root)
    threads = int(found.environ["OMP_NUM_THREADS"])
    assert threads >= 1
    assert threads * ranks <= max(cores, ranks)
    bound = [int(cores) for cores in re.findall(r"(?:PE=|core:)(\d+)", " ".join(found.arguments))]
    assert bound in ([], [threads])
    assert not (bound and (restricted or ranks > cores))


@pytest.mark.parametrize("vendor", ["Open MPI", "MPICH"])
@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("given", ["--bind-to core", "-bind-to core:1", "--map-by ppr:1:node"])
def test_who_places_the_ranks_does_it_alone(vendor, ranks, given):
    found = command_line("mpirun", vendor, ranks, Cores(4, False), {}, False, launcher_args=given.split())
    assert not {"--bind-to", "-bind-to", "--map-by"} & set(found.arguments)
    assert not any("-bind-to" in reason or "-map-by" in reason for reason in found.reasons)


def test_hosts_are_no_places():
    plain, hosts = (
        command_line("mpirun", "Open MPI", 2, Cores(4, False), {}, False, launcher_args=given)
        for given in ([], ["--host", "node1,node2"])
    )
    assert hosts.arguments == plain.arguments


def test_every_addition_has_its_reason():
    found = line("Open MPI", ranks=8, cores=4, environ={}, root=True)
    added = ["--allow-run-as-root", "--map-by", "--bind-to", "--mca", "OMP_NUM_THREADS=1", "PYTHONUNBUFFERED=1"]
    added += ["UCX_DEBUG_SIGNO=0"]
    for argument in added:
        assert sum(reason.startswith(argument) for reason in found.reasons) == 1
    assert "--map-by :OVERSUBSCRIBE: 8 ranks share 4 cores" in found.reasons


@pytest.mark.parametrize(
    "cores, expected",
    [
        (Cores(4, False), ["--map-by", "slot:PE=2:OVERSUBSCRIBE", "--bind-to", "core:if-supported"]),
        (Cores(4, True), ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]),
    ],
)
def test_open_mpi_is_told_where_there_are_cores_and_no_places(cores, expected):
    """As in a job of one task with many cores: without the word the launcher refuses."""
    room = Room(2, cores, "node1", "Slurm job 41 counts on 1 of the 2 ranks on node1")
    found = command_line("mpirun", "Open MPI", 3, Cores(1, False), SET, False, room=room)
    assert found.arguments == ["mpirun", "-n", "3", *expected]
    assert sum("OVERSUBSCRIBE" in reason and room.too_few_places in reason for reason in found.reasons) == 1


def test_the_host_with_the_least_room_counts_and_not_all_ranks_together():
    room = Room(2, Cores(8, False), "node1")
    found = command_line("mpirun", "Open MPI", 4, Cores(1, False), {}, False, room=room)
    assert found.environ["OMP_NUM_THREADS"] == "4"
    assert "slot:PE=4" in found.arguments
    assert "OMP_NUM_THREADS=4: 8 cores for 2 ranks on node1" in found.reasons
