"""The step of variables of which this rank has a copy of its own, from gradients that are summed already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpidist.fusion.pipeline import Packed
from mpidist.optimizers.updates.variable_list import VariableList
from mpidist.variables import begin_writing, note_changes

if TYPE_CHECKING:
    from mpidist.optimizers.base import Optimizer
    from mpidist.optimizers.slots import Slots


def update_here(
    optimizer: Optimizer, slots: Slots, listed: VariableList, packs: Sequence[Packed], factors: Sequence[float]
) -> None:
    """Apply summed gradients, each times its factor, run by run.  Local; the slots must be whole."""
    variables = listed.variables
    begin_writing(variables)
    step_for = optimizer.step_fn(listed)
    joins = optimizer.joins and factors.count(factors[0]) == len(factors)
    runs = listed.runs(packs, slots, optimizer.decays(listed) if joins else range(len(variables)))
    for pack, own in zip(packs, runs, strict=True):
        values = optimizer.scratch.flat(pack.values)
        for run in own:
            optimizer.update(run.parameter, values[run.where], run.slots, step_for(run.member, factors[run.member]))
    note_changes(variables)
