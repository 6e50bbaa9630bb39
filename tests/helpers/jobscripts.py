"""The scripts of `jobscripts/`: each is what the command line in its header prints.  As a program: writes them."""

from __future__ import annotations

import shlex
from pathlib import Path

from mpidist.commands.job import make_job, parse
from tests.helpers.pages import ROOT

FOLDER = ROOT / "jobscripts"

_HEADER = "# Printed by: mpidist job "


def scripts() -> list[Path]:
    """Return the scripts, of all schedulers."""
    return sorted(FOLDER.glob("*/*.sh"))


def words_of(text: str) -> list[str]:
    """Return the arguments of ``mpidist job`` in a script's header."""
    (line,) = [line for line in text.splitlines() if line.startswith(_HEADER)]
    return shlex.split(line.removeprefix(_HEADER))


def printed(words: list[str]) -> str:
    """Return what ``mpidist job`` prints in the root of the checkout, where no site has defaults."""
    asked, arguments = parse(words)
    return make_job(vars(asked), arguments, {}).text


if __name__ == "__main__":
    for path in scripts():
        path.write_text(printed(words_of(path.read_text())))
