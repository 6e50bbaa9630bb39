"""Set-up of the tests on a GPU: that of the parallel tests, and the library whose arrays they use.

``tests/gpu/run`` runs them, and all else that needs a card.  With ``MPIDIST_TEST_ON=numpy`` they run on NumPy's arrays,
but for those marked ``gpu(only=True)``: so their logic is tried where there is no GPU.  With
``MPIDIST_TEST_ON=emulated`` they run on CuPy's arrays on the GPUs of ``tests/gpu/emulated``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mpidist.cluster.launchers import detect_launcher
from mpidist.collectives.ways.device_ways import DeviceWays
from mpidist.device.nccl import Nccl
from mpidist.world import world_communicator
from tests.gpu import emulated, library
from tests.parallel.conftest import pytest_addoption, pytest_configure

__all__ = ["pytest_addoption", "pytest_configure"]

#: It is for one process without a GPU.
collect_ignore_glob = ["libraries"] if detect_launcher() is not None else []

if library.is_emulated():
    emulated.start()

#: They start ranks themselves, which a rank cannot.
collect_ignore = (
    ["test_killed.py", "test_nccl_fails.py", "test_parameter_server.py"] if detect_launcher() is not None else []
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, on NumPy, what it has nothing to show for."""
    if not library.is_numpy():
        return
    left_out = [item for item in items if any(mark.kwargs.get("only") for mark in item.iter_markers("gpu"))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture
def xp() -> Any:
    """The library whose arrays the test uses: CuPy, or NumPy if asked for; without a GPU the test is skipped."""
    return library.library()


class Ways:
    """The ways that arrays on a GPU go: by verbs of NCCL, and through the host."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.verbs: list[str] = []
        for owner, name in ((Nccl, "reduce"), (Nccl, "reduce_parts"), (DeviceWays, "host_buffer")):
            monkeypatch.setattr(owner, name, self._noted(name, getattr(owner, name)))

    def _noted(self, name: str, fn: Any) -> Any:
        return lambda *given: self.verbs.append(name) or fn(*given)

    def problem(self, verb: str) -> str:
        """Return what is wrong where all should have gone by a verb of NCCL; empty also where there is no NCCL."""
        has_nccl = any(not isinstance(each, str) for each in world_communicator().devices.links())
        return f"went by {self.verbs} in place of {verb}" if has_nccl and {*self.verbs} != {verb} else ""


@pytest.fixture
def ways(xp: Any, monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Which ways the test's arrays go."""
    return Ways(monkeypatch)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Rank 0's directory, on every rank."""
    import mpidist

    return mpidist.broadcast_object(tmp_path)
