"""A log of the tests that ran, which `tests/parallel/prove_ran.py` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def add_option(parser: pytest.Parser) -> None:
    """Add the option that says where logs are written."""
    parser.addoption("--ran-log", metavar="DIR", help="write the ids of the collected and passed tests to DIR/N.json")


class RanLog:
    """Writes, when the session ends, which tests were collected and which of them passed.

    Parameters
    ----------
    config : pytest.Config
    size : int
        The number of ranks; 0 for tests that are no ranks.
    """

    def __init__(self, config: pytest.Config, size: int = 0) -> None:
        self._directory, self._size = config.getoption("--ran-log"), size
        self._passed: list[str] = []

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Take out the tests that `grid` leaves no case of, which pytest would skip."""
        empty = [
            item for item in items if any("empty parameter set" in str(mark) for mark in item.iter_markers("skip"))
        ]
        items[:] = [item for item in items if item not in empty]
        config.hook.pytest_deselected(items=empty)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and (report.passed or hasattr(report, "wasxfail")):
            self._passed.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._directory:
            directory = Path(self._directory)
            directory.mkdir(parents=True, exist_ok=True)
            found = {"collected": [item.nodeid for item in session.items], "passed": self._passed}
            (directory / f"{self._size}.json").write_text(json.dumps(found, indent=1))
