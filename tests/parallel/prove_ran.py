"""Fail unless every parallel test, and every other one that was logged, has run on some number of ranks.

pytest-mpi skips a test that wants more ranks than there are, silently; a test that is skipped at every size tests
nothing.  ``python tests/parallel/prove_ran.py DIR...`` reads what `RanLog` wrote for each run; a test has to have run
in one of the directories, and something in each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def never_ran(logs: Mapping[str, Mapping[str, Sequence[str]]]) -> list[str]:
    """Return the tests that were collected in some run and passed in none."""
    collected = {test for log in logs.values() for test in log["collected"]}
    return sorted(collected - {test for log in logs.values() for test in log["passed"]})


def read_logs(directory: str) -> dict[str, dict[str, list[str]]]:
    """Return number of ranks -> log, for every run that was logged to `directory`."""
    return {path.stem: json.loads(path.read_text()) for path in Path(directory).glob("*.json")}


def main(directories: Sequence[str]) -> int:
    logs = {}
    for directory in directories:
        found = read_logs(directory)
        logs |= {f"{directory}/{size}": log for size, log in found.items()}
        passed = {size: len(found[str(size)]["passed"]) for size in sorted(map(int, found))}
        counts = ", ".join(f"{count} on {size}" if size else f"{count} without ranks" for size, count in passed.items())
        print(f"{directory}: tests that ran, by the number of ranks: {counts or 'none'}")
        if not any(log["passed"] for log in found.values()):
            return 1
    missing = never_ran(logs)
    for test in missing:
        print(f"never ran: {test}")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
