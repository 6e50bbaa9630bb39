"""The automatic choice of an all-reduce held against the best fixed one, at each size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpidist.collectives import selection
from mpidist.collectives.communicator import Communicator
from mpidist.commands.bench.contender import Ours
from mpidist.commands.bench.rows import Row

#: The contender whose algorithm is left to mpidist.
AUTO = "auto"

#: The target: AUTO takes at most so many times what the best fixed choice does, or so many microseconds more.
RATIO, MORE_US = 1.10, 5.0


@dataclass(frozen=True)
class Held:
    """AUTO and the best fixed choice at one size.

    Attributes
    ----------
    size : int
        In bytes.
    auto_us, best_us : float
    best : str
    """

    size: int
    auto_us: float
    best: str
    best_us: float

    @property
    def by_allowed(self) -> float:
        """AUTO's time by what the target allows it."""
        return self.auto_us / max(RATIO * self.best_us, self.best_us + MORE_US)


def fixed_choices(communicator: Communicator) -> list[str]:
    """Return every algorithm that AUTO could take here, and the rest of the table.  Local."""
    facts = communicator.facts()
    names = list(selection.eligible(facts))
    has_levels = 1 < facts.topology.node_count < facts.topology.size
    rest = ["rabenseifner", "binomial", *(["hierarchical"] if has_levels else [])]
    return [*names, *(name for name in rest if name not in names)]


def held(rows: Sequence[Row]) -> list[Held]:
    """Return AUTO against the best fixed choice for each size at which both are there.  Local, pure."""
    found = []
    for size in dict.fromkeys(row.size for row in rows):
        ours = [row for row in rows if row.size == size and row.kind == "ours" and row.who != Ours.name]
        fixed, auto = [row for row in ours if row.who != AUTO], [row for row in ours if row.who == AUTO]
        if fixed and auto:
            best = min(fixed, key=lambda row: row.time_us)
            found.append(Held(size, auto[0].time_us, best.who, best.time_us))
    return found


def by_allowed(rows: dict[str, Row]) -> float | None:
    """Return AUTO's time by what is allowed, of the rows of one size; a figure of a target.  Local, pure."""
    found = held(list(rows.values()))
    return found[0].by_allowed if found else None


def heading() -> str:
    """Return the lines above a table."""
    return (
        f"#{'size':>11} {'AUTO':>10} {'best':>10} {'ratio':>7} {'more':>8} {'target':>8}  best\n"
        f"#{'(B)':>11} {'(us)':>10} {'(us)':>10} {'':>7} {'(us)':>8}"
    )


def line(each: Held) -> str:
    """Return a row of a table."""
    reached = "reached" if each.by_allowed <= 1 else "missed"
    times = f"{each.auto_us:>10.1f} {each.best_us:>10.1f} {each.auto_us / each.best_us:>7.2f}"
    return f"{each.size:>12} {times} {each.auto_us - each.best_us:>8.1f} {reached:>8}  {each.best}"


def verdict(found: Sequence[Held]) -> str:
    """Return at how many sizes the target is reached, and where AUTO is furthest from the best."""
    reached, worst = sum(each.by_allowed <= 1 for each in found), max(found, key=lambda each: each.by_allowed)
    return (
        f"# auto is within max({RATIO:.2f}x, +{MORE_US:g} us) of the best fixed choice at {reached} of {len(found)} "
        f"sizes; furthest from it at {worst.size} B: {worst.auto_us:.1f} us against {worst.best_us:.1f} by {worst.best}"
    )
