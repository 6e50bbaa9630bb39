"""The plot of ``mpidist simulate``: every algorithm's time against the size of the buffer or the number of ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpidist.cluster.topology import Topology
from mpidist.commands.quantities import show_bytes
from mpidist.packages import pip_install
from mpidist.schedules.comparison import candidates, compare
from mpidist.schedules.cost import CostModel

#: The smallest buffer that is drawn, and how far sizes are apart.
_LEAST_BYTES, _FACTOR = 1024, 4


@dataclass(frozen=True)
class Curves:
    """Seconds by algorithm, at each of the places on the horizontal axis; None where there is no such algorithm."""

    places: Sequence[int]
    seconds: Mapping[str, Sequence[float | None]]
    axis: str
    title: str


def plot(options: argparse.Namespace, topology: Topology, model: CostModel, algorithms: Sequence[str]) -> int:
    """Write the plot to ``options.plot`` and return the exit status; Local."""
    try:
        import matplotlib
    except ImportError:
        print(f"mpidist simulate: a plot needs matplotlib: {pip_install('bench')}", file=sys.stderr)
        return 1
    matplotlib.use("Agg")
    if options.against == "bytes":
        curves = against_bytes(options.collective, options.bytes, topology, model, algorithms)
    else:
        curves = against_ranks(options.collective, options.bytes, topology, model, algorithms)
    try:
        _draw(curves, options.plot)
    except (OSError, ValueError) as error:
        print(f"mpidist simulate: {options.plot} cannot be written: {error}", file=sys.stderr)
        return 1
    return 0


def against_bytes(
    collective: str, most_bytes: int, topology: Topology, model: CostModel, algorithms: Sequence[str]
) -> Curves:
    """Return the curves over buffers up to `most_bytes` (Local)."""
    sizes = _steps(_LEAST_BYTES, max(most_bytes, _LEAST_BYTES * _FACTOR), _FACTOR)
    schedules = candidates(collective, topology)
    found = [{each.algorithm: each.seconds for each in compare(size, model, topology, schedules)} for size in sizes]
    seconds = {name: [by_name[name] for by_name in found] for name in algorithms}
    return Curves(sizes, seconds, "bytes", f"{collective} on {topology.size} ranks: {topology.describe()}")


def against_ranks(
    collective: str, nbytes: int, topology: Topology, model: CostModel, algorithms: Sequence[str]
) -> Curves:
    """Return the curves over the first 1, 2, 4, ... nodes of `topology` (Local)."""
    parts = [_first_nodes(topology, nodes) for nodes in _steps(1, topology.node_count, 2)]
    found = [
        {each.algorithm: each.seconds for each in compare(nbytes, model, part, candidates(collective, part))}
        for part in parts
    ]
    seconds = {name: [by_name.get(name) for by_name in found] for name in algorithms}
    return Curves([part.size for part in parts], seconds, "ranks", f"{collective} of {show_bytes(nbytes)}")


def _steps(first: int, last: int, factor: int) -> list[int]:
    """Return `first`, `factor` times as much, ..., and `last`."""
    steps = [first]
    while steps[-1] * factor < last:
        steps.append(steps[-1] * factor)
    return steps if steps[-1] == last else [*steps, last]


def _first_nodes(topology: Topology, nodes: int) -> Topology:
    kept = set(topology.node_names[:nodes])
    return Topology([host for host in topology.hosts if host in kept])


def _draw(curves: Curves, path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for name, seconds in curves.seconds.items():
        points = [(place, value) for place, value in zip(curves.places, seconds, strict=True) if value]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
    axes.set(xscale="log", yscale="log", xlabel=curves.axis, ylabel="seconds", title=curves.title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
