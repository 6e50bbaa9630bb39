"""Set-up of the tests that run on several ranks: one report (rank 0's), and a log of what ran.

Started as ``mpidist run -n 4 -m pytest tests/parallel --with-mpi --ran-log DIR``; see ``make test-4``.
"""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path

import pytest

#: How long a rank that has finished waits for the others before it leaves, and the job with it.
_FAREWELL_SECONDS = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ran-log", metavar="DIR", help="write the ids of the collected and passed tests to DIR/N.json")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--with-mpi"):
        return
    from mpi4py import MPI

    config.pluginmanager.register(RankReport(config, MPI.COMM_WORLD.Dup()), "rank-report")


class RankReport:
    """Keeps ranks other than 0 quiet unless they fail, and logs which tests ran."""

    def __init__(self, config: pytest.Config, comm) -> None:
        self._comm = comm
        self._directory = config.getoption("--ran-log")
        self._passed: list[str] = []
        self._quiet = io.StringIO()
        if comm.rank > 0:
            config.pluginmanager.get_plugin("terminalreporter")._tw._file = self._quiet

    def pytest_report_header(self) -> str:
        return f"{self._comm.size} ranks"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and (report.passed or hasattr(report, "wasxfail")):
            self._passed.append(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._directory and self._comm.rank == 0:
            directory = Path(self._directory)
            directory.mkdir(parents=True, exist_ok=True)
            found = {"collected": [item.nodeid for item in session.items], "passed": self._passed}
            (directory / f"{self._comm.size}.json").write_text(json.dumps(found, indent=1))

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        if self._comm.rank > 0 and " failed" in self._quiet.getvalue():
            sys.stdout.write(f"\n===== rank {self._comm.rank} =====\n{self._quiet.getvalue()}")
        sys.stdout.flush()
        self._wait_for_others()

    def _wait_for_others(self) -> None:
        """Wait until every rank has reported: a launcher ends the job when the first one leaves with an error."""
        request, end = self._comm.Ibarrier(), time.monotonic() + _FAREWELL_SECONDS
        while not request.Test() and time.monotonic() < end:
            time.sleep(0.001)
