"""By what a replica's gradients are multiplied where losses are means over different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy

from mpidist.frameworks.replicas import Replicas


class RowParts:
    """The rows of the passes that are accumulated before a reduction.

    One factor is right for all of them where each rank has the same part of the rows of every pass.  `owner` is what it
    belongs to, for messages.  `said` is the number of rows of the next passes, None where nobody said it; `is_open`: no
    pass has been made since.
    """

    def __init__(self, replicas: Replicas, owner: str) -> None:
        self._replicas, self._owner = replicas, owner
        self.said: float | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all passes.  Local."""
        self._rows: list[float] = []
        self._made, self.is_open = 0, False

    def clear(self) -> None:
        """Forget the passes that were made.  Local."""
        del self._rows[: self._made]
        self._made = 0

    def say(self, rows: float) -> None:
        """Take the number of rows of the next passes.  Local."""
        if self.is_open and self.said == 0:
            self._rows.append(0.0)  # of a pass that this rank has left out
        self.said, self.is_open = rows, True

    def note(self) -> None:
        """Take note that a pass is over.  Local."""
        self._rows.append(numpy.nan if self.said is None else self.said)
        self._made, self.is_open = len(self._rows), False

    def part(self, rows: float) -> float:
        """Return this replica's part of the rows, and forget the passes.  Collective.

        `rows`: what was said last.  RuntimeError, on all ranks, where the parts are not the same in every pass.
        """
        passes = numpy.array([*self._rows, rows] if self.is_open or not self._rows else self._rows, numpy.float64)
        self.forget()
        own = passes.sum()
        total = numpy.array([own, len(passes) > 1 or numpy.isnan(own)], numpy.float64)
        self._replicas.reduce("sum", [total], "rows")
        if total[1]:
            told = self._replicas.communicator.exchange(passes.tobytes(), "rows of passes")
            self._check([numpy.frombuffer(each).tolist() for each in told])
        # by no rows at all, what was reduced before stays
        return float(own / total[0]) if total[0] else 1.0 / self._replicas.size

    def _check(self, told: Sequence[list[float]]) -> None:
        """Raise unless each rank has the same part of the rows of every pass, and none of one that it left out."""
        rows = numpy.array([*zip_longest(*told, fillvalue=0.0)]).T
        if not numpy.isnan(rows).any():
            totals = rows.sum(0)
            parts = rows[:, totals > 0] / totals[totals > 0]
            if numpy.allclose(parts, parts[:, :1], rtol=1e-12, atol=0):
                return
        known = [[None if numpy.isnan(rows) else rows for rows in each] for each in told]
        named = ", ".join(f"rank {rank} {each}" for rank, each in enumerate(known))
        raise RuntimeError(
            f"{self._owner}: gradients of several passes were accumulated, and the ranks' parts of the rows differ "
            f"from pass to pass: {named}. No factor is right for all. Set rows before each pass and reduce after it, "
            "or divide each loss by the rows of the global batch (compute_average_loss), with op='sum'"
        )
