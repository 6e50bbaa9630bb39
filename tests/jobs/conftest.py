"""Set-up of the tests of jobs: how many run at a time, and which of them passed only when they were run again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return how many processes `-n auto` starts: three a core, for most of its time a job waits."""
    from mpidist.commands.launch.cores import visible_cores

    return visible_cores().count * 3


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Warn of every test that was run a second time; `.ci/run` counts them from the file that RERUNS names."""
    if hasattr(config, "workerinput"):
        return  # one of pytest-xdist's processes, whose reports come together in the first
    found = {report.nodeid: report.longreprtext for report in terminalreporter.getreports("rerun")}
    for name, text in found.items():
        terminalreporter.write_line(f"warning: run a second time: {name}, which failed first:\n{text}", yellow=True)
    if found and "RERUNS" in os.environ:
        with Path(os.environ["RERUNS"]).open("a") as file:
            file.writelines(f"{name}\n" for name in found)
