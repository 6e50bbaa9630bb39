"""Launches of this very benchmark, one after the other: each may find its caches shared, or not."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.suite import results
from benchmarks.suite.results import Launch
from mpidist.commands import run
from mpidist.errors import LaunchError


def launch(arguments: Sequence[str], ranks: int, count: int = 1, save: Path | None = None) -> list[Launch]:
    """Start ``mpidist run -n RANKS -m benchmarks ARGUMENTS`` so many times, and return what the launches found.

    Local.  What is there after each launch is written to `save`.

    Raises
    ------
    LaunchError
        One of them failed, after it has said why.
    """
    found: list[Launch] = []
    for number in range(count):
        if count > 1:
            print(f"# launch {number + 1} of {count}, {ranks} ranks", flush=True)
        found += _once(arguments, ranks)
        if save is not None:
            results.write(save, found)
    return found


def _once(arguments: Sequence[str], ranks: int) -> list[Launch]:
    with tempfile.TemporaryDirectory(prefix="mpidist-bench-") as folder:
        path = Path(folder, "launch.json")
        line = ["-n", str(ranks), "--quiet", "-m", "benchmarks", *arguments, "--json", str(path)]
        status = run.main(line)
        sys.stdout.flush()
        if not path.exists():
            raise LaunchError(f"a launch on {ranks} ranks ended with status {status} before it had a result")
        return results.read(path)
