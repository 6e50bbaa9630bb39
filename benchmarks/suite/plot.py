"""Results as a picture; needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.results import Launch, kinds, medians, works
from benchmarks.suite.rows import Row
from mpidist.errors import MissingDependencyError
from mpidist.packages import pip_install

#: Panels side by side.
_COLUMNS = 3

_COLOURS = {"ours": "tab:blue", "peer": "tab:gray", "reference": "black"}


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing into files; MissingDependencyError where there is none.  Local."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError(f"a plot needs matplotlib: {pip_install('bench')}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(launches: Sequence[Launch], path: Path) -> None:
    """Draw one panel for each work of each kind of launch: curves over sizes, or bars for one size.  Local."""
    plots, found = pyplot(), panels(launches)
    columns = min(_COLUMNS, len(found))
    lines = -(-len(found) // columns)
    figure, axes = plots.subplots(lines, columns, figsize=(7 * columns, 4.5 * lines), squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (title, rows) in zip(axes.flat, found, strict=False):
        axis.set_title(f"{title}\n{launches[0].mpi}, medians over {rows[0].launches} launches")
        if len({row.size for row in rows}) > 2:
            _curves(axis, rows)
        else:
            _bars(axis, rows)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plots.close(figure)


def panels(launches: Sequence[Launch]) -> list[tuple[str, list[Row]]]:
    """Return title and rows of each panel.  Local, pure."""
    found = []
    for (subcommand, ranks, mode), all_rows in kinds(launches).items():
        rows = medians(all_rows)
        for work in works(rows):
            title = f"{subcommand}: {work}, {ranks} ranks, {mode}"
            found.append((title, [row for row in rows if row.work == work]))
    return found


def _curves(axis: Any, rows: Sequence[Row]) -> None:
    for name in dict.fromkeys(row.who for row in rows):
        own = [row for row in rows if row.who == name]
        style = {"color": "black", "linestyle": ":"} if own[0].kind == "reference" else {"marker": "."}
        style = {**style, "linestyle": "--"} if own[0].kind == "peer" else style
        axis.loglog([row.size for row in own], [row.time_us for row in own], label=name, **style)
    axis.set_xlabel("size (bytes)")
    axis.set_ylabel("time (us)")
    axis.grid(True, which="major", alpha=0.3)
    axis.legend()


def _bars(axis: Any, rows: Sequence[Row]) -> None:
    times_ms = [row.time_us / 1e3 for row in rows]
    axis.barh([row.who for row in rows], times_ms, color=[_COLOURS[row.kind] for row in rows])
    axis.invert_yaxis()
    axis.margins(x=0.15)
    if max(times_ms) > 10 * min(times_ms):
        axis.set_xscale("log")
        axis.set_xlim(left=min(times_ms) / 2)
    axis.set_xlabel("time (ms)")
    for number, row in enumerate(rows):
        axis.annotate(f" {row.ratio:.2f}x", (row.time_us / 1e3, number), va="center")
