"""Set-up shared by all tests."""

from __future__ import annotations

import gc
import os

# before NumPy is loaded: its threads would fight for the cores with ranks that are threads, and with other ranks
os.environ.setdefault("OMP_NUM_THREADS", "1")

import platform  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402

import hypothesis  # noqa: E402
import numpy  # noqa: E402
import pytest  # noqa: E402

# derandomized, so that every rank of a parallel test draws the same examples, and a failure comes again;
# no deadline, because no test may depend on how busy the machine is; with EVERY_GRID, 100 examples
_always = hypothesis.settings(deadline=None, derandomize=True, database=None)
hypothesis.settings.register_profile("every grid", _always)
hypothesis.settings.register_profile("mpidist", _always, max_examples=30)
hypothesis.settings.load_profile("every grid" if os.environ.get("EVERY_GRID") else "mpidist")


def pytest_configure(config: pytest.Config) -> None:
    """Keep measurements in a folder of this run: what was measured here before must not decide what is tested.

    Jobs and their ranks inherit it; of the ranks of a parallel test, rank 0's counts.
    """
    folder = tempfile.TemporaryDirectory(prefix="mpidist-tuning-")
    config.add_cleanup(folder.cleanup)
    os.environ["MPIDIST_TUNING_FOLDER"] = folder.name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Take what is there before the first test, a million objects, out of what the collector of garbage looks through.

    In between it is off, and afterwards it looks less often than at every 700 objects: together a tenth of the run.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000)
        gc.enable()


@pytest.fixture
def without_collector() -> Iterator[None]:
    """Have no collector of garbage: what is gone was freed by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def pytest_report_header(config: pytest.Config) -> str:
    return f"mpidist on Python {platform.python_version()}, NumPy {numpy.__version__}"


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes `-n auto` starts: two a core, for many tests wait for a deadline."""
    from mpidist.commands.launch.cores import visible_cores

    return visible_cores().count * 2
