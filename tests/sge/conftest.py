"""The Grid Engine of the tests of this folder; they are skipped where there can be none."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.launch import ROOT, environment

#: Seconds within which a job of these tests has ended, its restarts included.
LIMIT_SECONDS = 120


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-sge", action="store_true", help="fail, not skip, where no Grid Engine can be started")


@dataclass(frozen=True)
class GridEngine:
    """A running Grid Engine of two hosts with four slots each.

    Attributes
    ----------
    folder : Path
        Where its configuration and logs are, and the command that gets to its hosts.
    exports : dict
        What its clients need in their environment.
    """

    folder: Path
    exports: dict[str, str]

    def client(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a client of it, such as `qsub`, where its master is."""
        environ = {name: value for name, value in environment().items() if name != "SCRATCH"} | self.exports
        line = [str(self.folder / "on"), "head", *command]
        return subprocess.run(line, cwd=cwd, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS)

    def wait_for(self, number: str, output: Path, text: str = "") -> str:
        """Wait until a job has printed a text, or has ended; return all that it has printed."""
        end = time.monotonic() + LIMIT_SECONDS
        while True:
            seen = self.client("qstat")
            assert seen.returncode == 0, seen.stderr
            listed = re.search(rf"^ *{number} .*", seen.stdout, re.MULTILINE)
            printed = output.read_text() if output.exists() else ""
            if (text and text in printed) or not listed:
                return printed
            is_stuck = time.monotonic() > end or " Eqw " in listed[0]
            assert not is_stuck, printed + self.client("qstat", "-j", number).stdout
            time.sleep(0.2)


@pytest.fixture(scope="session")
def grid_engine(request: pytest.FixtureRequest) -> Iterator[GridEngine]:
    """A Grid Engine for all tests of the session."""
    folder = Path(tempfile.mkdtemp(prefix="sge."))
    up = subprocess.run([str(ROOT / "tests" / "sge" / "up"), str(folder)], capture_output=True, text=True, timeout=300)
    try:
        if up.returncode:
            reason = f"no Grid Engine on this machine: {up.stderr.strip().splitlines()[-1]}"
            if request.config.getoption("--require-sge"):
                pytest.fail(reason)
            pytest.skip(reason)
        yield GridEngine(folder, dict(re.findall(r"^export (\w+)=(.*)$", up.stdout, re.MULTILINE)))
    finally:
        subprocess.run([str(ROOT / "tests" / "netns" / "down"), str(folder)], check=True, timeout=60)
        shutil.rmtree(folder, ignore_errors=True)
