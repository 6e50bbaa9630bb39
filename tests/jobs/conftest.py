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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Warn of every test that was run a second time; `.ci/run` counts them from the file that RERUNS names."""
    names = [report.nodeid for report in terminalreporter.getreports("rerun")]
    for name in names:
        terminalreporter.write_line(f"warning: run a second time: {name}", yellow=True)
    if names and "RERUNS" in os.environ:
        with Path(os.environ["RERUNS"]).open("a") as file:
            file.writelines(f"{name}\n" for name in names)
