"""``python -m benchmarks pairs``: the same cases in an old and a new checkout, launch by launch in turn."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pairs import verdict
from benchmarks.pairs.cases import CASES
from benchmarks.pairs.side import Side
from benchmarks.suite.results import Launch
from mpidist.commands.machine import machine
from mpidist.commands.quantities import count, duration
from mpidist.errors import LaunchError

_FORMAT = "mpidist pairs 1"

_EPILOG = """examples:
  python -m benchmarks pairs --old ../before --json pairs.json           all cases, 7 launches of each
  python -m benchmarks pairs --old ../before --cases latency gradients --ranks 2
  python -m benchmarks pairs --show pairs.json

A row fails when its new median is worse by more than 10 % and the quartiles over launches do not overlap.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    here = Path(__file__).resolve().parents[2]
    found = argparse.ArgumentParser(
        prog="python -m benchmarks pairs",
        description="Measure two checkouts of mpidist in turn.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = found.add_argument
    add("--old", type=Path, metavar="PATH", help="a checkout; its .venv is used if it has one")
    add("--new", type=Path, default=here, metavar="PATH", help="default: this checkout")
    add("--launches", type=count, default=7, metavar="N", help="of each case on each side; default: 7")
    add("--cases", nargs="+", choices=list(CASES), default=list(CASES), metavar="CASE", help=", ".join(CASES))
    add("--ranks", nargs="+", type=count, metavar="N", help="only on so many; default: all that a case has")
    add("--seconds", type=duration, default=4.0, metavar="S", help="of a launch, warm-up not counted; default: 4")
    add("--json", type=Path, metavar="FILE", help="write all launches, after each of them")
    add("--show", type=Path, metavar="FILE", help="print the table of a file, and measure nothing")
    return found


def main(argv: Sequence[str]) -> int:
    """Measure, or show, and return the exit status: 1 where a launch failed or a result was wrong."""
    options = parser().parse_args(argv)
    if (options.old is None) == (options.show is None):
        parser().error("name one of --old and --show")
    try:
        found = read(options.show) if options.show is not None else measure(options)
    except (LaunchError, OSError, ValueError) as error:
        print(f"benchmarks pairs: {error}", file=sys.stderr)
        return 1
    print(f"\n{verdict.report(found['old'], found['new'])}", flush=True)
    wrong = sorted(
        {f"{row.who} on {row.work}" for each in found.values() for one in each for row in one.rows if row.wrong}
    )
    if wrong:
        print(f"benchmarks pairs: wrong elements: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def measure(options: argparse.Namespace) -> dict[str, list[Launch]]:
    """Return the launches of both sides.

    Raises
    ------
    LaunchError
        A launch ended without a result.
    """
    found: dict[str, list[Launch]] = {"old": [], "new": []}
    with tempfile.TemporaryDirectory(prefix="mpidist-pairs-") as folder:
        sides = []
        for name in found:
            own = Path(folder, name)
            own.mkdir()
            sides.append(Side(name, getattr(options, name), own))
        about = {side.name: {"checkout": side.checkout.name, "commit": side.commit} for side in sides}
        print(f"# {about}", flush=True)
        for number in range(options.launches):
            for place, (case, ranks) in enumerate(launches_of(options.cases, options.ranks)):
                turn = sides if (number + place) % 2 == 0 else sides[::-1]
                for side in turn:
                    found[side.name].append(side.launch(case, ranks, options.seconds))
                print(f"# launch {number + 1} of {options.launches}: {case} on {ranks} ranks", flush=True)
                if options.json is not None:
                    write(options.json, about, found)
    return found


def launches_of(cases: Sequence[str], only: Sequence[int] | None) -> list[tuple[str, int]]:
    """Return cases with their numbers of ranks.  Local, pure."""
    pairs = [(case, ranks) for case in cases for ranks in CASES[case].ranks]
    return [pair for pair in pairs if only is None or pair[1] in only]


def write(path: Path, about: dict[str, Any], found: dict[str, list[Launch]]) -> None:
    """Write all launches as JSON."""
    launches = {side: [each.as_json() for each in own] for side, own in found.items()}
    path.write_text(json.dumps({"format": _FORMAT, "machine": machine(), "about": about, **launches}, indent=1) + "\n")


def read(path: Path) -> dict[str, list[Launch]]:
    """Return the launches of a file.

    Raises
    ------
    ValueError
        It is not a file of `write`.
    """
    try:
        values = json.loads(path.read_text())
        if values["format"] != _FORMAT:
            raise ValueError(f"{path} has the format {values['format']!r}, expected {_FORMAT!r}")
        return {side: [Launch.from_json(each) for each in values[side]] for side in ("old", "new")}
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} was not written by benchmarks pairs --json: {error!r}") from error
