"""`BatchShare`: which rows of a global batch this replica has, and how much they weigh."""

from __future__ import annotations

from typing import NamedTuple

from mpidist.input.sharding import part


class BatchShare(NamedTuple):
    """This replica's rows of a global batch.

    A replica without rows is given the first row of the batch in their place, with a weight of 0: it computes what the
    others compute, and nothing of it counts.

    `rows`: of the global batch.  `first`, `last`: this replica's rows are ``range(first, last)``.  `is_even`: whether
    all replicas have as many.
    """

    rows: int
    first: int
    last: int
    is_even: bool

    @classmethod
    def of(cls, rows: int, number: int, count: int) -> BatchShare:
        """Return the share of a replica by its number.  Local."""
        own = part(rows, number, count)
        return cls(rows, own.start, own.stop, rows % count == 0)

    @property
    def own_rows(self) -> int:
        """Rows that count."""
        return self.last - self.first

    @property
    def given(self) -> slice:
        """The rows that the model is given."""
        return slice(self.first, self.last) if self.own_rows else slice(0, 1)

    @property
    def given_rows(self) -> int:
        """How many rows the model is given."""
        return self.own_rows or 1

    @property
    def weight(self) -> float:
        """The part of the global batch that this replica has, from 0 to 1."""
        return self.own_rows / self.rows
