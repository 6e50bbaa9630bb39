"""``targets``: what the engine is to reach, as ratios within one launch, and what it reaches here."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy

from benchmarks.peers.mpi import Allreduce, AllreducePacked
from benchmarks.peers.tensorflow import TensorFlowRing
from benchmarks.peers.torch import GlooEach, GlooFlat
from benchmarks.suite import gpu, gpu_steps
from benchmarks.suite.cache_mode import ONE_CACHE, TWO_CACHES
from benchmarks.suite.contender import Copy, Ours, OursInBuffers
from benchmarks.suite.launches import launch
from benchmarks.suite.results import Launch
from benchmarks.suite.rows import BOUND, Row
from benchmarks.suite.scaling import best_peer
from benchmarks.suite.small_variables import ReduceThenFlat
from benchmarks.suite.step import REFERENCE, ApplyGradients, BlockedAlone

WHAT = "what the engine is to reach, and what it reaches here"

#: Who -> row, of one piece of work in one launch.
Rows = dict[str, Row]


@dataclass(frozen=True)
class Target:
    """A bound on a figure of one launch.

    Attributes
    ----------
    subcommand, work : str
    ranks : int
    what : str
        In the table.
    figure : callable
        The figure of a launch's rows for that work, None where somebody it needs did not run.
    limit : float
    at_most : bool
        False: the figure is to be at least the limit.
    mode : str
        The cache mode in which it holds; empty for any.
    size : tuple of int
        The sizes in bytes in which it holds, both ends included; the figure of the worst counts.
    """

    subcommand: str
    work: str
    ranks: int
    what: str
    figure: Callable[[Rows], float | None]
    limit: float
    at_most: bool = True
    mode: str = ""
    size: tuple[float, float] = (0, float("inf"))

    def holds(self, value: float) -> bool:
        """Return whether a figure is within the bound."""
        return value <= self.limit if self.at_most else value >= self.limit

    def figures(self, launches: Sequence[Launch]) -> dict[str, list[float]]:
        """Return the figures of the launches that it is about, by cache mode.  Local, pure."""
        found: dict[str, list[float]] = {}
        for each in launches:
            if each.ranks != self.ranks or each.subcommand != self.subcommand:
                continue
            for mode in dict.fromkeys(row.cache for row in each.rows):
                value = self._worst(each.within(mode)) if self.mode in ("", mode) else None
                if value is not None:
                    found.setdefault(mode, []).append(value)
        return found

    def _worst(self, rows: Sequence[Row]) -> float | None:
        rows = [row for row in rows if row.work == self.work and self.size[0] <= row.size <= self.size[1]]
        sizes = dict.fromkeys(row.size for row in rows)
        values = [self.figure({row.who: row for row in rows if row.size == size}) for size in sizes]
        known = [value for value in values if value is not None]
        return (max if self.at_most else min)(known, default=None)


def time_of(who: str, by: str) -> Callable[[Rows], float | None]:
    """Return what divides one contender's time by another's."""
    return lambda rows: rows[who].time_us / rows[by].time_us if who in rows and by in rows else None


def best_peer_by(who: str) -> Callable[[Rows], float | None]:
    """Return what divides the quickest peer's time by a contender's."""

    def figure(rows: Rows) -> float | None:
        peer = best_peer(list(rows.values()))
        return peer.time_us / rows[who].time_us if peer is not None and who in rows else None

    return figure


def more_than(who: str, by: str) -> Callable[[Rows], float | None]:
    """Return what gives the microseconds that one contender takes more than another."""
    return lambda rows: rows[who].time_us - rows[by].time_us if who in rows and by in rows else None


def microseconds(who: str) -> Callable[[Rows], float | None]:
    """Return what gives a contender's microseconds."""
    return lambda rows: rows[who].time_us if who in rows else None


def staged_by_slower(rows: Rows) -> float | None:
    """Return what divides the time through host memory by the longer of its copies and the host's own reduction."""
    parts = [rows[who].time_us for who in (gpu.ROUND_TRIP, gpu.ON_HOST) if who in rows]
    is_staged = gpu.NCCL not in rows and gpu.OURS in rows
    return rows[gpu.OURS].time_us / max(parts) if is_staged and len(parts) == 2 else None


_OURS, _COPY = Ours.name, Copy.name
_ABOVE_MPI, _BY_MPI = more_than(_OURS, Allreduce.name), time_of(_OURS, Allreduce.name)
_LONG = (1 << 20, float("inf"))
_CARD_COPY = f"{gpu.COPY}{gpu.ALONE}"
_TWO_LEVEL, _LINK = "two_level", (4_900_000, 5_100_000)

#: Those of ``two-levels`` are measured by ``benchmarks/two_levels.py``, which needs hosts of its own, those of ``gpu``
#: and ``gpu-steps`` by ``tests/gpu/run`` on a card.  ``ps`` and ``slot-adding``, which start no launches of two ranks,
#: have theirs beside them.
TARGETS = (
    Target("gradients", "resnet50", 2, "against a copy", time_of(_OURS, _COPY), 1.25, mode=ONE_CACHE),
    Target("gradients", "resnet50", 2, "best peer / ours", best_peer_by(_OURS), 1.7, False, ONE_CACHE),
    Target("gradients", "resnet50", 2, "best peer / ours", best_peer_by(_OURS), 1.4, False, TWO_CACHES),
    Target("gradients", "resnet50", 2, "packed Allreduce / ours", time_of(AllreducePacked.name, _OURS), 2.5, False),
    Target("gradients", "resnet50", 2, "Gloo flat / ours", time_of(GlooFlat.name, _OURS), 4, False),
    Target("gradients", "resnet50", 2, "Gloo each / ours", time_of(GlooEach.name, _OURS), 4, False),
    Target("gradients", "resnet50", 2, "TensorFlow / ours", time_of(TensorFlowRing.name, _OURS), 20, False),
    Target("gradients", "resnet50", 2, "in buffers / ours", time_of(OursInBuffers.name, _OURS), 0.6),
    Target("gradients", "resnet50", 4, "against a copy", time_of(_OURS, _COPY), 1.4),
    Target("gradients", "resnet50", 4, "best peer / ours", best_peer_by(_OURS), 2, False),
    *(
        Target("gradients", "small", ranks, *rest)
        for ranks in (2, 4)
        for rest in (
            ("against a copy", time_of(_OURS, _COPY), 2.5),
            ("best peer / ours", best_peer_by(_OURS), 1.5, False),
        )
    ),
    Target("step", "resnet50 sgd", 2, "against textbook", time_of(ApplyGradients.name, REFERENCE), 0.6),
    Target("step", "resnet50 adam", 2, "against textbook", time_of(ApplyGradients.name, REFERENCE), 0.42),
    Target("step", "resnet50 sgd", 2, "against update alone", time_of(ApplyGradients.name, BlockedAlone.name), 1.0),
    Target("step", "resnet50 adam", 2, "against update alone", time_of(ApplyGradients.name, BlockedAlone.name), 1.0),
    *(
        Target("first-steps", f"resnet50, steps {span}", 2, "better of raw MPI / ours", best_peer_by(_OURS), 1.7, False)
        for span in ("1 to 20", "100 to 120")
    ),
    *(
        Target("small-variables", f"1000 variables of {nbytes} B", 2, *rest)
        for nbytes, times_loop in ((400, 0.5), (2048, 1 / 1.3))
        for rest in (
            ("against a flat update", time_of(ApplyGradients.name, ReduceThenFlat.name), 1.5),
            ("against a loop", time_of(ApplyGradients.name, REFERENCE), times_loop),
        )
    ),
    Target("all-reduce", "all_reduce", 2, "us above Allreduce, 4 B", _ABOVE_MPI, 3.5, size=(4, 4)),
    Target("all-reduce", "all_reduce", 2, "us above Allreduce", _ABOVE_MPI, 5, size=(5, 4096)),
    Target("all-reduce", "all_reduce", 2, "1 MiB by Allreduce", _BY_MPI, 1.15, mode=ONE_CACHE, size=(1 << 20, 1 << 20)),
    Target("all-reduce", "all_reduce", 2, "native by Allreduce", time_of("native", Allreduce.name), 1.15, size=_LONG),
    *(
        Target("two-levels", f"2 hosts, {placement}, 100mbit", 4, *rest, at_most=False, size=_LINK)
        for placement, times_ring in (("block", 1.35), ("cyclic", 2.5))
        for rest in (
            ("bound of the link / ours", time_of(BOUND, _TWO_LEVEL), 0.9),
            ("flat ring / ours", time_of("ring", _TWO_LEVEL), times_ring),
            ("Allreduce / ours", time_of(Allreduce.name, _TWO_LEVEL), 1.0),
        )
    ),
    *(
        Target("gpu", f"pack {work}", 1, f"copy / {what}", time_of(_CARD_COPY, f"{what}{gpu.ALONE}"), 0.85, False)
        for work in ("resnet50", "bert-base")
        for what in (gpu.PACK, gpu.UNPACK)
    ),
    *(
        Target("gpu", "pack small", 1, f"us of {what}, {told}", microseconds(f"{what}{where}"), limit)
        for what in (gpu.PACK, gpu.UNPACK)
        for where, told, limit in ((gpu.ALONE, "card alone", 20), ("", "call", 30))
    ),
    *(
        Target("gpu", "array", ranks, *rest)
        for ranks in (1, 2)
        for rest in (
            ("us above NCCL", more_than(gpu.OURS, gpu.NCCL), 15, True, "", (0, 1 << 20)),
            ("from 25 MB by NCCL", time_of(gpu.OURS, gpu.NCCL), 1.05, True, "", (25_000_000, float("inf"))),
        )
    ),
    Target("gpu", "adam", 1, "copy / Adam", time_of(gpu.ADAM_COPY, gpu.ADAM), 0.8, False),
    Target("gpu", "resnet50", 2, "staged by slower part", staged_by_slower, 1.15),
    *(
        Target("gpu-steps", model, 2, "best DDP / ours", best_peer_by(gpu_steps.OURS), 1.0, False)
        for model in ("resnet50", "gpt")
    ),
)

#: What is launched for them: ranks, and words behind ``python -m benchmarks``.
LAUNCHES = (
    (2, ("gradients", "--model", "resnet50", "small", "--peers")),
    (4, ("gradients", "--model", "resnet50", "small", "--peers")),
    (2, ("step",)),
    (2, ("first-steps",)),
    (2, ("small-variables",)),
    (2, ("all-reduce", "--largest", "16777216", "--algorithms", "auto,native")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: this subcommand takes what all take."""


def start(options: argparse.Namespace) -> list[Launch]:
    """Start the launches, print the table, and return what was found.  Local."""
    found: list[Launch] = []
    limits = [f"--{name}={getattr(options, name)}" for name in ("seconds", "rounds") if getattr(options, name)]
    for ranks, arguments in LAUNCHES:
        found += launch([*arguments, *limits], ranks, options.launches)
    print(f"\n{report(found)}", flush=True)
    return found


def report(launches: Sequence[Launch]) -> str:
    """Return the table of the engine's targets.  Local, pure."""
    return report_of(TARGETS, launches)


def report_of(targets: Sequence[Target], launches: Sequence[Launch]) -> str:
    """Return the table of those targets that the launches are about: bound, figure, verdict.  Local, pure.

    The figure is the median over the launches of a cache mode.
    """
    done = {each.subcommand for each in launches}
    targets = [target for target in targets if target.subcommand in done]
    width = max([14, *(len(target.work) for target in targets)])
    columns = f"{'ranks':>5} {'figure':<24} {'target':>8} {'cache':<11} {'reached':>8} {'launches':>8}"
    heading = f"# {'work':<{width}} {columns}"
    return "\n".join([heading, *(line for target in targets for line in _lines(target, launches, width))])


def _lines(target: Target, launches: Sequence[Launch], width: int) -> list[str]:
    bound = f"{'<=' if target.at_most else '>='} {target.limit:g}"
    start = f"  {target.work:<{width}} {target.ranks:>5} {target.what:<24} {bound:>8}"
    figures = target.figures(launches)
    if not figures:
        return [f"{start} {target.mode or 'any':<11} {'-':>8} {0:>8}  not measured"]
    return [
        f"{start} {mode:<11} {numpy.median(values):>8.2f} {len(values):>8}  {_verdict(target, values)}"
        for mode, values in sorted(figures.items())
    ]


def _verdict(target: Target, values: Sequence[float]) -> str:
    if target.holds(float(numpy.median(values))):
        return "reached"
    within = sum(map(target.holds, values))
    return f"missed (in {len(values) - within} of {len(values)} launches)"
