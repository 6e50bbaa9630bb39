"""``mpidist trace``: merges the traces of all ranks on one clock, and says where the time went."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpidist.collectives.ways.lanes import Lanes
from mpidist.commands.parser import Parser
from mpidist.commands.quantities import show_seconds, table
from mpidist.runtime import trace as kinds
from mpidist.runtime.trace import About, Recording, Trace
from mpidist.tracing.shares import PARTS, gather, lateness, shares

_EXAMPLES = """examples:
  MPIDIST_TRACE=traces mpidist run -n 4 train.py
  mpidist trace traces
"""

#: Where the merged timeline is written, in the folder of the traces.
TIMELINE = "timeline.json"

#: What tracing may cost of a step.
COST_LIMIT = 0.02

#: Rows of the timeline for waves between nodes, of which so many are under way at a time.
_LANES = Lanes.SLOTS


def main(argv: Sequence[str]) -> int:
    """Merge the traces of a folder and print what they say; return the exit status; Local."""
    options = parser().parse_args(argv)
    if options.cost:
        print(f"one event costs {show_seconds(event_seconds())}")
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
    found = Parser("trace", what, _EXAMPLES)
    found.add_argument("folder", nargs="?", metavar="FOLDER", help="where the ranks have written")
    found.add_argument("--output", metavar="FILE", help=f"the merged timeline (FOLDER/{TIMELINE})")
    found.add_argument("--json", action="store_true", help="print the shares and who came last as JSON")
    found.add_argument("--cost", action="store_true", help="print what one event costs on this machine")
    return found


def event_seconds() -> float:
    """Return what adding one event costs here (Local)."""
    with tempfile.TemporaryDirectory(prefix="mpidist-trace-") as folder:
        costs = [Trace(folder, About("cost", rank, 5, "here")).about.event_seconds for rank in range(5)]
    return min(costs)


# -- the timeline ------------------------------------------------------------------------------------------------------


def write_timeline(recordings: dict[int, Recording], output: Path) -> None:
    """Write all events as JSON that Perfetto and Chrome's tracing page read: microseconds, a process for each rank."""
    part = output.with_name(output.name + ".part")
    with open(part, "w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in timeline(recordings)))
        file.write("\n]}\n")
    os.replace(part, output)


def timeline(recordings: dict[int, Recording]) -> Iterable[dict[str, Any]]:
    """Yield the events of the timeline."""
    begins = [recording.events[:, 1].min() for recording in recordings.values() if len(recording.events)]
    start = min(begins, default=0)
    for rank, recording in recordings.items():
        name = f"rank {rank} on {recording.about.host}"
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        for lane in range(1, 1 + _LANES) if _is_between(recording.events).any() else ():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": "between nodes"}}
        names = recording.names
        for kind, begin, end, call, part in recording.events.tolist():
            shown = names[part] if kind in (kinds.CALL, kinds.ARRIVE) and part else names[kind]
            yield {
                "ph": "X",
                "name": f"wait for all: {shown}" if kind == kinds.ARRIVE else shown,
                "cat": names[kind],
                "pid": rank,
                "tid": 1 + part % _LANES if kind == kinds.SEND and part else 0,
                "ts": (begin - start) / 1e3,
                "dur": (end - begin) / 1e3,
                "args": {"call": call, "part": part},
            }


def _is_between(events: Any) -> Any:
    """Return which events are waves between nodes: waits for messages have no part."""
    return (events[:, 0] == kinds.SEND) & (events[:, 4] > 0)


# -- what it says ------------------------------------------------------------------------------------------------------


def report(recordings: dict[int, Recording]) -> str:
    """Return what the traces say as text (Local)."""
    recordings = {rank: each for rank, each in recordings.items() if len(each.events)}
    if not recordings:
        return "no rank has recorded anything"
    rows = [["rank", "steps", "a step", *PARTS, "events a step", "tracing"]]
    by_rank = {rank: shares(recording) for rank, recording in recordings.items()}
    for rank, found in by_rank.items():
        parts = [_percent(seconds, found.total) for seconds in found.parts.values()]
        events = f"{found.events / found.steps:.0f}"
        cost = _percent(found.cost, found.total)
        rows.append([str(rank), str(found.steps), show_seconds(found.total / found.steps), *parts, events, cost])
    lines = [
        table(rows),
        "",
        table([["rank", "came last", "of calls", "the first had waited"], *_late_rows(recordings)]),
    ]
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


def _late_rows(recordings: dict[int, Recording]) -> list[list[str]]:
    return [
        [str(rank), f"{late.last}", f"{late.calls}", show_seconds(late.mean_seconds) if late.last else "-"]
        for rank, late in lateness(recordings).items()
    ]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"
