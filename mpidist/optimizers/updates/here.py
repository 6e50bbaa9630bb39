"""The step of variables on this rank's own copies, from summed gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpidist.collectives.fused import Packed
from mpidist.optimizers.rules.rule import Rule, Step
from mpidist.optimizers.slots import Slots
from mpidist.optimizers.updates.variable_list import VariableList
from mpidist.variables import begin_writing, note_changes


def update_here(
    rule: Rule,
    slots: Slots,
    listed: VariableList,
    packs: Sequence[Packed],
    factors: Sequence[float],
    step_fn: Callable[[int, float], Step],
) -> None:
    """Apply summed gradients, each times its factor, run by run.  Local; the slots must be whole.

    Parameters
    ----------
    rule : Rule
    slots : Slots
    listed : VariableList
    packs : sequence of Packed
        The gradients of all of the list.
    factors : sequence of float
        One for each variable.
    step_fn : callable
        Returns the step of a variable, from its position and its factor.
    """
    variables = listed.variables
    begin_writing(variables)
    joins = rule.joins and factors.count(factors[0]) == len(factors)
    runs = listed.runs(packs, slots, listed.decays(rule) if joins else range(len(variables)))
    for pack, own in zip(packs, runs, strict=True):
        values = rule.scratch.flat(pack.values)
        for run in own:
            rule.update(run.parameter, values[run.where], run.slots, step_fn(run.member, factors[run.member]))
    note_changes(variables)
