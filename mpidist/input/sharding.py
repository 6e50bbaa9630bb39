"""Which rows of a global batch belong to which replica: pure index arithmetic, TensorFlow's rule.

A global batch of R rows on n replicas is cut into contiguous blocks of ceil(R / n) rows in replica order;
later replicas get what is left, possibly nothing: 4 rows on 3 replicas are 2, 2 and 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple


def part(rows: int, replica_id: int, num_replicas: int) -> range:
    """Return the rows of a global batch that one replica gets.  Local."""
    if rows < 0:
        raise ValueError(f"a global batch of {rows} rows cannot be split; expected 0 rows or more")
    if not 0 <= replica_id < num_replicas:
        raise ValueError(f"replica {replica_id} is not one of {num_replicas} replicas (numbered from 0)")
    block = -(-rows // num_replicas)
    start = min(replica_id * block, rows)
    return range(start, min(start + block, rows))


def rotated_batch_sizes(global_batch: int, worker: int, num_workers: int, replicas_per_worker: int) -> list[int]:
    """Return the batch sizes that a worker cycles through when every worker re-batches a stream of its own.  Local."""
    num_replicas = num_workers * replicas_per_worker
    small, larger = divmod(global_batch, num_replicas)
    sizes = [small + (replica < larger) for replica in range(num_replicas)]
    first = worker * replicas_per_worker
    return sizes[first:] + sizes[:first]


@dataclass(frozen=True)
class RowPart:
    """One replica's part of every global batch; the one of a single replica is the whole batch."""

    replica_id: int = 0
    num_replicas: int = 1
    #: Rows of the whole batch, where the part remembers them.
    rows: ClassVar[int | None] = None

    def of(self, rows: int) -> range:
        """Return the rows of this part, of so many.  Local."""
        return range(rows) if self.num_replicas == 1 else part(rows, self.replica_id, self.num_replicas)


class MeasuredPart(RowPart):
    """A part of one batch that remembers the number of rows of the whole batch."""

    def of(self, rows: int) -> range:
        """Return the rows of this part, of so many.  Local."""
        object.__setattr__(self, "rows", rows)
        return super().of(rows)


class Share(NamedTuple):
    """What all replicas together have of one step."""

    rows: int
    even: bool


#: The whole batch.
WHOLE = RowPart()
