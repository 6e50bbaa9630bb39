"""A row of the table: what is known about one contender at one size, in nccl-tests' columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy

from benchmarks.suite.cache_mode import CHANGED, UNKNOWN
from benchmarks.suite.contender import Contender
from benchmarks.suite.tensors import TensorList
from benchmarks.suite.turns import Timing

#: Who takes the time that a link needs at least.
BOUND = "bound of the link"


@dataclass(frozen=True)
class Row:
    """One contender at one size, in one launch or as the median of several.

    Attributes
    ----------
    work : str
        What was done: ``"resnet50"``, ``"all_reduce"``, ``"sgd"``, ...
    size, count : int
        Bytes and elements of a rank's tensors together.
    type, who, kind : str
    time_us : float
        Median over the turns of the ranks' time together; `quartiles_us` are those beside it.
    turns : int
        How often it was timed.
    algbw, busbw : float
        GB/s: size by time, and that times a factor which makes it comparable with the speed of a link.
    reference : str
        The contender that `ratio` and `more_us` refer to.
    ratio, more_us : float
        The time divided by that of the reference, of the same launch; and the microseconds above it.
    wrong : int or None
    cache : str
        The cache mode of the turns that count.
    launches : int
        How many it is the median of.
    """

    work: str
    size: int
    count: int
    type: str
    who: str
    kind: str
    time_us: float
    quartiles_us: tuple[float, float]
    turns: int
    algbw: float
    busbw: float
    reference: str
    ratio: float
    more_us: float
    wrong: int | None
    cache: str = UNKNOWN
    launches: int = 1

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Row:
        """Return what `as_json` gave."""
        return cls(**{**values, "quartiles_us": tuple(values["quartiles_us"])})


def all_reduce_factor(size: int) -> float:
    """Return busbw by algbw of an all-reduce on so many ranks: 2 (P - 1) / P."""
    return 2 * (size - 1) / size


def rows_of(
    work: str,
    contenders: Sequence[Contender],
    timings: Sequence[Timing],
    tensors: TensorList,
    reference: str,
    factor: float,
) -> list[Row]:
    """Return a row for each contender that had a turn in the cache mode that most turns had.  Local, pure.

    Parameters
    ----------
    work : str
    contenders, timings : sequence
        In the same order.
    tensors : TensorList
    reference : str
        The name of one of the contenders.
    factor : float
        busbw by algbw.
    """
    mode = _mode_of(timings, [each.name for each in contenders].index(reference))
    within = {each.name: timing.within(mode) for each, timing in zip(contenders, timings, strict=True)}
    base = reference, float(numpy.median(within[reference]))
    found = []
    for contender, timing in zip(contenders, timings, strict=True):
        who, seconds = contender.name, within[contender.name]
        if seconds:
            by = factor if contender.is_reduction else 0.0  # what is no reduction uses no link
            what = work, tensors.nbytes, tensors.dtype.name, who, contender.kind
            found.append(row_of(*what, seconds, base, by, timing.wrong, mode))
    return found


def row_of(
    work: str,
    nbytes: int,
    dtype: str,
    who: str,
    kind: str,
    seconds: Sequence[float],
    reference: tuple[str, float],
    factor: float = 0.0,
    wrong: int | None = None,
    cache: str = UNKNOWN,
) -> Row:
    """Return the row of what was timed so many times.  Local, pure.

    Parameters
    ----------
    work, nbytes, dtype, who, kind
        As in `Row`.
    seconds : sequence of float
        At least one.
    reference : (str, float)
        A contender and its seconds.
    factor, wrong, cache
        As for `rows_of`, and in `Row`.
    """
    median = float(numpy.median(seconds))
    low, high = numpy.percentile(seconds, [25, 75]) * 1e6
    return Row(
        work=work,
        size=nbytes,
        count=nbytes // numpy.dtype(dtype).itemsize,
        type=dtype,
        who=who,
        kind=kind,
        time_us=median * 1e6,
        quartiles_us=(float(low), float(high)),
        turns=len(seconds),
        algbw=nbytes / median / 1e9,
        busbw=nbytes / median / 1e9 * factor,
        reference=reference[0],
        ratio=median / reference[1],
        more_us=(median - reference[1]) * 1e6,
        wrong=wrong,
        cache=cache,
    )


def bound_of(work: str, nbytes: int, dtype: str, reference: tuple[str, float], bits_per_second: float) -> Row:
    """Return the time that a link between nodes needs: each must send and receive the buffer once.  Local, pure."""
    seconds = nbytes * 8 / bits_per_second
    return replace(row_of(work, nbytes, dtype, BOUND, "reference", [seconds], reference), turns=0)


def _mode_of(timings: Sequence[Timing], reference: int) -> str:
    """Return the mode that most turns had, as long as the reference had a turn in it; else that they do not tell."""
    counts = Counter(mode for timing in timings for mode in timing.modes)
    mode = counts.most_common(1)[0][0]
    return mode if timings[reference].within(mode) else CHANGED


def heading() -> str:
    """Return the lines above a table."""
    return (
        f"#{'size':>10} {'count':>10} {'type':>8} {'':28} {'time':>10} {'algbw':>7} {'busbw':>7} {'ratio':>7} "
        f"{'more':>10} {'#wrong':>6}\n"
        f"#{'(B)':>10} {'(elements)':>10} {'':>8} {'':28} {'(us)':>10} {'(GB/s)':>7} {'(GB/s)':>7} {'':>7} {'(us)':>10}"
    )


def line(row: Row) -> str:
    """Return a row of a table."""
    busbw = f"{row.busbw:.2f}" if row.busbw else "-"
    wrong = "-" if row.wrong is None else str(row.wrong)
    return (
        f"{row.size:>11} {row.count:>10} {row.type:>8} {row.who:<28} {row.time_us:>10.1f} {row.algbw:>7.2f} "
        f"{busbw:>7} {row.ratio:>7.2f} {row.more_us:>10.1f} {wrong:>6}"
    )


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table, with what their ratios refer to; empty for none."""
    if not rows:
        return ""
    references = ", ".join(dict.fromkeys(row.reference for row in rows))
    modes = ", ".join(dict.fromkeys(row.cache for row in rows))
    return "\n".join([heading(), *map(line, rows), f"# ratio and more: against {references}; {modes}"])
