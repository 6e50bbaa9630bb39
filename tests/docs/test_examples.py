"""The Python examples of README and docs run.

A Python block runs as it stands, each in a process of its own: alone, and on three ranks that are threads.  A comment
in the line above says when that is different: ``<!-- run: alone -->``, ``two`` or ``four`` for so many ranks, or
``pytest`` for a test module.  The blocks of a page of the guide are run one after another, in one namespace, and must
print what is shown below them, on every rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpidist.commands.probe import without_launcher
from tests.pages import GUIDE, ROOT, blocks

_ON_RANKS = """
import sys
from mpidist.testing import run_ranks
code = compile(open(sys.argv[2]).read(), sys.argv[2], "exec")
run_ranks(int(sys.argv[1]), lambda: exec(code, {"__name__": "__main__"}))
"""

#: How a block is run -> the commands that get the file it is in.
_COMMANDS = {
    None: ([], ["-c", _ON_RANKS, "3"]),
    "alone": ([],),
    "two": (["-c", _ON_RANKS, "2"],),
    "four": (["-c", _ON_RANKS, "4"],),
    "pytest": (["-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"],),
}

#: Gets the ranks, or 0 for none but this process, and a page of the guide.
_PAGE_ON_RANKS = """
import sys
from pathlib import Path
from mpidist.testing import run_ranks
from tests.pages import differences

ranks, page = int(sys.argv[1]), Path(sys.argv[2])
found = run_ranks(ranks, differences, page) if ranks else [differences(page)]
sys.exit(chr(10).join(sum(found, [])) or 0)
"""


@pytest.mark.parametrize(
    "block", [block for block in blocks() if not block.is_part_of_page], ids=lambda block: block.place
)
def test_every_example_runs(block, tmp_path):
    path = tmp_path / "test_example.py"
    path.write_text(block.code)
    for command in _COMMANDS[block.how]:
        _run(block.place, [*command, str(path)], tmp_path)


@pytest.mark.parametrize("ranks", [0, 3])
@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_a_page_of_the_guide_runs_and_prints_what_it_shows(page, ranks, tmp_path):
    _run(page.name, ["-c", _PAGE_ON_RANKS, str(ranks), str(page)], tmp_path)


def _run(place: str, arguments: list[str], directory: Path) -> None:
    environ = {**without_launcher(os.environ), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, *arguments]
    child = subprocess.run(line, cwd=directory, env=environ, capture_output=True, text=True, timeout=120)
    assert child.returncode == 0, f"{place}\n{child.stdout}\n{child.stderr}"
