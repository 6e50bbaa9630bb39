"""The clusters of the tests of this folder; they are skipped where there can be none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.ran_log import RanLog, add_option
from tests.jobs.conftest import pytest_terminal_summary
from tests.slurm.cluster import PLUGINS, Slurm, family, mpi, stop

__all__ = ["pytest_terminal_summary"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-slurm", action="store_true", help="fail, not skip, where no Slurm can be started")
    add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RanLog(config), "ran-log")


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A Slurm of two nodes, for all tests of the session but those of a module that has another one."""
    yield from _running(request, 2)


@pytest.fixture(scope="module")
def four_nodes(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A Slurm of four nodes, for the tests of a module."""
    yield from _running(request, 4)


@pytest.fixture(autouse=True)
def nothing_of_ours_is_left(slurm: Slurm) -> Iterator[None]:
    """After every test, whatever happened in it, no node has anything of mpidist's in its shared memory."""
    yield
    assert not [name for name in slurm.shared_memory() if "mpidist" in name]


def _running(request: pytest.FixtureRequest, nodes: int) -> Iterator[Slurm]:
    """Start a cluster, and stop it in the end."""
    if family(mpi().vendor) not in PLUGINS:
        _without(request, f"mpi4py has no Open MPI and no MPICH: {mpi().title or mpi().error}")
    folder = Path(tempfile.mkdtemp(prefix="slurm."))
    try:
        cluster = Slurm.start(folder, nodes)
    except OSError as error:
        _without(request, f"no Slurm on this machine: {error}")
    try:
        yield cluster
    finally:
        stop(folder)


def _without(request: pytest.FixtureRequest, reason: str) -> None:
    if request.config.getoption("--require-slurm"):
        pytest.fail(reason)
    pytest.skip(reason)
