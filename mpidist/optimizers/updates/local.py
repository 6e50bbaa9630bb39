"""`LocalUpdates`: steps made by the ranks that hold the variables, each on its copies or on its share of one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidist import context
from mpidist.collectives.reductions.results import Packed
from mpidist.collectives.reductions.update import FusedUpdate
from mpidist.optimizers.gradient_stages import GradientStages
from mpidist.optimizers.gradients import coalesced, sum_over_replicas
from mpidist.optimizers.rule import Rule, Step
from mpidist.optimizers.saved_slots import SavedSlots
from mpidist.optimizers.slots import Slots
from mpidist.optimizers.sparse import dense_within, values_of
from mpidist.optimizers.step_notes import StepNotes
from mpidist.optimizers.updates.one_copy import OneCopyUpdates
from mpidist.optimizers.updates.parts import update_part, updates_rows
from mpidist.optimizers.updates.sharded import ShardedUpdates
from mpidist.optimizers.updates.updates import Updates
from mpidist.optimizers.updates.variable_list import Run, VariableList, gradients_of, unpacked
from mpidist.variables import IndexedSlices, begin_writing, note_changes

#: Returns the step of a variable, from its position in a list and its factor.
_StepFn = Callable[[int, float], Step]


class LocalUpdates(Updates, StepNotes):
    """Steps on variables of this process."""

    _iterations = 0

    def __init__(self, slot_names: Sequence[str], initial_slots: Mapping[str, float]) -> None:
        self._slots = Slots(slot_names, initial_slots)
        self._begin()

    def _begin(self) -> None:
        """Know no lists of variables."""
        self._sharded, self._one_copy = ShardedUpdates(self._slots), OneCopyUpdates()

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle holds: steps and whole slots; what is known of lists of variables is true only here."""
        self._sharded.require_whole()
        return {"_iterations": self.iterations, "_slots": self._slots}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a pickle holds."""
        self.__dict__.update(state)
        self._begin()

    @property
    def iterations(self) -> int:
        self.settle()
        return self._iterations

    @iterations.setter
    def iterations(self, value: int) -> None:
        self.settle()
        self._iterations = value

    def _count(self, is_left_out: bool) -> None:
        self._iterations += not is_left_out

    # -- one step -----------------------------------------------------------------------------------------------------

    def pays_in_reduction(self, listed: VariableList) -> bool:
        sums = None if listed.is_light else _update_of(listed.variables[0].strategy.extended)
        return sums is not None and sums.pays(sum(variable.live.nbytes for variable in listed.variables))

    def step(
        self,
        rule: Rule,
        stages: GradientStages,
        gradients: list[Any],
        listed: VariableList,
        *,
        are_sums: bool = False,
        scale: float = 1.0,
    ) -> None:
        variables, is_dense = listed.variables, IndexedSlices not in map(type, gradients)
        if self._slots.has_unbound:
            self._slots.expect(variables)
        sums = not are_sums and not context.in_cross_replica_context()
        # Asked for before the sum: a schedule is a user's function, and sums are packed in memory that is used again.
        step_for = _step_fn(rule, listed)
        looks = stages.look_at_gradients
        may_be_sharded = sums and is_dense and rule.takes_slices and not looks
        updates = _update_of(context.get_strategy().extended) if may_be_sharded and not listed.is_light else None
        # What sums and applies gradients in one pass, None where that is not the way; then slots are whole.
        sharded = self._sharded.plan(updates, gradients, listed)
        if sharded is not None:
            factor = stages.factor * scale
            sharded.run(rule, gradients, [step_for(member, factor) for member in range(len(variables))])
        else:
            packs = _summed(gradients, listed, is_dense) if sums else listed.packed(coalesced(gradients))
            is_whole = is_dense and listed.has_copies
            if is_whole and looks and self._update_by_device(rule, stages, packs, listed, scale, step_for):
                return
            values = [values_of(each) for each in unpacked(packs)] if looks else variables
            factors = stages.factors(values, variables, scale)
            if factors is None:
                return
            if is_whole:
                self._update_runs(rule, packs, listed, variables, factors, step_for)
            else:
                self._update_one_by_one(rule, packs, listed, factors, step_for)
        self.note(is_left_out=False)

    def _update_by_device(
        self,
        rule: Rule,
        stages: GradientStages,
        packs: Sequence[Packed],
        listed: VariableList,
        scale: float,
        step_for: _StepFn,
    ) -> bool:
        """Make a step of which the device finds the norms, and whether it is left out; does not wait for norms.

        Return whether the device can do that; if not, nothing has been done.
        """
        if not listed.is_on_device or listed.is_split:
            return False
        limits = stages.limits(scale)
        runs = self._runs(rule, packs, listed, not limits.is_each)
        joint = listed.joint_update(runs)
        if joint is None:
            return False
        begin_writing(listed.variables)
        answer = joint.run(rule, *_applied(packs, runs, lambda member: step_for(member, limits.factor)), limits)
        note_changes(listed.variables)
        if answer is None:
            self.note(is_left_out=False)
            return True
        for counter in (self, stages, stages.loss_scale):  # the answer before is known since `step_for` was made
            counter.expect(answer)
        return True

    def _update_one_by_one(
        self, rule: Rule, packs: Sequence[Packed], listed: VariableList, factors: Sequence[float], step_for: _StepFn
    ) -> None:
        """Apply gradients of which some are rows, or are for variables in one copy; those of neither kind together."""
        one_copy, others, variables = [], [], []
        for pack in packs:
            (member,) = pack.tensors
            gradient, variable, step = pack.values, listed.variables[member], step_for(member, factors[member])
            if variable.one_copy is not None:
                one_copy.append((gradient, variable, step))
                continue
            if isinstance(gradient, IndexedSlices):
                if updates_rows(rule, gradient, step) or not listed.is_on_device:
                    update_part(rule, gradient, variable, self._slots.of(variable), step)
                    variable.note_change()
                    continue
                size = math.prod(variable.shape)
                pack = Packed(pack.tensors, (0, size), dense_within(gradient, slice(0, size)))
            others.append(pack)
            variables.append(variable)
        if others:
            self._update_runs(rule, others, listed, variables, factors, step_for)
        if one_copy:
            self._one_copy.run(rule, self._slots, *zip(*one_copy, strict=True))

    def _update_runs(
        self,
        rule: Rule,
        packs: Sequence[Packed],
        listed: VariableList,
        variables: Sequence[Any],
        factors: Sequence[float],
        step_for: _StepFn,
    ) -> None:
        """Apply arrays, the gradients of some variables of a list: all at once where the memory can, or run by run.

        Each is multiplied by its factor.
        """
        begin_writing(variables)
        runs = self._runs(rule, packs, listed, factors.count(factors[0]) == len(factors))
        joint = listed.joint_update(runs)
        if joint is not None:
            joint.run(rule, *_applied(packs, runs, lambda member: step_for(member, factors[member])))
        else:
            for pack, own in zip(packs, runs, strict=True):
                values = rule._scratch.flat(pack.values)
                for run in own:
                    rule.update(run.parameter, values[run.where], run.slots, step_for(run.member, factors[run.member]))
        note_changes(variables)

    def _runs(self, rule: Rule, packs: Sequence[Packed], listed: VariableList, is_one_factor: bool) -> list[list[Run]]:
        """Return what is updated at once of packed gradients, which have one factor or several."""
        joins = rule._joins and is_one_factor
        return listed.runs(packs, self._slots, listed.decays(rule) if joins else range(len(listed.variables)))

    # -- slots --------------------------------------------------------------------------------------------------------

    @property
    def has_met(self) -> bool:
        return self._slots.has_met

    def slots(self, variable: Any) -> dict[str, Any]:
        elsewhere = self._sharded.gathered().get(id(variable))
        if elsewhere is None:
            return self._slots.by_name(variable)
        return {name: slot.reshape(variable.shape) for name, slot in zip(self._slots.names, elsewhere, strict=True)}

    def state(self, rule: Rule) -> tuple[dict[str, Any], list[SavedSlots]]:
        found = {"iterations": self.iterations, **rule._rate_to_save()}
        return found, self._slots.saved(self._sharded.gathered())

    def match(self, saved: Sequence[SavedSlots]) -> None:
        self._slots.match(saved)

    def restore(self, state: Mapping[str, Any], saved: Sequence[SavedSlots]) -> None:
        self.iterations = int(state["iterations"])
        self._sharded.forget()
        self._slots.restore(saved)


def _summed(gradients: list[Any], listed: VariableList, is_dense: bool) -> Sequence[Packed]:
    """Return the sums over the replicas.  Collective."""
    engine = context.get_strategy().extended.engine() if listed.is_packed and is_dense else None
    if engine is not None:
        return engine.flat(gradients, "sum", listed.names)
    return listed.packed(sum_over_replicas(gradients, listed.variables))


def _update_of(extended: Any) -> FusedUpdate | None:
    """Return what sums gradients and updates the variables of a strategy in one pass, if there is such a thing."""
    engine = extended.engine()
    return None if engine is None else engine.update(extended.has_one_copy)


def _applied(
    packs: Sequence[Packed], runs: Sequence[Sequence[Run]], step_of: Callable[[int], Step]
) -> tuple[list[Any], list[Step]]:
    """Return gradient and step of each run; `step_of` gives that of a position in the list."""
    return list(gradients_of(packs, runs)), [step_of(run.member) for own in runs for run in own]


def _step_fn(rule: Rule, listed: VariableList) -> _StepFn:
    """Return what gives the next step of a list's variable."""
    learning_rate = rule.learning_rate
    coefficients = rule.coefficients(learning_rate, rule.iterations)
    if not rule._joins:
        return lambda member, factor: rule.step_of(listed.variables[member], learning_rate, coefficients, factor)
    decays, known = listed.decays(rule), dict[tuple[float, float], Step]()

    def step_for(member: int, factor: float) -> Step:
        key = factor, decays[member]
        if key not in known:
            known[key] = Step(coefficients, factor, learning_rate * key[1])
        return known[key]

    return step_for
