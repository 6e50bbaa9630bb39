"""The commands of pages on slow and on failing jobs: they print what the pages show, and end with that status."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

import pytest

from mpidist.tracing.shares import gather, lateness, shares
from tests.helpers.launch import environment, launcher, run_process
from tests.helpers.pages import PAGES, Command, blocks, commands

pytestmark = pytest.mark.skipif(launcher().vendor != "Open MPI", reason="the pages show what Open MPI prints")

#: A figure of a table: a number with its unit, or the dash in its place.
_FIGURE = re.compile(r"(?<!\S)(?:-|[\d.]+)(?: (?:ns|us|ms|s|%))?(?!\S)")

#: What differs between runs: times, and numbers of processes.  Ranks, signals and calls have one digit.
_NUMBER = re.compile(r"\d+\.\d+|\d\d+")

#: The commands that are run, by page.
_RUN = {page: [command for command in commands(page) if command.how] for page in PAGES}


@pytest.mark.parametrize("page", [page for page, run in _RUN.items() if run], ids=lambda page: page.stem)
def test_commands_print_what_the_page_shows(page: Path, tmp_path: Path) -> None:
    for block in blocks():
        if block.page == page and block.how == "file":
            (tmp_path / block.code.partition("\n")[0].removeprefix("# ")).write_text(block.code)
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    status = 0
    for command in _RUN[page]:
        line = f"exec 2>&1; cd {tmp_path}; (exit {status}); {command.text}"
        result = run_process(["bash", "-c", line], environment({"PATH": path}), 300)
        status = result.returncode
        printed = result.stdout.replace(f"{tmp_path}/", "").replace(socket.gethostname(), "vm")
        assert _fits(command, printed), f"$ {command.text}\nprints\n{printed}\nand not\n{command.printed}"
    if page.stem == "why-slow":
        _rank_1_is_late(tmp_path / "run")


def _rank_1_is_late(folder: Path) -> None:
    """Check what the page says about its figures."""
    recordings, problems = gather(folder)
    late = lateness(recordings)
    waiting = {rank: shares(each).parts["waiting"] for rank, each in recordings.items()}
    assert problems == [] and late[1].last > late[0].last and waiting[0] > waiting[1]


def _fits(command: Command, printed: str) -> bool:
    """Return whether something was printed as it is shown; ``...`` in a line of its own stands for any lines."""
    number = _FIGURE if command.how == "figures" else _NUMBER
    if command.text.startswith("echo"):  # a status
        return printed == command.printed
    parts = re.split(r"^\.\.\.\n", command.printed, flags=re.MULTILINE)
    shown = [re.escape(number.sub("#", " ".join(part.split()))) for part in parts]
    return re.fullmatch(".*".join(shown), number.sub("#", " ".join(printed.split()))) is not None


def test_what_fits() -> None:
    shown = Command("session", "mpidist run", "rank 1 (process 4711)\n...\nafter 2.5 s\n")
    assert _fits(shown, "rank 1 (process 63)\nand\nso on\nafter 11.0 s\n")
    assert not _fits(shown, "rank 0 (process 63)\nafter 11.0 s\n")
    assert not _fits(shown, "rank 1 (process 63)\nafter 11.0 s\nand more\n")
    table = Command("figures", "mpidist trace", "1   2.0 ms  3.0 %\n")
    assert _fits(table, "1    20 us  -\n") and not _fits(table, "1  20 us  so\n")
    assert not _fits(Command("session", "echo $?", "137\n"), "143\n")
