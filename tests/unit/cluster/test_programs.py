"""What other programs say."""

from __future__ import annotations

import sys
from pathlib import Path

from mpidist.cluster.programs import said


def test_output_comes_before_errors() -> None:
    code = "import os, sys; os.write(2, b'wrong \\xff'); print(os.environ['TOLD'], len(sys.stdin.read()))"
    assert said([sys.executable, "-c", code], 60, {"TOLD": "right"}) == "right 0\nwrong \N{REPLACEMENT CHARACTER}"


def test_a_program_that_cannot_be_started_or_takes_long_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "no_program").touch()
    assert said([str(tmp_path / "no_program")], 60) == said(["no-such-program"], 60) == ""
    assert said([sys.executable, "-c", "print(1, flush=True); import threading; threading.Event().wait()"], 0.2) == ""
