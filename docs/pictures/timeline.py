"""A trace, as a timeline: a line for each rank, and in it when the rank computed, waited and reduced."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from docs.pictures import axes
from docs.pictures.axes import Axis
from docs.pictures.svg import SMALL, WIDTH, Drawing, Theme

#: The timeline that ``mpidist trace`` has written of ``slow_rank.py``.
TRACE = Path(__file__).with_name("slow_rank.json")

#: Which of its steps are drawn: the first ones are slower, as memory is new.
STEPS = range(2, 5)

#: What a rank does: its name in the picture, its colour, and how thick the bar is.
_KINDS = {"compute": ("computes", "rank", 26), "wait": ("waits", "faint", 10), "reduce": ("reduces", "shared", 26)}

_LEFT, _TOP, _ROW = 84, 108, 42


class Piece(NamedTuple):
    """What a rank did from one time to another, in milliseconds."""

    rank: int
    kind: str
    begin: float
    end: float


def pieces(events: Iterable[dict[str, Any]], steps: range) -> list[Piece]:
    """Return the pieces of some steps: a rank computes, but for its calls; in these it waits for all, then reduces."""
    spans: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for each in events:
        if each["ph"] == "X":
            spans[each["pid"], each["cat"]].append((each["ts"] / 1e3, (each["ts"] + each["dur"]) / 1e3))
    found = []
    for rank in sorted({rank for rank, _ in spans}):
        calls, arrivals = sorted(spans[rank, "call"]), sorted(spans[rank, "arrive"])
        for begin, end in sorted(spans[rank, "step"])[steps.start : steps.stop]:
            for called, left in [span for span in calls if begin <= span[0] < end]:
                (came,) = [all_came for arrived, all_came in arrivals if called <= arrived < left]
                found += [Piece(rank, "compute", begin, called), Piece(rank, "wait", called, came)]
                found.append(Piece(rank, "reduce", came, left))
                begin = left
            found.append(Piece(rank, "compute", begin, end))
    return found


def timeline(theme: Theme) -> Drawing:
    drawn = pieces(json.loads(TRACE.read_text())["traceEvents"], STEPS)
    ranks = sorted({piece.rank for piece in drawn})
    start, end = min(piece.begin for piece in drawn), max(piece.end for piece in drawn)
    bottom = _TOP + _ROW * len(ranks)
    drawing = Drawing(theme, f"{len(STEPS)} steps of {len(ranks)} ranks: all wait for the slowest", bottom + 60)
    drawing.heading("Who waits for whom", f"{len(STEPS)} steps, from a trace. Time runs to the right.")
    _legend(drawing)
    axis = Axis(start, end, _LEFT, WIDTH - 20)
    ticks = {start + time: str(time) for time in range(0, int(end - start) + 1, 20)}
    axes.columns(drawing, axis, ticks, _TOP, bottom)
    drawing.words((_LEFT + WIDTH - 20) / 2, bottom + 42, "milliseconds", SMALL, "muted")
    for number, rank in enumerate(ranks):
        drawing.words(_LEFT - 14, _TOP + _ROW * (number + 0.5) + 5, f"rank {rank}", colour="rank", at="end", bold=True)
    for rank, kind, begin, until in drawn:
        _, colour, height = _KINDS[kind]
        y, width = _TOP + _ROW * (ranks.index(rank) + 0.5) - height / 2, axis.at(until) - axis.at(begin)
        drawing.box(axis.at(begin), y, width, height, colour, radius=min(2, width / 2))
    return drawing


def _legend(drawing: Drawing) -> None:
    for number, (name, colour, height) in enumerate(_KINDS.values()):
        x = _LEFT + 130 * number
        drawing.box(x, 86 - height / 2, 26, height, colour, radius=2)
        drawing.words(x + 34, 91, name, SMALL, at="start")
