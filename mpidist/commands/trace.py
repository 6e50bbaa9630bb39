"""``mpidist trace``: merges the traces of all ranks on one clock, and says where the time went."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy

from mpidist.collectives.ways.lanes import Lanes
from mpidist.commands.parser import Parser
from mpidist.commands.quantities import show_seconds, table
from mpidist.runtime import trace as kinds
from mpidist.runtime.trace import About, Recording, Trace, read

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


# -- what is read ------------------------------------------------------------------------------------------------------


def gather(folder: Path) -> tuple[dict[int, Recording], list[str]]:
    """Return the recordings of the folder's newest job by rank, their times on rank 0's clock, and what is missing."""
    paths = sorted([*folder.glob("rank-*.trace"), *folder.glob("rank-*.trace.part")], key=_written)
    found, problems = [], []
    for path in paths:
        try:
            found.append(read(path))
        except (OSError, ValueError) as error:
            problems.append(f"{error}; left out")
    if not found:
        return {}, [*problems, f"{folder} has no traces: was the job started with MPIDIST_TRACE={folder}?"]
    job, size = found[-1].about.job, found[-1].about.size
    recordings = {each.about.rank: each for each in found if each.about.job == job}
    if len({each.about.job for each in found}) > 1:
        problems.append("the folder has traces of several jobs; only those of the newest are merged")
    missing = [rank for rank in range(size) if rank not in recordings]
    if missing:
        problems.append(f"no trace of rank {', '.join(map(str, missing))} of {size}; the others are merged")
    for rank, each in sorted(recordings.items()):
        each.events = on_one_clock(each)
        problems += [f"the trace of rank {rank}: {each.problem}"] if each.problem else []
        problems += [f"the trace of rank {rank} lost {each.dropped} events"] if each.dropped else []
    return dict(sorted(recordings.items())), problems


def _written(path: Path) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def on_one_clock(recording: Recording) -> Any:
    """Return the events with their times as rank 0's clock would have shown them.

    Between two comparisons of the clocks, and for a while beyond the last, the difference is taken to grow evenly.
    """
    events = recording.events.copy()
    offsets = recording.about.offsets
    if not offsets:
        return events
    when, by = (numpy.array(column, dtype=numpy.float64) for column in zip(*offsets, strict=True))
    for column in (1, 2):
        since = (events[:, column] - offsets[0][0]).astype(numpy.float64)
        events[:, column] += numpy.rint(_continued(since, when - when[0], by)).astype(numpy.int64)
    return events


def _continued(at: Any, when: Any, by: Any) -> Any:
    """Interpolate, and go on along the line from the first to the last, but no longer than that line is itself.

    Further on, the noise of the two would count for more than what is known.
    """
    inside, known = numpy.interp(at, when, by), when[-1] - when[0]
    if not known:
        return inside
    return inside + (by[-1] - by[0]) / known * numpy.clip(at - when[-1], 0.0, known)


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


@dataclass(frozen=True)
class Shares:
    """Where the time of one rank went, in seconds.

    Attributes
    ----------
    steps : int
        How many there were; without any, the whole trace counts as one.
    total : float
        Of the steps.
    parts : dict of str to float
        Inside the steps: calls as a whole, waiting for all to come, and what calls did; what ran at the same time
        counts once.
    events : int
    cost : float
        What adding the events took.
    """

    steps: int
    total: float
    parts: dict[str, float]
    events: int
    cost: float


_PARTS = {"communication": kinds.CALL, "waiting": kinds.ARRIVE} | {
    name: kinds.KINDS.index(name) for name in ("pack", "reduce", "send", "unpack", "apply")
}


def shares(recording: Recording) -> Shares:
    """Return where the time of a rank went (Local)."""
    events = recording.events
    is_step = events[:, 0] == kinds.STEP
    steps = int(is_step.sum())
    intervals = events[is_step][:, 1:3] if steps else numpy.array([[events[:, 1].min(), events[:, 2].max()]])
    inside = _inside(events, intervals)
    parts = {name: _covered(events[inside & (events[:, 0] == kind)]) for name, kind in _PARTS.items()}
    counted = int((inside | is_step).sum())
    total = float((intervals[:, 1] - intervals[:, 0]).sum()) * 1e-9
    return Shares(steps or 1, total, parts, counted, counted * recording.about.event_seconds)


def _covered(events: Any) -> float:
    """Return the seconds in which at least one of the events was under way."""
    if not len(events):
        return 0.0
    begins, ends = events[numpy.argsort(events[:, 1]), 1:3].T
    latest = numpy.maximum.accumulate(ends)
    begins[1:] = numpy.maximum(begins[1:], latest[:-1])
    return float(numpy.maximum(ends - begins, 0).sum()) * 1e-9


def _inside(events: Any, intervals: Any) -> Any:
    """Return which events began within one of the intervals, which do not overlap."""
    ordered = intervals[numpy.argsort(intervals[:, 0])]
    place = numpy.searchsorted(ordered[:, 0], events[:, 1], side="right") - 1
    return (place >= 0) & (events[:, 1] <= ordered[numpy.maximum(place, 0), 1])


@dataclass(frozen=True)
class Lateness:
    """How often a rank came last to a call that all made, and how long the first one had waited for it then."""

    last: int
    calls: int
    mean_seconds: float


def lateness(recordings: dict[int, Recording]) -> dict[int, Lateness]:
    """Return by rank how often it was the last one (Local)."""
    arrivals = [_arrivals(recording) for recording in recordings.values()]
    common = sorted(set.intersection(*(set(each) for each in arrivals))) if len(arrivals) > 1 else []
    came = numpy.array([[each[call] for call in common] for each in arrivals]).reshape(len(arrivals), -1)
    if not came.size:
        return {rank: Lateness(0, 0, 0.0) for rank in recordings}
    last, waited = came.argmax(axis=0), (came.max(axis=0) - came.min(axis=0)) * 1e-9
    found = {}
    for row, rank in enumerate(recordings):
        mine = waited[last == row]
        found[rank] = Lateness(len(mine), len(common), float(mine.mean()) if len(mine) else 0.0)
    return found


def _arrivals(recording: Recording) -> dict[int, int]:
    """Return by call when the rank came to it."""
    events = recording.events
    return {call: begin for _, begin, _, call, _ in events[events[:, 0] == kinds.ARRIVE].tolist()}


def report(recordings: dict[int, Recording]) -> str:
    """Return what the traces say as text (Local)."""
    recordings = {rank: each for rank, each in recordings.items() if len(each.events)}
    if not recordings:
        return "no rank has recorded anything"
    rows = [["rank", "steps", "a step", *_PARTS, "events a step", "tracing"]]
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
