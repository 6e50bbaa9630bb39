"""Set-up of the tests with real JAX, PyTorch and Keras: that of the parallel tests, and what JAX compiles is kept.

``make test-frameworks`` makes an environment for all of them, and runs their tests there on 1, 2 and 3 ranks.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.parallel import conftest as parallel
from tests.parallel.conftest import pytest_addoption

__all__ = ["pytest_addoption", "pytest_configure"]

_KEPT = Path(__file__).parents[2] / "build" / "jax"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--with-mpi"):
        from mpi4py import MPI

        _keep_what_is_compiled(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    parallel.pytest_configure(config)


def _keep_what_is_compiled(rank: int, size: int) -> None:
    """Have JAX find what it has compiled before: of a test, that is nearly all of the time.

    Each rank has a folder of its own, for JAX writes files that are read meanwhile; it begins with those of one rank.
    """
    folder, first = _KEPT / f"{rank}of{size}", _KEPT / "0of1"
    if first.exists() and not folder.exists():
        shutil.copytree(first, folder)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
