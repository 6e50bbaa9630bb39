"""Fail unless every parallel test has run on some number of ranks.

pytest-mpi skips a test that wants more ranks than there are, silently; a test that is skipped at every size tests
nothing.  ``python tests/parallel/prove_ran.py DIR`` reads what `conftest` wrote for each run.
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


def main(directory: str) -> int:
    logs = {path.stem: json.loads(path.read_text()) for path in sorted(Path(directory).glob("*.json"))}
    passed = {size: len(log["passed"]) for size, log in logs.items()}
    counts = ", ".join(f"{passed[size]} on {size}" for size in sorted(passed, key=int))
    print(f"parallel tests that ran, by the number of ranks: {counts or 'none'}")
    missing = never_ran(logs)
    for test in missing:
        print(f"never ran: {test}")
    if not any(passed.values()):
        print(f"no parallel test ran at all, by the logs in {directory}")
        return 1
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
