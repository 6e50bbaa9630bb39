"""Results as tables of Markdown, for pages."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.commands.bench.results import Launch, kinds, medians, works
from mpidist.commands.bench.rows import Row
from mpidist.commands.quantities import show_bytes, show_seconds


def tables(launches: Sequence[Launch]) -> str:
    """Return a table for each work, MPI, number of ranks and cache mode: medians over the launches.  Local, pure."""
    found = []
    for mpi in dict.fromkeys(launch.mpi for launch in launches):
        for (_, ranks, mode), rows in kinds([launch for launch in launches if launch.mpi == mpi]).items():
            same = medians(rows)
            for work in works(same):
                own = [row for row in same if row.work == work]
                title = f"{work} on {ranks} ranks, {mode}, {mpi}, {max(row.launches for row in own)} launches:"
                found.append("\n".join([title, "", *_lines(own)]))
    return "\n\n".join(found)


def _lines(rows: Sequence[Row]) -> list[str]:
    """Return one table: a line for each size where there are some, else one for each contender."""
    cells = {(_size(row.size), row.who): _cell(row) for row in rows}
    sizes, names = (
        [_size(size) for size in sorted({row.size for row in rows})],
        [*dict.fromkeys(row.who for row in rows)],
    )
    if len(sizes) > 2:
        table = [["size", *names], *([size, *(cells.get((size, name), "") for name in names)] for size in sizes)]
    else:
        table = [["", *sizes], *([name, *(cells.get((size, name), "") for size in sizes)] for name in names)]
    heading, *lines = (f"| {' | '.join(line)} |" for line in table)
    return [heading, "|" + "---|" * len(table[0]), *lines]


def _size(nbytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size} {unit}"
    return show_bytes(nbytes)


def _cell(row: Row) -> str:
    """Return the time, and how many times the reference's it is."""
    time = show_seconds(row.time_us * 1e-6)
    return time if row.who == row.reference else f"{time} ({row.ratio:.2f}x)"
