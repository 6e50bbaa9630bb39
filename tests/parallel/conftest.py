"""Set-up of the tests that run on several ranks: one report (rank 0's), and a log of what ran.

Started as ``mpidist run -n 4 -m pytest tests/parallel --with-mpi --ran-log DIR``; see ``make test-4``.
"""

from __future__ import annotations

import io
import sys
import time

import pytest

from tests.helpers.ran_log import RanLog, add_option

#: How long a rank that has finished waits for the others before it leaves, and the job with it.
_FAREWELL_SECONDS = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    add_option(parser)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--with-mpi"):
        return
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    config.pluginmanager.register(RankReport(config, comm), "rank-report")
    if comm.rank == 0:
        config.pluginmanager.register(RanLog(config, comm.size), "ran-log")


class RankReport:
    """Keeps ranks other than 0 quiet unless they fail."""

    def __init__(self, config: pytest.Config, comm) -> None:
        self._comm = comm
        self._quiet = io.StringIO()
        if comm.rank > 0:
            config.pluginmanager.get_plugin("terminalreporter")._tw._file = self._quiet

    def pytest_report_header(self) -> str:
        return f"{self._comm.size} ranks"

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
