"""``mpidist trace``: merges the traces of all ranks on one clock, and says where the time went."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpidist.commands.parser import Parser
from mpidist.commands.quantities import show_seconds, table
from mpidist.runtime import trace_kinds as kinds
from mpidist.runtime.trace import CAPACITY, Trace
from mpidist.runtime.trace_file import About, Recording, about_line, event_lines, order_line
from mpidist.tracing.shares import PARTS, gather, lateness, shares
from mpidist.whole_file import written

_EXAMPLES = """examples:
  MPIDIST_TRACE=traces mpidist run -n 4 train.py
  mpidist trace traces
"""

#: Where the merged timeline is written, in the folder of the traces.
TIMELINE = "timeline.json"

#: What tracing may cost of a step.
COST_LIMIT = 0.02


def main(argv: Sequence[str]) -> int:
    """Merge the traces of a folder and print what they say; return the exit status; Local."""
    options = parser().parse_args(argv)
    if options.cost:
        adding, writing = event_seconds()
        print(f"one event costs {show_seconds(adding)}, and {show_seconds(writing)} when it is written")
        return 0
    if options.folder is None:
        parser().error("name the folder that MPIDIST_TRACE named")
    recordings, problems = gather(Path(options.folder))
    for problem in problems:
        print(f"mpidist trace: {problem}", file=sys.stderr)
    if not recordings:
        return 1
    output = Path(options.output) if options.output else Path(options.folder, TIMELINE)
    try:
        write_timeline(recordings, output)
    except OSError as error:
        print(f"mpidist trace: {output} cannot be written: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({**figures(recordings), "problems": problems, "timeline": str(output)}, indent=1))
        return 0
    print(report(recordings))
    print(f"\ntimeline: {output}, for ui.perfetto.dev or chrome://tracing")
    return 0


def parser() -> Parser:
    """Return the parser of ``mpidist trace``'s arguments."""
    what = "Merge what MPIDIST_TRACE=FOLDER has made the ranks write, and print where the time went."
    parser = Parser("trace", what, _EXAMPLES)
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="where the ranks have written")
    parser.add_argument("--output", metavar="FILE", help=f"the merged timeline (FOLDER/{TIMELINE})")
    parser.add_argument("--json", action="store_true", help="print the shares and who came last as JSON")
    parser.add_argument("--cost", action="store_true", help="print what one event costs on this machine")
    return parser


def event_seconds() -> tuple[float, float]:
    """Return what it costs here to add an event, and to write one (Local)."""
    adding, writing = [], []
    with tempfile.TemporaryDirectory(prefix="mpidist-trace-") as folder:
        for rank in range(5):
            trace = Trace(folder, About("cost", rank, 5, "here"))
            adding.append(trace.about.event_seconds)
            for _ in range(CAPACITY - 1):
                trace.add(kinds.TRACE, trace.now())
            start = time.perf_counter()
            trace.flush()
            writing.append((time.perf_counter() - start) / (CAPACITY - 1))
            trace.close()
    return min(adding), min(writing)


# -- the timeline ------------------------------------------------------------------------------------------------------


def write_timeline(recordings: dict[int, Recording], output: Path) -> None:
    """Write the events of all ranks as Perfetto and Chrome's tracing page read them, from 0 on."""
    begins = [recording.events[:, 1].min() for recording in recordings.values() if len(recording.events)]
    start = min(begins, default=0)
    with written(output) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
        for rank, recording in recordings.items():
            events = recording.events.copy()
            events[:, 1:3] -= start
            file.write(f"{about_line(recording.about, rank)},\n".encode())
            file.writelines(event_lines(events, recording.names, rank))
        orders = [order_line(recording.about, rank) for rank, recording in recordings.items()]
        file.write((",\n".join(orders) + "\n]}\n").encode())


# -- what it says ------------------------------------------------------------------------------------------------------


def report(recordings: dict[int, Recording]) -> str:
    """Return what the traces say as text (Local)."""
    recordings = {rank: each for rank, each in recordings.items() if len(each.events)}
    if not recordings:
        return "no rank has recorded anything"
    rows = [["rank", "steps", "a step", *PARTS, "events a step", "tracing"]]
    by_rank = {rank: shares(recording) for rank, recording in recordings.items()}
    for rank, share in by_rank.items():
        parts = [_percent(seconds, share.total) for seconds in share.parts.values()]
        events = f"{share.events / share.steps:.0f}"
        cost = _percent(share.cost, share.total)
        rows.append([str(rank), str(share.steps), show_seconds(share.total / share.steps), *parts, events, cost])
    late_rows = [["rank", "came last", "of calls", "the first had waited"]]
    for rank, late in lateness(recordings).items():
        waited = show_seconds(late.mean_seconds) if late.last else "-"
        late_rows.append([str(rank), str(late.last), str(late.calls), waited])
    lines = [table(rows), "", table(late_rows)]
    dear = [str(rank) for rank, found in by_rank.items() if found.cost > COST_LIMIT * found.total]
    if dear:
        lines += ["", f"tracing took more than {COST_LIMIT:.0%} of the time of rank {', '.join(dear)}"]
    return "\n".join(lines)


def figures(recordings: dict[int, Recording]) -> dict[str, Any]:
    """Return by rank what `report` says, in seconds, for programs (Local)."""
    recordings = {rank: each for rank, each in recordings.items() if len(each.events)}
    late = lateness(recordings)
    return {
        "ranks": {
            rank: {"host": each.about.host, "shares": asdict(shares(each)), "lateness": asdict(late[rank])}
            for rank, each in recordings.items()
        }
    }


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"
