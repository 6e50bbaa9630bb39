"""What a benchmark has found: launches with their rows, as a file, and as medians over the launches of each kind."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy

from benchmarks.suite.cache_mode import MODES
from benchmarks.suite.rows import Row, table

#: The first word of a file: files of ``mpidist bench``, as it was once, have it too.
_FORMAT = "mpidist bench 1"


@dataclass
class Launch:
    """One launch of ranks.

    Attributes
    ----------
    subcommand : str
    command : list of str
        The words behind ``python -m``.
    ranks : int
    mpi, topology : str
    looks : dict
        Cache mode -> how often it was found in the course of the launch.
    rows : list of Row
    missing : dict
        Contender -> why it could not run.
    machine : dict
    """

    subcommand: str
    command: list[str]
    ranks: int
    mpi: str
    topology: str
    looks: dict[str, int]
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {**vars(self), "rows": [row.as_json() for row in self.rows]}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Launch:
        """Return what `as_json` gave."""
        return cls(**{**values, "rows": [Row.from_json(row) for row in values["rows"]]})

    def within(self, mode: str) -> list[Row]:
        """Return the rows that were measured in a cache mode."""
        return [row for row in self.rows if row.cache == mode]


def write(path: Path, launches: Sequence[Launch]) -> None:
    """Write launches as JSON."""
    text = json.dumps({"format": _FORMAT, "launches": [each.as_json() for each in launches]}, indent=1)
    path.write_text(text + "\n")


def read(path: Path) -> list[Launch]:
    """Return the launches of a file.

    Raises
    ------
    ValueError
        It is not a file of `write`.
    """
    try:
        values = json.loads(path.read_text())
        found = values["format"]
        launches = [Launch.from_json(each) for each in values["launches"]] if found == _FORMAT else []
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} was not written by python -m benchmarks --json: {error!r}") from error
    if found != _FORMAT:
        raise ValueError(f"{path} has the format {found!r}, expected {_FORMAT!r}")
    return launches


def medians(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each contender, size and work, of the rows of several launches: their median.  Local, pure."""
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.work, row.size, row.who), []).append(row)
    return [_median(same) for same in groups.values()]


def _median(rows: list[Row]) -> Row:
    def of(name: str) -> float:
        return float(numpy.median([getattr(row, name) for row in rows]))

    counted = [row.wrong for row in rows if row.wrong is not None]
    low, high = numpy.median([row.quartiles_us for row in rows], axis=0)
    numbers: dict[str, Any] = {name: of(name) for name in ("time_us", "algbw", "busbw", "ratio", "more_us")}
    return replace(
        rows[0],
        **numbers,
        quartiles_us=(float(low), float(high)),
        turns=sum(row.turns for row in rows),
        wrong=sum(counted) if counted else None,
        launches=len(rows),
    )


def kinds(launches: Sequence[Launch]) -> dict[tuple[str, int, str], list[Row]]:
    """Return the rows of all launches by subcommand, number of ranks and cache mode.  Local, pure."""
    found: dict[tuple[str, int, str], list[Row]] = {}
    for launch in launches:
        for row in launch.rows:
            found.setdefault((launch.subcommand, launch.ranks, row.cache), []).append(row)
    return found


def summary(launches: Sequence[Launch]) -> str:
    """Return medians over launches for each kind of launch, and which cache mode never came up."""
    parts = []
    for (subcommand, ranks, mode), rows in kinds(launches).items():
        same = medians(rows)
        count = max(row.launches for row in same)
        title = f"# {subcommand} on {ranks} ranks, {mode}: medians over {count} launches"
        parts.append("\n".join([title, *(table([row for row in same if row.work == work]) for work in works(same))]))
    return "\n\n".join([*parts, *never_came_up(launches)])


def works(rows: Sequence[Row]) -> list[str]:
    """Return what was done, in order.  Local, pure."""
    return list(dict.fromkeys(row.work for row in rows))


def never_came_up(launches: Sequence[Launch]) -> list[str]:
    """Return a line for each cache mode in which nothing was measured; one where it could not be found out."""
    seen = {row.cache for launch in launches for row in launch.rows}
    if not seen & set(MODES):
        return ["# cache mode: never found out"]
    return [f"# cache mode: {mode!r} never came up in {len(launches)} launches" for mode in MODES if mode not in seen]
