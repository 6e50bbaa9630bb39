"""By what a replica's gradients are multiplied where losses are means over different numbers of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from mpidist.frameworks.replicas import Replicas


class RowParts:
    """The rows of the passes that are accumulated before a reduction.

    One factor is right for all of them where each rank has the same part of the rows of every pass.  `owner` is what it
    belongs to, for messages.
    """

    def __init__(self, replicas: Replicas, owner: str) -> None:
        self._replicas, self._owner = replicas, owner
        self._rows: list[float] = []

    def clear(self) -> None:
        """Forget the passes.  Local."""
        self._rows.clear()

    def note(self, rows: float | None) -> None:
        """Take note of the rows of a pass that is over; None where nothing was said.  Local."""
        if rows is not None:
            self._rows.append(rows)

    def part(self, rows: float) -> float:
        """Return this replica's part of the rows, and forget the passes.  Collective.

        RuntimeError, on all ranks, where the parts are not the same in every pass.
        """
        noted, self._rows = self._rows, []
        total = numpy.array([rows, len({*noted}) > 1], numpy.float64)
        self._replicas.reduce("sum", [total], "rows")
        if total[1]:
            told = self._replicas.communicator.exchange(numpy.array(noted, numpy.float64).tobytes(), "rows of passes")
            self._check([numpy.frombuffer(each).tolist() for each in told])
        # by no rows at all, what was reduced before stays
        return float(rows / total[0]) if total[0] else 1.0 / self._replicas.size

    def _check(self, told: Sequence[list[float]]) -> None:
        """Raise unless each rank has the same part of the rows of every pass."""
        passes = [each for each in told if each]  # a rank without a pass has no rows
        if len({len(each) for each in passes}) == 1:
            rows = numpy.array(passes)
            totals = rows.sum(0)
            parts = rows[:, totals > 0] / totals[totals > 0]
            if numpy.allclose(parts, parts[:, :1], rtol=1e-12, atol=0):
                return
        named = ", ".join(f"rank {rank} {each}" for rank, each in enumerate(told))
        raise RuntimeError(
            f"{self._owner}: gradients of several passes were accumulated, and the ranks' parts of the rows differ "
            f"from pass to pass: {named}. No factor is right for all. Reduce after each pass, or divide each loss by "
            "the rows of the global batch (compute_average_loss), with op='sum'"
        )
