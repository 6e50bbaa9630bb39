"""Results as tables of Markdown, for pages."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.suite.cache_mode import UNKNOWN
from benchmarks.suite.contender import OursByAlgorithm, OursOneArray
from benchmarks.suite.results import Launch, kinds, medians, works
from benchmarks.suite.rows import Row
from mpidist.commands.quantities import show_bytes, show_seconds


def tables(launches: Sequence[Launch]) -> str:
    """Return a table for each work, MPI and number of ranks: medians over the launches, by cache mode.  Local, pure."""
    found = []
    for mpi, ranks in dict.fromkeys((launch.mpi, launch.ranks) for launch in launches):
        same = [launch for launch in launches if (launch.mpi, launch.ranks) == (mpi, ranks)]
        rows = [row for all_rows in kinds(same).values() for row in medians(all_rows)]
        for work in works(rows):
            own = [row for row in rows if row.work == work]
            found.append("\n".join([f"{work} on {ranks} ranks, {mpi}:", "", *_lines(own)]))
    return "\n\n".join(found)


def choices(launches: Sequence[Launch]) -> str:
    """Return a table for each MPI: by size and number of ranks the quickest algorithm, and AUTO's time by its.

    Medians over the launches, whatever the cache mode; empty where AUTO and others were not measured.  Local, pure.
    """
    found = []
    for mpi in dict.fromkeys(launch.mpi for launch in launches):
        cells: dict[int, dict[int, str]] = {}  # by size and number of ranks
        for ranks in sorted({launch.ranks for launch in launches if launch.mpi == mpi}):
            same = [each for each in launches if (each.mpi, each.ranks, each.subcommand) == (mpi, ranks, "all-reduce")]
            rows = medians(row for launch in same for row in launch.rows)
            for size in dict.fromkeys(row.size for row in rows):
                cells.setdefault(size, {})[ranks] = _choice([row for row in rows if row.size == size])
        columns = sorted({ranks for line in cells.values() for ranks in line if line[ranks]})
        if columns:
            lines = [[_size(size), *(cells[size].get(ranks, "") for ranks in columns)] for size in sorted(cells)]
            table = _table([["size", *(f"{ranks} ranks" for ranks in columns)], *lines])
            found.append("\n".join([f"The quickest algorithm, and AUTO's time by its, {mpi}:", "", *table]))
    return "\n\n".join(found)


def _choice(rows: Sequence[Row]) -> str:
    """Return the quickest algorithm, and how many times its time AUTO took; empty where either was not measured."""
    times = {row.who: row.time_us for row in rows if row.kind == OursByAlgorithm.kind and row.who != OursOneArray.name}
    auto, quickest = times.pop("auto", None), min(times, key=times.__getitem__, default=None)
    return "" if auto is None or quickest is None else f"{quickest}, {auto / times[quickest]:.2f}"


def _lines(rows: Sequence[Row]) -> list[str]:
    """Return one table: a line for each size where there are some, else one for each contender."""
    cells = {(_place(row), row.who): _cell(row) for row in rows}
    sizes = [_place(row) for row in sorted(rows, key=lambda row: row.size)]
    places, names = [*dict.fromkeys(sizes)], [*dict.fromkeys(row.who for row in rows)]
    if len({row.size for row in rows}) > 2:
        table = [["size", *names], *([place, *(cells.get((place, name), "") for name in names)] for place in places)]
    else:
        table = [["", *places], *([name, *(cells.get((place, name), "") for place in places)] for name in names)]
    return _table(table)


def _table(cells: Sequence[Sequence[str]]) -> list[str]:
    heading, *lines = (f"| {' | '.join(line)} |" for line in cells)
    return [heading, "|" + "---|" * len(cells[0]), *lines]


def _place(row: Row) -> str:
    """Return size, cache mode and number of launches."""
    mode = "" if row.cache == UNKNOWN else f", {row.cache}"
    return f"{_size(row.size)}{mode}" + (f", {row.launches} launches" if row.launches > 1 else "")


def _size(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return show_bytes(nbytes)


def _cell(row: Row) -> str:
    """Return the time, and how many times the reference's it is."""
    time = show_seconds(row.time_us * 1e-6)
    return time if row.who == row.reference else f"{time} ({row.ratio:.2f}x)"
