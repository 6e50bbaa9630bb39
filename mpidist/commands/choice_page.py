"""The page that says which all-reduce is chosen for how many bytes, and why: ``mpidist tune`` and ``mpidist info``."""

from __future__ import annotations

from mpidist.collectives.ways import selection
from mpidist.collectives.ways.selection import Facts
from mpidist.commands.quantities import show_bytes, show_seconds, table
from mpidist.schedules.cost import Level
from mpidist.schedules.figures import Figures
from mpidist.tuning.store import Record

#: Sizes in bytes on the page: powers of four.
SIZES = tuple(4**power for power in range(1, 15))


def page(record: Record) -> str:
    """Return all that is known of a set of ranks: the levels, and what is chosen for which size (Local)."""
    facts = record.facts()
    topology = facts.topology
    shown = ", ".join(topology.node_names[:4]) + (", ..." if topology.node_count > 4 else "")
    lines = [f"{topology.describe()} ({shown}), {record.key['mpi']}, {record.key['processor']}"]
    return "\n".join([*lines, "", levels(record.figures, facts), "", choices(record.figures, facts)])


def levels(figures: Figures, facts: Facts) -> str:
    """Return latency, bandwidth and reduction cost of each level as a table (Local)."""
    model, topology = figures.model, facts.topology
    rows = [("level", "latency", "bandwidth", "reduction")]
    if max(topology.local_size_of) > 1:
        rows.append(("inside a node", *_prices(model.intra)))
    if topology.node_count > 1:
        rows.append(("between nodes", *_prices(model.inter)))
    return table(rows)


def _prices(level: Level) -> tuple[str, str, str]:
    return show_seconds(level.alpha), _rate(level.beta), _rate(level.gamma)


def _rate(seconds_per_byte: float) -> str:
    return f"{show_bytes(1 / seconds_per_byte)}/s" if seconds_per_byte > 0 else "no limit seen"


def choices(figures: Figures, facts: Facts) -> str:
    """Return, by size, what is chosen, the predicted seconds of every candidate, and why it is that one (Local)."""
    known, names = selection.worked_out(figures, facts), selection.eligible(facts)
    rows = [("bytes", "chosen", *names, "because")]
    for nbytes in SIZES:
        chosen = known.algorithm(nbytes, facts.has_segments)
        seconds = selection.predictions(figures, nbytes, facts)
        cells = [show_seconds(seconds[name]) if name in seconds else "-" for name in names]
        best = min(seconds, key=lambda name: (seconds[name], name))
        reason = "quickest" if best == chosen else f"{best} is hardly quicker, within the noise"
        rows.append((str(nbytes), chosen, *cells, reason))
    lines = [table(rows, left=(1, len(rows[0]) - 1))]
    if not facts.has_segments:
        lines.append(f"lists of tensors are fused into units of {show_bytes(known.bucket_bytes)}")
    if figures.segments:
        lines += ["", segments(figures)]
    return "\n".join(lines)


def segments(figures: Figures) -> str:
    """Return, by size, the seconds through memory with every size of segments, and which size is chosen (Local)."""
    rows = [("bytes", *(f"segments of {size >> 10} KiB" for size in figures.segments))]
    for found in zip(*figures.segments.values(), strict=True):
        rows.append((str(int(found[0][0])), *(show_seconds(seconds) for _, seconds in found)))
    chosen = figures.segment_bytes
    why = "clearly quicker than those of the table" if chosen else "no other size is clearly quicker"
    return f"{table(rows)}\nsegments of {(chosen or selection.SEGMENT_BYTES) >> 10} KiB: {why}"


def table_page(facts: Facts) -> str:
    """Return the rows of the fixed table for some ranks, each with what it was measured on, and the files (Local)."""
    rows = [("bytes from", "chosen", "measured ranks", "because")]
    for row in selection.TABLE:
        if row.place == facts.place:
            chosen, measured = selection.by_table(row.least_bytes, facts), f"up to {row.ranks}" if row.ranks else "-"
            rows.append((str(row.least_bytes), chosen, measured, row.evidence(facts.topology.size)))
    return table(rows, left=(1, 2, 3))
