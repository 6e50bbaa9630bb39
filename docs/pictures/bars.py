"""What was measured, as bars: medians over the launches of a file in ``benchmarks/results``."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from docs.pictures.svg import SMALL, WIDTH, Drawing, Theme

_RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"

_LEFT, _ROW = 176, 26


class Bar(NamedTuple):
    """A line: how it is named, in which colour it is, its length, and what is written behind it."""

    name: str
    colour: str
    length: float
    value: str


#: What the file calls a contender -> its name in the picture, and its colour.
_GRADIENTS = {
    "copy": ("a plain copy", "faint"),
    "mpidist, in buffers": ("mpidist, in buffers", "rank"),
    "mpidist": ("mpidist", "rank"),
    "Allreduce each": ("mpi4py, each array", "muted"),
    "Iallreduce packed": ("mpi4py, Iallreduce", "muted"),
    "Allreduce packed": ("mpi4py, packed", "muted"),
    "Gloo flat": ("Gloo, one tensor", "muted"),
    "Gloo DDP": ("PyTorch's DDP, Gloo", "muted"),
}
_SERVERS = {
    "messages of MPI": ("bare MPI messages", "faint"),
    "mpidist": ("mpidist", "rank"),
    "TensorFlow": ("TensorFlow", "muted"),
}
_TORCH = {
    "nothing": ("no communication", "faint"),
    "mpidist": ("mpidist, optimizer", "rank"),
    "mpidist DDP": ("mpidist, DDP class", "rank"),
    "DDP": ("PyTorch's DDP, Gloo", "muted"),
}
#: Which model of central_memory.json -> the heading of its bars.
_MEMORY = {"rows": "An embedding table, gradients of some rows", "dense": "A dense layer, gradients of all of it"}
_MODELS = ("MLP, 150,000", "MLP, 2.2 million", "ResNet-18, 11 million", "MLP, 25 million")


def microseconds(file: str, work: str, who: str) -> float:
    """Return the median over the launches of a file of what a contender took for a work."""
    return median(
        row["time_us"] for each in _launches(file) for row in each["rows"] if (row["work"], row["who"]) == (work, who)
    )


def milliseconds(model: str, who: str) -> float:
    """Return the median over the launches of what a contender took for a step of a model of PyTorch."""
    return median(1e3 * each["seconds"][model][who] for each in _launches("torch_steps-2"))


def _launches(file: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((_RESULTS / f"{file}.json").read_text())["launches"]
    return found


def gradients(theme: Theme) -> Drawing:
    panels = {}
    for title, work in (("ResNet-50: 161 arrays, 102 MB", "resnet50"), ("1000 arrays of 1 KB", "small")):
        times = {who: microseconds("gradients-2", work, who) / 1e3 for who in _GRADIENTS}
        panels[title] = [Bar(*_GRADIENTS[who], time, _shown(time)) for who, time in sorted(times.items(), key=_second)]
    return _draw(
        theme, "Summing the gradients of a model", "Milliseconds on 2 ranks of one machine: shorter is better.", panels
    )


def servers(theme: Theme) -> Drawing:
    panels = {}
    for title, work in (("SGD", "1 float"), ("SGD with momentum", "1 float, momentum"), ("Adam", "1 float, Adam")):
        rates = {who: 1e6 / microseconds("ps-4", work, who) for who in _SERVERS}
        panels[title] = [Bar(*_SERVERS[who], rate, f"{float(f'{rate:.3g}'):,.0f}") for who, rate in rates.items()]
    return _draw(
        theme, "Steps on a parameter server", "Steps a second, 4 processes on 2 cores: longer is better.", panels
    )


def torch_steps(theme: Theme) -> Drawing:
    panels = {}
    for model in _MODELS:
        times = {who: milliseconds(model, who) for who in _TORCH}
        panels[f"{model.replace(',000', ' 000')} parameters"] = [
            Bar(*_TORCH[who], time, _shown(time)) for who, time in times.items()
        ]
    return _draw(
        theme, "A training step of PyTorch", "Milliseconds on 2 ranks of one machine: shorter is better.", panels
    )


def central_memory(theme: Theme) -> Drawing:
    rows = json.loads((_RESULTS / "central_memory.json").read_text())["rows"]
    panels = {
        heading: [
            _memory_bar(row)
            for row in sorted(rows, key=lambda row: (row["ranks"], row["strategy"]))
            if (row["model"], row["mib"]) == (model, 256)
        ]
        for model, heading in _MEMORY.items()
    }
    below = "MiB of a node: 256 MiB of weights, with Adam: shorter is better."
    return _draw(theme, "Memory of central storage", below, panels)


def _memory_bar(row: dict[str, Any]) -> Bar:
    central = row["strategy"] == "CentralStorageStrategy"
    mib = (row["after_bytes"] - row["before_bytes"]) / 2**20
    name = f"{'central' if central else 'mirrored'}, {row['ranks']} rank{'s' * (row['ranks'] > 1)}"
    return Bar(name, "rank" if central else "muted", mib, f"{mib:,.0f}")


def _shown(time: float) -> str:
    """Return milliseconds with three digits."""
    return f"{f'{time:#.3g}'.removesuffix('.')} ms"


def _second(pair: tuple[str, float]) -> float:
    return pair[1]


def _draw(theme: Theme, title: str, below: str, panels: dict[str, list[Bar]]) -> Drawing:
    height = 70 + sum(44 + _ROW * len(bars) for bars in panels.values())
    drawing = Drawing(theme, f"{title}. {below}", height)
    drawing.heading(title, below)
    y = 70.0
    for heading, bars in panels.items():
        drawing.words(20, y + 20, heading, bold=True, at="start")
        longest = max(bar.length for bar in bars)
        for number, bar in enumerate(bars):
            _bar(drawing, y + 32 + _ROW * number, bar, longest)
        y += 44 + _ROW * len(bars)
    return drawing


def _bar(drawing: Drawing, y: float, bar: Bar, longest: float) -> None:
    length = max((WIDTH - _LEFT - 88) * bar.length / longest, 1.5)
    is_ours = bar.colour == "rank"
    drawing.words(_LEFT - 10, y + 15, bar.name, SMALL, "ink" if is_ours else "muted", at="end", bold=is_ours)
    drawing.box(_LEFT, y + 1, length, _ROW - 8, bar.colour, radius=min(3, length / 2))
    drawing.words(_LEFT + length + 7, y + 15, bar.value, SMALL, at="start", bold=is_ours)
