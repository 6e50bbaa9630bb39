"""The cluster that the tests of this folder share; they are skipped where there can be none."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import PLUGINS, Slurm, family, mpi, stop


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-slurm", action="store_true", help="fail, not skip, where no Slurm can be started")


@pytest.fixture(scope="session")
def slurm(request: pytest.FixtureRequest) -> Iterator[Slurm]:
    """A Slurm of two nodes, for all tests of the session."""
    if family(mpi().vendor) not in PLUGINS:
        _without(request, f"mpi4py has no Open MPI and no MPICH: {mpi().title or mpi().error}")
    folder = Path(tempfile.mkdtemp(prefix="slurm."))
    try:
        cluster = Slurm.start(folder)
    except OSError as error:
        _without(request, f"no Slurm on this machine: {error}")
    try:
        yield cluster
    finally:
        stop(folder)


@pytest.fixture(autouse=True)
def nothing_of_ours_is_left(slurm: Slurm) -> Iterator[None]:
    """After every test, whatever happened in it, no node has anything of mpidist's in its shared memory."""
    yield
    assert not [name for name in slurm.shared_memory() if "mpidist" in name]


def _without(request: pytest.FixtureRequest, reason: str) -> None:
    if request.config.getoption("--require-slurm"):
        pytest.fail(reason)
    pytest.skip(reason)
