"""The examples of the guide, in a real job: every rank prints what the pages show."""

from __future__ import annotations

import pytest

from tests.helpers.pages import GUIDE, blocks
from tests.jobs import run_job

SCRIPT = """
from pathlib import Path
import sys
from tests.helpers.pages import differences

found = [text for page in sys.argv[1:] for text in differences(Path(page))]
sys.exit(chr(10).join(found) or 0)
"""

RANKS = {"two": 2, "four": 4, "four_processes": 4}


def test_the_guide_prints_on_every_rank_what_it_shows():
    result = run_job(2, SCRIPT, [str(page) for page in GUIDE])
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "block", [block for block in blocks() if block.how in RANKS], ids=lambda block: f"{block.page.stem}:{block.line}"
)
def test_examples_for_a_number_of_ranks_run_on_it(block):
    result = run_job(RANKS[block.how], block.code)
    assert result.returncode == 0, result.stdout + result.stderr
