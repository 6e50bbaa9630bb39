"""``scaling``: the gradients of a model on one rank count after the other, in launches of its own."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.suite.contender import Copy, Ours
from benchmarks.suite.launches import launch
from benchmarks.suite.results import Launch, medians
from benchmarks.suite.rows import Row
from benchmarks.suite.tensor_lists import MODELS
from mpidist.commands import quantities

WHAT = "the gradients of a model on several rank counts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what only this subcommand takes."""
    parser.add_argument("--model", choices=list(MODELS), default="resnet50", help="default: resnet50")
    parser.add_argument(
        "--ranks", nargs="+", type=quantities.count, default=[1, 2, 4], metavar="N", help="default: 1 2 4"
    )


def start(options: argparse.Namespace) -> list[Launch]:
    """Start the launches, print the table, and return what was found.  Local."""
    arguments = ["gradients", "--model", options.model, *(["--peers"] if options.peers else [])]
    arguments += [f"--{name}={getattr(options, name)}" for name in ("seconds", "rounds") if getattr(options, name)]
    found: list[Launch] = []
    for ranks in options.ranks:
        found += launch(arguments, ranks, options.launches)
    print(f"\n{report(found)}", flush=True)
    return found


def report(launches: Sequence[Launch]) -> str:
    """Return time and bandwidth by number of ranks, whatever the cache mode.  Local, pure."""
    lines = [f"# {'ranks':>6} {'copy':>10} {'mpidist':>10} {'ratio':>6} {'busbw':>7} {'best peer':>10}  (us, GB/s)"]
    for ranks in sorted({each.ranks for each in launches}):
        rows = medians([row for each in launches if each.ranks == ranks for row in each.rows])
        by_name = {row.who: row for row in rows}
        copy, ours, peer = by_name[Copy.name], by_name[Ours.name], best_peer(rows)
        told = f"{peer.time_us:>10.0f}  {peer.who}" if peer is not None else f"{'-':>10}"
        numbers = f"{copy.time_us:>10.0f} {ours.time_us:>10.0f} {ours.time_us / copy.time_us:>6.2f} {ours.busbw:>7.2f}"
        lines.append(f"  {ranks:>6} {numbers} {told}")
    return "\n".join(lines)


def best_peer(rows: Sequence[Row]) -> Row | None:
    """Return the quickest peer's row, None if there is no peer.  Local, pure."""
    return min((row for row in rows if row.kind == "peer"), key=lambda row: row.time_us, default=None)
