"""From contenders to rows: the part that all subcommands share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.table import Maker, able
from benchmarks.suite.contender import Contender
from benchmarks.suite.ranks import Ranks
from benchmarks.suite.rows import Row, rows_of, table
from benchmarks.suite.tensors import TensorList
from benchmarks.suite.turns import Budget, Turns


@dataclass
class Measured:
    """What a subcommand has found in this launch.

    Attributes
    ----------
    rows : list of Row
    missing : dict
        Contender -> why it could not run.
    machine : dict
        What is to be known of the machine besides what every launch tells.
    """

    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)

    def add(
        self,
        work: str,
        makers: Iterable[Maker],
        tensors: TensorList,
        ranks: Ranks,
        budget: Budget,
        reference: str,
        factor: float,
    ) -> list[Row]:
        """Measure some contenders and return their rows, which are kept too.  Collective."""
        contenders, missing = able(makers, ranks, tensors)
        self._leave_out(missing, ranks)
        rows = _rows(work, contenders, tensors, ranks, budget, reference, factor)
        absent = {each.name for each in contenders} - {row.who for row in rows}
        self._leave_out({who: f"no turn of it on {work} was in {rows[0].cache}" for who in sorted(absent)}, ranks)
        self.rows += rows
        return rows

    def _leave_out(self, missing: dict[str, str], ranks: Ranks) -> None:
        """Say once why somebody is not in a table."""
        for who, why in missing.items():
            if self.missing.get(who) != why:
                ranks.say(f"# without {who}: {why}")
        self.missing |= missing


def _rows(
    work: str,
    contenders: Sequence[Contender],
    tensors: TensorList,
    ranks: Ranks,
    budget: Budget,
    reference: str,
    factor: float,
) -> list[Row]:
    try:
        timings = Turns(contenders, tensors, ranks, budget).run()
    finally:
        for contender in contenders:
            contender.close()
    return rows_of(work, contenders, timings, tensors, reference, factor)


def show(rows: Sequence[Row], ranks: Ranks) -> None:
    """Print rows as a table, on rank 0."""
    ranks.say(table(rows))
