"""Where the time of each rank went, and who came last, from the traces of a folder, on one clock."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from mpidist.runtime import trace_file
from mpidist.runtime import trace_kinds as kinds
from mpidist.runtime.trace_file import Recording, read


def gather(folder: Path, job: str = "") -> tuple[dict[int, Recording], list[str]]:
    """Return the recordings of a job by rank, their times on rank 0's clock, and what is missing.

    Without the job's name, of the newest job in the folder.
    """
    traces, problems = [], []
    for path in sorted(trace_file.paths(folder), key=_written):
        try:
            traces.append(read(path))
        except (OSError, ValueError) as error:
            problems.append(f"{error}; left out")
    if not any(each.about.job == (job or each.about.job) for each in traces):
        return {}, [*problems, f"{folder} has no traces: was the job started with MPIDIST_TRACE={folder}?"]
    newest = not job
    job = job or traces[-1].about.job
    recordings = {each.about.rank: each for each in traces if each.about.job == job}
    size = max(each.about.size for each in recordings.values())
    if newest and len({each.about.job for each in traces}) > 1:
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


@dataclass(frozen=True)
class Shares:
    """Where the time of one rank went, in seconds.

    Without any `steps` the whole trace counts as one; `total` is theirs.  `parts` are inside the steps: calls as a
    whole, waiting for all to come, and what calls did; what ran at the same time counts once.  `cost` is what adding
    the events and writing them took.
    """

    steps: int
    total: float
    parts: dict[str, float]
    events: int
    cost: float


#: The parts of a step, and the kinds of their events.
PARTS = {"communication": kinds.CALL, "waiting": kinds.ARRIVE} | {
    name: kinds.KINDS.index(name) for name in ("pack", "reduce", "send", "unpack", "apply")
}


def shares(recording: Recording) -> Shares:
    """Return where the time of a rank went (Local)."""
    events = recording.events
    is_step = events[:, 0] == kinds.STEP
    steps = int(is_step.sum())
    intervals = events[is_step][:, 1:3] if steps else numpy.array([[events[:, 1].min(), events[:, 2].max()]])
    inside = _inside(events, intervals)
    parts = {name: _covered(events[inside & (events[:, 0] == kind)]) for name, kind in PARTS.items()}
    counted = int((inside | is_step).sum())
    total = float((intervals[:, 1] - intervals[:, 0]).sum()) * 1e-9
    written = _covered(events[inside & (events[:, 0] == kinds.TRACE)])
    return Shares(steps or 1, total, parts, counted, counted * recording.about.event_seconds + written)


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
    by_rank = {}
    for row, rank in enumerate(recordings):
        mine = waited[last == row]
        by_rank[rank] = Lateness(len(mine), len(common), float(mine.mean()) if len(mine) else 0.0)
    return by_rank


def _arrivals(recording: Recording) -> dict[int, int]:
    """Return by call when the rank came to it."""
    events = recording.events
    return {call: begin for _, begin, _, call, _ in events[events[:, 0] == kinds.ARRIVE].tolist()}
