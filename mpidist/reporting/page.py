"""The page about a training: one HTML file that needs no network, from the notes of its ranks and their trace."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from mpidist.errors import counted, listed
from mpidist.reporting import notes
from mpidist.reporting.chart import chart
from mpidist.reporting.notes import Line, RankNotes
from mpidist.reporting.quantities import show_bytes, show_seconds
from mpidist.runtime import trace_file
from mpidist.tracing.shares import Lateness, Shares, gather, lateness, shares
from mpidist.whole_file import written

#: The file's name, in the folder of the notes.
NAME = "report.html"

#: How many points all charts together have at most, and rows the table of checkpoints: the page stays below 2 MB.
_MOST_POINTS, _MOST_CHECKPOINTS = 8000, 200

_VALIDATION, _SO_FAR = "val_", " so far"


@dataclass(frozen=True)
class RankTrace:
    """Where the time of a rank went."""

    shares: Shares
    lateness: Lateness


def write(folder: Path, output: Path | None = None, most_bytes: float = math.inf) -> Path:
    """Write the page, and return its path.  Traces of more than so many bytes are not read.  Local.

    ValueError where the folder has no notes, OSError where the page cannot be written.
    """
    path = folder / NAME if output is None else output
    text = render(folder, most_bytes)
    with written(path) as file:
        file.write(text.encode())
    return path


def render(folder: Path, most_bytes: float = math.inf) -> str:
    """Return the page; ValueError where the folder has no notes.  Local."""
    ranks, problems = notes.read(folder)
    traced, trace_problems = _traced(folder, ranks, most_bytes)
    chief = ranks[min(ranks)]
    warnings = "".join(f"<li>{escape(text)}</li>" for text in [*problems, *trace_problems, *_differences(ranks)])
    made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(chief.about["time"]))
    body = [
        f"<h1>Training on {counted(len(chief.ranks), 'rank')}</h1>",
        f'<p class="quiet">{made}, {escape(str(folder))}</p>',
        f'<ul class="problems">{warnings}</ul>' if warnings else "",
        _summary(ranks, traced),
        _section("Curves", _curves(_progress(chief))),
        _section("Time of each rank", _times(traced) if traced else _how_to_trace(folder, chief)),
        _section("Ranks", _ranks(ranks, traced)),
        _section("Checkpoints", _checkpoints(chief)),
        _section("Chosen, and why", _chosen(chief)),
        _section("Versions", _pairs(chief.about["versions"])),
        _section("Command", _pairs({"command": chief.about["command"], "directory": chief.about["directory"]})),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    title = f"<title>Training: {escape(folder.name or str(folder))}</title>"
    scheme = '<meta name="color-scheme" content="light dark">'
    return (
        "\n".join(
            [f'<!DOCTYPE html><html lang="en"><head>{head}{scheme}{title}<style>{STYLE}</style></head><body>', *body]
        )
        + "\n</body></html>\n"
    )


# -- the trace --------------------------------------------------------------------------------------------------------


def _traced(folder: Path, ranks: Mapping[int, RankNotes], most_bytes: float) -> tuple[dict[int, RankTrace], list[str]]:
    """Return where the time of the ranks of this training went, as far as there are traces, and what is missing."""
    told = next((each.about["trace"] for each in ranks.values() if each.about["trace"]), None)
    if told is None:
        return {}, []
    problems: list[str] = []
    for place in (folder, *folder.glob("world-*"), Path(told["folder"])):
        nbytes = sum(path.stat().st_size for path in trace_file.paths(place))
        if nbytes > most_bytes:
            return {}, [
                f"The traces have {show_bytes(nbytes)} and were not read; `mpidist report {folder}` reads them."
            ]
        recordings, problems = gather(place, told["job"])
        if recordings:
            late, traced = lateness(recordings), {rank: each for rank, each in recordings.items() if len(each.events)}
            # a page made at the end of a training is made before its traces are closed
            passed = {f"the trace of rank {rank}: {each.problem}" for rank, each in recordings.items()
                      if rank in ranks and ranks[rank].has_ended}  # fmt: skip
            by_rank = {rank: RankTrace(shares(each), late[rank]) for rank, each in traced.items()}
            return by_rank, [each for each in problems if each not in passed]
    return {}, problems


def _parts(found: Shares) -> dict[str, float]:
    """Return the seconds of a rank's steps: what is outside of calls, in calls until all had come, and after that."""
    called, waited = found.parts["communication"], found.parts["waiting"]
    return {"compute": found.total - called, "waiting": waited, "reducing": called - waited}


def _slowest(traced: Mapping[int, RankTrace]) -> int | None:
    """Return the rank that the others waited for most; None where none was late."""
    waits = {rank: each.lateness.last * each.lateness.mean_seconds for rank, each in traced.items()}
    slowest = max(waits, key=lambda rank: waits[rank], default=None)
    return slowest if slowest is not None and waits[slowest] > 0 else None


def _how_to_trace(folder: Path, chief: RankNotes) -> str:
    if "servers" in chief.about["job"]:
        return "<p>Workers of parameter servers do not wait for each other: see the rows a second of each.</p>"
    if chief.about["trace"]:
        return "<p>The trace of this training is not found.</p>"
    command = f"MPIDIST_TRACE={folder}"
    return (
        f"<p>No trace. Set <code>{escape(command)}</code> when the job is started, and this page says how long each "
        "rank computed, waited and reduced, and which was the slowest.</p>"
    )


def _times(traced: Mapping[int, RankTrace]) -> str:
    rows = []
    for rank, each in traced.items():
        found, total = _parts(each.shares), each.shares.total
        told = ", ".join(f"{name} {_percent(seconds, total)}" for name, seconds in found.items())
        bar = "".join(
            f'<i class="{name}" style="width:{_percent(seconds, total, "%")}"></i>' for name, seconds in found.items()
        )
        rows.append(f'<li title="rank {rank}: {told}"><b>{rank}</b><span class="bar">{bar}</span></li>')
    legend = "".join(f'<span><i class="{name}"></i>{name}</span>' for name in ("compute", "waiting", "reducing"))
    slowest, text = _slowest(traced), "No rank was late."
    if slowest is not None:
        late = traced[slowest].lateness
        text = (
            f"The slowest was rank {slowest}: it came last to {late.last} of {late.calls} collective calls, and the "
            f"first rank had then waited {show_seconds(late.mean_seconds)} on average."
        )
    return (
        f'<p>{text}</p><p class="legend">{legend}</p><ul class="bars">{"".join(rows)}</ul>'
        '<p class="quiet">Of the time in steps (calls of strategy.run, validation included; without any, the whole '
        "trace): compute is outside of collective calls; waiting is in calls, until all ranks had come; reducing is "
        "the rest of calls.</p>"
    )


# -- the notes --------------------------------------------------------------------------------------------------------


def _progress(chief: RankNotes) -> list[Line]:
    """Return how far the training was, by ascending step; what was noted beyond a restart's first step is left out."""
    kept: list[Line] = []
    for line in chief.of("progress", earlier=True):
        while kept and kept[-1]["step"] > line["step"]:
            kept.pop()
        kept.append(line)
    return kept


def _curves(progress: list[Line]) -> str:
    groups: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for line in progress:
        for name, value in line["logs"].items():
            group = groups.setdefault(name.removeprefix(_VALIDATION).removesuffix(_SO_FAR), {})
            group.setdefault(name, []).append((line["step"], value))
    most = _MOST_POINTS // max(1, sum(map(len, groups.values())))
    return f'<div class="charts">{"".join(_curve(series, most) for series in groups.values())}</div>' if groups else ""


def _curve(series: Mapping[str, list[tuple[float, float]]], most: int) -> str:
    series = dict(sorted(series.items(), key=lambda item: (item[0].endswith(_SO_FAR), item[0])))
    rows = []
    for number, (name, points) in enumerate(series.items()):
        finite = [value for _, value in points if math.isfinite(value)]
        lost = f", {len(points) - len(finite)} not finite" if len(finite) < len(points) else ""
        ends = f"last {points[-1][1]:.5g}" + (f", from {min(finite):.5g} to {max(finite):.5g}" if finite else "")
        thin = f", {len(points)} points thinned" if len(finite) > most else ""
        rows.append(f'<figcaption><i class="s{number % 3}"></i><b>{escape(name)}</b> {ends}{lost}{thin}</figcaption>')
    return f"<figure>{''.join(rows)}{chart(series, most)}</figure>"


def _summary(ranks: Mapping[int, RankNotes], traced: Mapping[int, RankTrace]) -> str:
    chief = ranks[min(ranks)]
    last, hosts = chief.last, {each.about["host"] for each in ranks.values()}
    rates = [each.rate for each in ranks.values()]
    is_whole = len(ranks) == len(chief.ranks) and None not in rates
    lines = chief.lines
    texts = {
        "ranks": f"{len(chief.ranks)} on {counted(len(hosts), 'host')}",
        "steps": f"{last['step']} in {counted(last['epoch'] + 1, 'epoch')}" if last else "none noted",
        "time": _duration(lines[-1]["seconds"]) if lines else "-",
        "rows a second, all ranks": _rate(sum(filter(None, rates))) if is_whole else "-",
        "slowest rank": "-" if (slowest := _slowest(traced)) is None else str(slowest),
        "checkpoints saved": str(len(chief.of("saved", earlier=True))),
        "finished": "yes" if all(each.has_ended for each in ranks.values()) else "no",
    }
    cards = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in texts.items())
    return f'<dl class="cards">{cards}</dl>'


def _ranks(ranks: Mapping[int, RankNotes], traced: Mapping[int, RankTrace]) -> str:
    names = ["rank", "host", "rows a second", "rows", "peak memory"]
    names += ["a step", "compute", "waiting", "reducing", "came last"] if traced else []
    rows = []
    for rank, each in ranks.items():
        peaks = [line["memory"] for line in each.of("progress", "end") if line.get("memory")]
        rate = "-" if each.rate is None else _rate(each.rate)
        cells = [str(rank), each.about["host"], rate, "-" if each.rate is None else str(each.last["rows"])]
        cells.append(show_bytes(max(peaks)) if peaks else "-")
        if rank in traced:
            found, late = traced[rank].shares, traced[rank].lateness
            cells.append(show_seconds(found.total / found.steps))
            cells += [_percent(seconds, found.total) for seconds in _parts(found).values()]
            cells.append(f"{late.last} of {late.calls}")
        elif traced:
            cells += ["-"] * 5
        rows.append(cells)
    return (
        f"{_table(names, rows)}"
        '<p class="quiet">Rows a second: rows that the rank trained on, by the time since the training began, '
        "validation and checkpoints included. Peak memory: of the process, with the shared memory that it used.</p>"
    )


def _checkpoints(chief: RankNotes) -> str:
    lines = chief.of("saved", "restored", earlier=True)
    if not lines:
        return "<p>None was saved or restored.</p>"
    rows = [
        [
            line["kind"],
            line["path"],
            "-" if line["bytes"] is None else show_bytes(line["bytes"]),
            show_seconds(line["took"]),
            _duration(line["seconds"]),
        ]
        for line in lines[-_MOST_CHECKPOINTS:]
    ]
    left = f"<p>The last {_MOST_CHECKPOINTS} of {len(lines)}.</p>" if len(lines) > _MOST_CHECKPOINTS else ""
    return left + _table(["", "file", "size", "took", "time since begin"], rows)


def _chosen(chief: RankNotes) -> str:
    return _pairs(chief.about["job"] | next((line["facts"] for line in reversed(chief.of("chosen"))), {}))


def _differences(ranks: Mapping[int, RankNotes]) -> list[str]:
    """Return in which versions ranks differ."""
    first, *others = sorted(ranks)
    differences = []
    for name, version in ranks[first].about["versions"].items():
        unlike = {rank: ranks[rank].about["versions"].get(name, "none") for rank in others}
        if unlike := {rank: other for rank, other in unlike.items() if other != version}:
            told = listed(f"rank {rank} has {other}" for rank, other in unlike.items())
            differences.append(f"Versions of {name} differ: rank {first} has {version}, {told}.")
    return differences


# -- HTML -------------------------------------------------------------------------------------------------------------


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _pairs(pairs: Mapping[str, Any]) -> str:
    return (
        f'<dl class="pairs">{"".join(f"<dt>{escape(k)}</dt><dd>{escape(str(v))}</dd>" for k, v in pairs.items())}</dl>'
    )


def _percent(part: float, whole: float, unit: str = " %") -> str:
    return f"{100 * part / whole:.1f}{unit}" if whole > 0 else f"0{unit}"


def _rate(number: float) -> str:
    return f"{number:.0f}" if number >= 1000 else f"{number:.4g}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return show_seconds(seconds)
    hours = f"{minutes // 60} h " if minutes >= 60 else ""
    return f"{hours}{minutes % 60} min {rest} s"


STYLE = """
:root{--back:#fff;--card:#f4f6f9;--text:#17202c;--quiet:#56606e;--rule:#d5dbe3;--a:#1d5fd1;--b:#c2620a;--c:#0d8a72}
@media(prefers-color-scheme:dark){:root{--back:#12161c;--card:#1c222b;--text:#e6eaf0;--quiet:#9fa9b7;--rule:#343d4a;
--a:#78a8ff;--b:#f3a652;--c:#4cc9ae}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:76rem;padding:1rem;background:var(--back);color:var(--text);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.5rem 0 0}h2{font-size:1.1rem;margin:2rem 0 .5rem}
p{margin:.4rem 0;max-width:48rem;overflow-wrap:anywhere}.quiet{color:var(--quiet);font-size:.85rem}
.problems{border-left:4px solid var(--b);background:var(--card);margin:1rem 0;padding:.6rem 1rem .6rem 2rem;
overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fill,minmax(9.5rem,1fr));gap:.6rem;margin:1rem 0}
.cards div{background:var(--card);border-radius:.5rem;padding:.6rem .8rem}
.cards dt{color:var(--quiet);font-size:.8rem}.cards dd{margin:0;font-size:1.15rem;font-weight:600}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(21rem,100%),1fr));gap:1rem}
figure{margin:0;background:var(--card);border-radius:.5rem;padding:.7rem}
figcaption{font-size:.85rem;overflow-wrap:anywhere}figcaption i{display:inline-block;width:1rem;height:.25rem;
margin-right:.4rem;vertical-align:middle}
svg{display:block;width:100%;height:auto;margin-top:.4rem}svg text{fill:var(--quiet);font-size:11px}
.grid{stroke:var(--rule)}.line{fill:none;stroke-width:1.8}
path.s0{stroke:var(--a)}path.s1{stroke:var(--b)}path.s2{stroke:var(--c)}
circle.s0{fill:var(--a)}circle.s1{fill:var(--b)}circle.s2{fill:var(--c)}
i.s0,.compute{background:var(--a)}i.s1,.waiting{background:var(--b)}i.s2,.reducing{background:var(--c)}
.legend span{margin-right:1rem}.legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem}
.bars{list-style:none;padding:0;margin:.5rem 0;max-height:26rem;overflow:auto}
.bars li{display:flex;align-items:center;gap:.6rem}.bars b{min-width:2.5rem;text-align:right;font-weight:400}
.bar{display:flex;flex:1;height:1rem;margin:.15rem 0}.bar i{height:100%}
.scroll{overflow:auto;max-height:32rem;border:1px solid var(--rule);border-radius:.5rem}
table{border-collapse:collapse;width:100%;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .7rem;text-align:left;white-space:nowrap;border-bottom:1px solid var(--rule)}
th{position:sticky;top:0;background:var(--card);color:var(--quiet);font-weight:500}
tr:last-child td{border-bottom:0}
.pairs{display:grid;grid-template-columns:minmax(7rem,max-content) 1fr;gap:.3rem 1rem;margin:.5rem 0}
.pairs dt{color:var(--quiet)}.pairs dd{margin:0;overflow-wrap:anywhere;min-width:0}
@media(max-width:40rem){.pairs{display:block}.pairs dd{margin-bottom:.4rem}}
code{background:var(--card);padding:.1rem .3rem;border-radius:.25rem}
""".replace("\n", "")
