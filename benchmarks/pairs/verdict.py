"""Rows of two checkouts against each other: medians and quartiles over launches, ratios, and who fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from benchmarks.suite.results import Launch
from benchmarks.suite.rows import Row

#: A row fails when its median is so many times the old one, and the quartiles do not overlap.
WORSE = 1.10

#: Launches of a row below which the table says that they are too few.
FEWEST = 7

#: Case, ranks, work, size in bytes, contender.
Key = tuple[str, int, str, int, str]


@dataclass(frozen=True)
class Times:
    """One row of one checkout, over its launches.

    Attributes
    ----------
    low, median, high : float
        Quartiles of the launches' medians, in microseconds.
    by_reference : float
        Median of the launches' ratios to the reference of the row.
    modes : dict
        Cache mode -> in how many launches the row was measured in it.
    """

    low: float
    median: float
    high: float
    by_reference: float
    modes: dict[str, int]


@dataclass(frozen=True)
class Compared:
    """One row of both checkouts."""

    key: Key
    reference: str
    old: Times
    new: Times

    @property
    def ratio(self) -> float:
        """The new median by the old one."""
        return self.new.median / self.old.median

    @property
    def fails(self) -> bool:
        """Whether the new median is worse by more than 10 %, and the quartiles do not overlap."""
        return self.ratio > WORSE and self.new.low > self.old.high


def compared(old: Sequence[Launch], new: Sequence[Launch]) -> list[Compared]:
    """Return mpidist's rows that both checkouts have.  Local, pure."""
    before, after = _times(old), _times(new)
    references = {_key(launch, row): row.reference for launch in new for row in launch.rows}
    return [Compared(key, references[key], before[key], after[key]) for key in after if key in before]


def missing(old: Sequence[Launch], new: Sequence[Launch]) -> list[str]:
    """Return a line for each of mpidist's rows that one checkout alone has.  Local, pure."""
    before, after = _times(old), _times(new)
    only = [("new", key) for key in after if key not in before] + [("old", key) for key in before if key not in after]
    return [f"# only {side}: {key[0]} on {key[1]} ranks, {key[2]}, {key[3]} B, {key[4]}" for side, key in only]


def geometric_means(rows: Sequence[Compared]) -> dict[tuple[str, int], float]:
    """Return the geometric mean of new by old for each case and number of ranks.  Local, pure."""
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        found.setdefault(row.key[:2], []).append(row.ratio)
    return {key: float(numpy.exp(numpy.mean(numpy.log(ratios)))) for key, ratios in found.items()}


def report(old: Sequence[Launch], new: Sequence[Launch]) -> str:
    """Return the table of all rows, by case and number of ranks.  Local, pure."""
    rows, lines = compared(old, new), []
    for (case, ranks), mean in geometric_means(rows).items():
        own = [row for row in rows if row.key[:2] == (case, ranks)]
        lines += [f"# {case} on {ranks} ranks", _HEADING, *map(_line, own)]
        lines.append(f"# geometric mean of {case} on {ranks} ranks, new / old: {mean:.3f}\n")
    failing = [f"{row.key[0]} on {row.key[1]} ranks, {_name(row.key)}" for row in rows if row.fails]
    lines += missing(old, new)
    fewest = min((sum(times.modes.values()) for row in rows for times in (row.old, row.new)), default=0)
    lines += [f"# a row has {fewest} launches: quartiles need {FEWEST} or more"] if fewest < FEWEST else []
    lines.append(f"# rows that fail: {len(failing)} of {len(rows)}" + "".join(f"\n#   {each}" for each in failing))
    return "\n".join(lines)


def _times(launches: Sequence[Launch]) -> dict[Key, Times]:
    groups: dict[Key, list[tuple[float, float, str]]] = {}
    for launch in launches:
        for row in launch.rows:
            if row.kind == "ours":
                groups.setdefault(_key(launch, row), []).append((row.time_us, row.ratio, row.cache))
    found = {}
    for key, same in groups.items():
        low, median, high = numpy.percentile([time for time, _, _ in same], [25, 50, 75])
        ratio = float(numpy.median([ratio for _, ratio, _ in same]))
        found[key] = Times(float(low), float(median), float(high), ratio, dict(Counter(mode for _, _, mode in same)))
    return found


def _key(launch: Launch, row: Row) -> Key:
    return launch.subcommand, launch.ranks, row.work, row.size, row.who


def _name(key: Key) -> str:
    return f"{key[2]}, {key[3]} B, {key[4]}"


_HEADING = (
    f"# {'row':<58} {'old (us)':>32} {'new (us)':>32} {'new/old':>8} {'':>6} {'old/ref':>8} {'new/ref':>8}  "
    "reference; launches by cache mode, old | new"
)


def _line(row: Compared) -> str:
    verdict = "FAILS" if row.fails else ""
    times = f"{_told(row.old):>32} {_told(row.new):>32} {row.ratio:>8.3f} {verdict:>6}"
    references = f"{row.old.by_reference:>8.2f} {row.new.by_reference:>8.2f}"
    return f"  {_name(row.key):<58} {times} {references}  {row.reference}; {_modes(row.old)} | {_modes(row.new)}"


def _told(times: Times) -> str:
    return f"{times.median:.1f} [{times.low:.1f}, {times.high:.1f}]"


def _modes(times: Times) -> str:
    return ", ".join(f"{mode} {count}" for mode, count in sorted(times.modes.items()))
