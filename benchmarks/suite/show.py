"""``show``: files of earlier runs as tables, targets and a picture; measures nothing."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.suite import markdown, ps, results, slot_adding, targets
from benchmarks.suite.results import Launch

WHAT = "files of earlier runs, as tables and a picture"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this subcommand takes."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="written with --json")
    parser.add_argument("--who", metavar="A,B", help="only these contenders in tables and picture")
    parser.add_argument("--markdown", action="store_true", help="as tables of Markdown: what every contender took")
    parser.add_argument("--choices", action="store_true", help="say too what AUTO took by the quickest algorithm")
    parser.add_argument("--targets", action="store_true", help="say too which targets they reach")


def start(options: argparse.Namespace) -> list[Launch]:
    """Print what the files hold, and return it.  Local."""
    launches = [launch for path in options.files for launch in results.read(path)]
    shown = launches if options.who is None else [_only(each, options.who.split(",")) for each in launches]
    if not any(each.rows for each in shown):
        known = dict.fromkeys(row.who for each in launches for row in each.rows)
        raise ValueError(f"nothing to show; the files have {', '.join(known) or 'no rows'}")
    print(markdown.tables(shown) if options.markdown else results.summary(shown))
    if options.choices:
        print(f"\n{markdown.choices(launches)}")
    if options.targets:
        print(f"\n{targets.report_of([*targets.TARGETS, *ps.TARGETS, *slot_adding.TARGETS], launches)}")
    return shown


def _only(launch: Launch, names: Sequence[str]) -> Launch:
    """Return a launch with the rows of these contenders."""
    return replace(launch, rows=[row for row in launch.rows if row.who in names])
