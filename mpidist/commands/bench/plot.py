"""Results as a picture; needs matplotlib, which nothing else here does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpidist.commands.bench.results import Launch, kinds, medians
from mpidist.commands.bench.rows import Row
from mpidist.errors import MissingDependencyError

_COLOURS = {"ours": "tab:blue", "peer": "tab:gray", "reference": "black"}


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing into files; MissingDependencyError where there is none.  Local."""
    try:
        import matplotlib
    except ImportError as error:
        raise MissingDependencyError("a plot needs matplotlib: pip install 'mpidist[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(launches: Sequence[Launch], path: Path) -> None:
    """Draw one panel for each kind of launch: curves over sizes, or bars for one size.  Local."""
    plots, panels = pyplot(), list(kinds(launches).items())
    figure, axes = plots.subplots(1, len(panels), figsize=(7 * len(panels), 5), squeeze=False)
    for axis, ((subcommand, ranks, mode), found) in zip(axes[0], panels, strict=True):
        rows = medians(found)
        count = max(row.launches for row in rows)
        axis.set_title(f"{subcommand}, {ranks} ranks, {mode}\n{launches[0].mpi}, median of {count} launches")
        if len({row.size for row in rows}) > 2:
            _curves(axis, rows)
        else:
            _bars(axis, rows)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plots.close(figure)


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
    several = len({row.work for row in rows}) > 1
    names = [f"{row.work}: {row.who}" if several else row.who for row in rows]
    axis.barh(names, [row.time_us / 1e3 for row in rows], color=[_COLOURS[row.kind] for row in rows])
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_xlabel("time (ms)")
    for number, row in enumerate(rows):
        axis.annotate(f" {row.ratio:.2f}x", (row.time_us / 1e3, number), va="center")
