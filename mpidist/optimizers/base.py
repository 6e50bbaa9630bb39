"""`Optimizer`: from gradients of every replica to updated variables, stage by stage.

In order: micro-batches are accumulated, gradients summed over the replicas, steps that are not finite left out,
gradients clipped, and the rule of the family (`rules`) applied (`updates`).  Where the rule takes any slice by itself,
the sum and the rule may be one stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

from mpidist import context
from mpidist.collectives.fused import Packed
from mpidist.optimizers import slices, sparse
from mpidist.optimizers.accumulation import Accumulation
from mpidist.optimizers.clipping import Clipping, is_finite
from mpidist.optimizers.gradients import checked_gradients, place_of_call, sum_over_replicas
from mpidist.optimizers.loss_scale import LossScale
from mpidist.optimizers.rules.rule import Rule, Step, by_name
from mpidist.optimizers.saved_slots import SLOTS, SavedSlots, described, slots_in
from mpidist.optimizers.slots import Slots
from mpidist.optimizers.updates.here import update_here
from mpidist.optimizers.updates.one_copy import OneCopyUpdates
from mpidist.optimizers.updates.remote import RemoteUpdates
from mpidist.optimizers.updates.sharded import ShardedUpdate, ShardedUpdates
from mpidist.optimizers.updates.variable_list import VariableList, VariableLists, apart, unpacked
from mpidist.variables import DistributedVariable, IndexedSlices, sums_over_parts

LearningRate = float | Callable[[int], float]
_T = TypeVar("_T")


class OptionsButDecay(TypedDict, total=False):
    """The options of every `Optimizer`, for families that have a weight decay of their own."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    gradient_accumulation_steps: int | None
    loss_scale_factor: float | None
    skip_nonfinite: bool


class OptimizerOptions(OptionsButDecay, total=False):
    """The options of every `Optimizer`."""

    weight_decay: float | None


NO_PATHS: Mapping[int, str] = MappingProxyType({})
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


class Optimizer(Rule):
    """Base of the optimizers.

    Parameters
    ----------
    learning_rate : float or callable
        A callable gets the number of steps made so far and returns a float (see `schedules`).  It is never scaled by
        the number of replicas: gradients are summed, and it is the loss that divides by the global batch.
    weight_decay : float, optional
        ``p -= learning_rate * weight_decay * p`` before every update.
    clipnorm, clipvalue, global_clipnorm : float, optional
        At most one: limit of the norm of each gradient, of its elements, or of the norm of all gradients together.
        Gradients are clipped after the sum over the replicas, so the result does not depend on their number.
    gradient_accumulation_steps : int, optional
        `apply_gradients` only adds up the gradients; every so many calls they are reduced, once, and their mean over
        these micro-batches is applied.
    loss_scale_factor : float, optional
        What `scale_loss` multiplies losses by; gradients are divided by it.  For a scale that finds itself, see
        `LossScaleOptimizer`.
    skip_nonfinite : bool
        Leave a step out, and count it in `skipped_steps`, where a summed gradient has an infinity or a NaN.

    Attributes
    ----------
    iterations : int
        Updates made, on however many replicas.
    skipped_steps : int
        Updates left out.
    slot_names : tuple of str
        The arrays kept for every variable.
    """

    #: The updates by other processes that hold the variables; None where this process holds them.
    remote: RemoteUpdates | None = None

    def __init__(
        self,
        learning_rate: LearningRate,
        *,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        gradient_accumulation_steps: int | None = None,
        loss_scale_factor: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        super().__init__(weight_decay, clipvalue)
        self._learning_rate = learning_rate
        loss_scale = LossScale(1.0 if loss_scale_factor is None else loss_scale_factor)
        clipping = Clipping(clipnorm, clipvalue, global_clipnorm)
        self._begin(clipping, loss_scale, skip_nonfinite, gradient_accumulation_steps or 1)
        context.get_strategy().extended.adopt_optimizer(self)

    def _begin(self, clipping: Clipping, loss_scale: LossScale, skip_nonfinite: bool, micro_batches: int) -> None:
        """Set the stages before the rule, and a state without steps and variables."""
        self.clipping, self.loss_scale, self.skip_nonfinite = clipping, loss_scale, skip_nonfinite
        self._accumulation = Accumulation(micro_batches)
        self._iterations = self.skipped_steps = 0
        self._slots = Slots(self.slot_names, self.initial_slots())
        self._sharded, self._one_copy = ShardedUpdates(self._slots), OneCopyUpdates()
        self._lists = VariableLists()
        self._checked: tuple[Any, VariableList | None] = (None, None)

    @property
    def elementwise(self) -> bool:
        """Whether slices of the summed gradients may be applied by themselves, by `update`, in any order."""
        return self.takes_slices and not self._looks_at_gradients

    @property
    def _looks_at_gradients(self) -> bool:
        """Whether a stage before the rule needs whole gradients."""
        return self.clipping.needs_norms or self.skips_nonfinite

    # -- what users set -----------------------------------------------------------------------------------------------

    @property
    def iterations(self) -> int:
        """Updates made.  Local; where servers hold the variables, they are asked."""
        return self._iterations if self.remote is None else self.remote.iterations

    @iterations.setter
    def iterations(self, value: int) -> None:
        if self.remote is not None:
            self.remote.set_iterations(value)
        self._iterations = value

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        rate = self._learning_rate
        return float(rate(self.iterations) if callable(rate) else rate)

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        if not callable(value):
            self.require_no_schedule("a number set as learning_rate")
        self._learning_rate = value
        if self.remote is not None:
            self.remote.set_learning_rate(value)

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate is a function of the steps."""
        return callable(self._learning_rate)

    def require_no_schedule(self, asked: str) -> None:
        """Raise TypeError where `asked`, which sets the learning rate to a number, would end a schedule.  Local."""
        if self.has_schedule:
            raise TypeError(
                f"{asked} would replace the schedule that is the learning rate of this {type(self).__name__}. Give the "
                "optimizer a number as learning_rate, or set another schedule"
            )

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with a gradient that is not finite is left out: asked for, or needed by the loss scale."""
        return self.skip_nonfinite or self.loss_scale.dynamic

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches that make one update."""
        return self._accumulation.count

    @property
    def micro_step(self) -> int:
        """Micro-batches accumulated since the last update."""
        return self._accumulation.micro_step

    def scale_loss(self, loss: _T) -> _T:
        """Return the loss, or its gradient, times the loss scale: what to differentiate.  Local."""
        scale: Any = self.loss_scale.scale
        return loss if scale == 1 else loss * scale

    # -- one step -----------------------------------------------------------------------------------------------------

    def apply_gradients(
        self,
        gradients_and_variables: Iterable[tuple[Any, DistributedVariable]],
        skip_gradients_aggregation: bool = False,
    ) -> None:
        """Sum the gradients over the replicas, then update the variables in place.

        Collective inside `strategy.run`: every replica calls it with the same variables in the same order.
        Local under the default strategy, under a strategy of one replica, and while it only accumulates.

        Parameters
        ----------
        gradients_and_variables : iterable of (array, IndexedSlices or None, Variable)
            A gradient has its variable's shape, or some of its rows.  A variable whose gradient is None is left as it
            is.  No gradient may be a view of a variable of the list: it may be read when that has been updated.
        skip_gradients_aggregation : bool
            Do not sum: for gradients that already are sums, the same on every replica.

        Raises
        ------
        TypeError
            A pair is not (gradient, variable), or a variable is not of a floating dtype.
        ValueError
            If there is no gradient at all, or a gradient's shape is not its variable's.
        RuntimeError
            With more than one replica: outside `strategy.run`, or a variable was not created in the strategy's scope.
        """
        pairs = list(gradients_and_variables)
        if self.remote is not None and self.remote.push_again(self, pairs):
            return
        checked = self._checked_before(pairs)
        if checked is None:
            checked = checked_gradients(pairs)
            self._checked = place_of_call(), self._lists.of(checked[1])
        self.reduce_and_update(*checked, are_sums=skip_gradients_aggregation)

    def _checked_before(self, pairs: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """Return gradients and variables that need no look, as the last call's were checked.  Local."""
        where, listed = self._checked
        if listed is None or where != place_of_call():
            return None
        try:
            gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        except (TypeError, ValueError):  # no pairs: who looks at each says so
            return None
        return (gradients, listed.variables) if listed.is_of(variables) and listed.takes(gradients) else None

    def updates_in_reduction(self, variables: Sequence[Any]) -> bool:
        """Return whether gradients of these variables are likely to be applied while they are summed.  Local.

        The same answer on all ranks.
        """
        updates = variables[0].strategy.extended.fused_update() if self.elementwise else None
        if updates is None or self._lists.of(variables).is_light:
            return False
        return updates.pays(sum(variable.live.nbytes for variable in variables))

    def reduce_and_update(
        self, gradients: list[Any], variables: list[Any], *, are_sums: bool = False, scale: float = 1.0
    ) -> None:
        """Do what `apply_gradients` does, in a replica, with gradients of their variables' shapes and dtypes.

        Collective and Local as `apply_gradients` is.

        Parameters
        ----------
        gradients : list of array or IndexedSlices
        variables : list of Variable
        are_sums : bool
            Do not sum.
        scale : float
            What the sums are multiplied by, while they are applied.
        """
        whole: list[Any] | None = gradients
        if self._accumulation.count > 1:
            whole = self._accumulation.add(gradients, variables)
        if whole is not None:
            self._reduce_and_update(whole, variables, not are_sums, scale)

    def _reduce_and_update(self, gradients: list[Any], variables: list[Any], is_reduced: bool, scale: float) -> None:
        extended = variables[0].strategy.extended
        self.remote = self.remote or extended.remote_updates(self)
        if self._slots.has_unbound:
            self._slots.expect(variables)
        if self.remote is not None:
            self._push(gradients, variables, is_reduced and extended.num_replicas > 1, scale)
            return
        listed, is_dense = self._lists.of(variables), IndexedSlices not in map(type, gradients)
        is_reduced = is_reduced and not context.in_cross_replica_context()
        sharded = self._sharded_update(gradients, listed, is_reduced and is_dense)
        if sharded is not None:
            sharded.run(self, gradients, self._steps(listed, [self._gradient_factor() * scale] * len(variables)))
        else:
            packs = self._summed(gradients, listed, is_dense) if is_reduced else listed.packed(_coalesced(gradients))
            factors = self._factors(packs, variables, scale)
            if factors is None:
                return
            self._update(packs, listed, factors, is_dense)
        self.iterations += 1

    def _sharded_update(self, gradients: list[Any], listed: VariableList, may_be: bool) -> ShardedUpdate | None:
        """Return what sums and applies gradients in one pass, None where that is not the way; then slots are whole."""
        updates = None
        if may_be and self.elementwise and not listed.is_light:
            updates = context.get_strategy().extended.fused_update()
        return self._sharded.plan(updates, gradients, listed.variables)

    @staticmethod
    def _summed(gradients: list[Any], listed: VariableList, is_dense: bool) -> Sequence[Packed]:
        """Return the sums over the replicas.  Collective."""
        packs = None
        if listed.is_packed and is_dense:
            packs = context.get_strategy().extended.reduce_flat(gradients, listed.names)
        return listed.packed(sum_over_replicas(gradients, listed.variables)) if packs is None else packs

    def _update(self, packs: Sequence[Packed], listed: VariableList, factors: Sequence[float], is_dense: bool) -> None:
        """Apply the rule to summed gradients; to rows one by one, and to variables in one copy together."""
        if is_dense and listed.has_copies:
            update_here(self, self._slots, listed, packs, factors, self._step_fn(listed))
            return
        together = []
        for each in zip(unpacked(packs), listed.variables, self._steps(listed, factors), strict=True):
            gradient, variable, step = each
            if variable.one_copy is None:
                self.update_part(gradient, variable, self._slots.of(variable), step)
                variable.note_change()
            else:
                together.append(each)
        if together:
            self._one_copy.run(self, self._slots, *zip(*together, strict=True))

    def _push(self, gradients: list[Any], variables: list[Any], is_reduced: bool, scale: float) -> None:
        """Let those who hold the variables update them."""
        assert self.remote is not None
        if is_reduced:
            gradients = sum_over_replicas(gradients, variables)
        factors = self._factors(apart(gradients), variables, scale)
        if factors is not None:
            self.remote.push(self, gradients, variables, factors)

    def _steps(self, listed: VariableList, factors: Sequence[float]) -> list[Step]:
        """Return what the next step, of these factors, does to every variable of a list.  Local."""
        step_for = self._step_fn(listed)
        return [step_for(member, factor) for member, factor in enumerate(factors)]

    def _step_fn(self, listed: VariableList) -> Callable[[int, float], Step]:
        """Return what gives the next step of a list's variable, by its position and its factor.  Local."""
        learning_rate = self.learning_rate
        coefficients = self.coefficients(learning_rate, self.iterations)
        if not self.joins:
            return lambda member, factor: self.step_of(listed.variables[member], learning_rate, coefficients, factor)
        decays, known = listed.decays(self), {}

        def step_of(member: int, factor: float) -> Step:
            key = factor, decays[member]
            if key not in known:
                known[key] = Step(coefficients, factor, learning_rate * key[1])
            return known[key]

        return step_of

    def _factors(self, packs: Sequence[Packed], variables: Sequence[Any], scale: float) -> list[float] | None:
        """Return what to multiply every gradient by; None if the step is left out, which is counted.

        Local, and the same on all ranks without asking, since all have the same bits of the summed gradients; an
        `elementwise` optimizer does not look at them.  Where variables are split, the ranks of a replica ask each
        other: collective among them.
        """
        factor = self._gradient_factor() * scale
        if not self._looks_at_gradients:
            return [factor] * len(variables)
        values = [sparse.values_of(gradient) for gradient in unpacked(packs)]
        if self.skips_nonfinite:
            has_overflow = any(sums_over_parts(variables, [not is_finite(each) for each in values]))
            self.loss_scale.update(has_overflow)
            if has_overflow:
                self.skipped_steps += 1
                return None
        return self.clipping.factors(values, variables, factor, self.scratch)

    @property
    def gradient_factor(self) -> float | None:
        """What every gradient is multiplied by, whatever it is; None where that depends on the gradients."""
        loss_scale = self.loss_scale
        if self.skip_nonfinite or loss_scale.dynamic or self._accumulation.count > 1 or self.clipping.needs_norms:
            return None
        return 1.0 / loss_scale.scale

    def _gradient_factor(self) -> float:
        return 1.0 / (self.loss_scale.scale * self._accumulation.count)

    # -- state --------------------------------------------------------------------------------------------------------

    def slot_arrays(self, variable: Any) -> list[Any]:
        """Return the slots of a variable as flat arrays, in the order of `slot_names`, to be written to.

        Collective where they are kept in slices, each on one rank; Local otherwise.
        """
        self._sharded.release([variable])
        return self._slots.of(variable)

    def slots(self, variable: DistributedVariable) -> dict[str, Any]:
        """Return the slots of a variable by name, in its shape; live views where they are kept whole.

        Collective where they are kept in slices, each on one rank (large models under a strategy of several ranks);
        Local otherwise.
        """
        if self.remote is not None:
            return self.remote.slots(variable)
        elsewhere = self._sharded.gathered().get(id(variable))
        if elsewhere is None:
            return self._slots.by_name(variable)
        return {name: slot.reshape(variable.shape) for name, slot in zip(self.slot_names, elsewhere, strict=True)}

    def state(self, paths: Mapping[int, str] = NO_PATHS) -> dict[str, Any]:
        """Return class, settings, steps and all slots, as ``"number/slot"`` to live views, for a checkpoint.

        Collective where slots are kept in slices, each on one rank, and in the middle of an accumulation, with the sums
        of all replicas; Local otherwise.  Names of the numbered variables are in ``"slot_variables"``.

        Parameters
        ----------
        paths : mapping of int to str
            Where the checkpoint has variables, by their id.

        Raises
        ------
        ValueError
            Two of its variables have one name.
        """
        found: dict[str, Any] = {"class": type(self).__name__, "slot_names": list(self.slot_names)}
        found |= {"skipped_steps": self.skipped_steps, **self.loss_scale.state(), **self._accumulation.state(paths)}
        if self.remote is not None:
            plain, saved = self.remote.state()
            found |= plain
        else:
            found["iterations"] = self.iterations
            if not callable(self._learning_rate):
                found["learning_rate"] = float(self._learning_rate)
            saved = self._slots.saved(self._sharded.gathered())
        if self.slot_names:
            found |= described(saved, SLOTS, paths)
        for number, each in enumerate(saved):
            found.update({f"{number}/{slot}": array for slot, array in each.arrays.items()})
        return found

    def check(self, state: Mapping[str, Any], variables: Mapping[str, Any] = NO_VARIABLES) -> None:
        """Raise what `restore` would raise, and change nothing.  Local."""
        self._slots_to_restore(state, variables)
        self._accumulation.saved_in(state, variables)

    def restore(self, state: Mapping[str, Any], variables: Mapping[str, Any] = NO_VARIABLES) -> None:
        """Take over what `state` gave, also before this optimizer has met its variables.  Local.

        A learning rate is taken over too, unless this optimizer has a schedule.  Slots belong to the variable of their
        path; without one, to the variable of their name.

        Parameters
        ----------
        state : mapping
        variables : mapping of str to Variable
            Those of the checkpoint, by their path.

        Raises
        ------
        ValueError
            Nothing is changed: it is of another class of optimizer, or has other slots; a slot's shape is not its
            variable's; it cannot be told to which variables slots belong (for variables not met yet, at their first
            update); or gradients are accumulated over another number of micro-batches.
        """
        saved, sums = self._slots_to_restore(state, variables), self._accumulation.saved_in(state, variables)
        self._accumulation.restore(state, sums)
        if self.remote is not None:
            self.remote.restore(state, saved)
            saved = []
        self.take_over(state, saved)

    def take_over(self, state: Mapping[str, Any], saved: Sequence[SavedSlots]) -> None:
        """Set steps, settings and slots, as `restore` does when all has been checked.  Local."""
        self._iterations = int(state["iterations"])
        self.skipped_steps = int(state.get("skipped_steps", 0))
        if not callable(self._learning_rate):
            self._learning_rate = float(state.get("learning_rate", self._learning_rate))
        self.loss_scale.restore(state)
        self._sharded.forget()
        self._slots.restore(saved)

    def _slots_to_restore(self, state: Mapping[str, Any], variables: Mapping[str, Any]) -> list[SavedSlots]:
        """Return the slots of a state, with the variables to which they belong; errors as for `restore`."""
        own, kind = set(self.slot_names), state.get("class", type(self).__name__)
        if kind != type(self).__name__:
            raise ValueError(f"the state of {kind} was saved, this optimizer is {type(self).__name__}")
        if "iterations" not in state:
            raise ValueError("it is no state of an optimizer: it has no 'iterations'")
        saved = slots_in(state, variables)
        differing = [set(each.arrays) for each in saved if set(each.arrays) != own]
        if "slot_names" in state:
            differing += [set(state["slot_names"])] if set(state["slot_names"]) != own else []
        elif not saved and own and state["iterations"]:
            differing = [set()]
        if differing:
            raise ValueError(
                f"slots {sorted(differing[0])} were saved, this {type(self).__name__} has {sorted(own)}: make it as it "
                "was made when it was saved"
            )
        (self._slots if self.remote is None else self.remote).match(saved)
        return saved

    # -- copies -------------------------------------------------------------------------------------------------------

    def __copy__(self) -> Optimizer:
        """Return a copy that shares everything but who updates in its place: nobody."""
        new = object.__new__(type(self))
        new.__dict__.update({**self.__dict__, "remote": None})
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        """Return a copy of an optimizer that has met no variables.

        Raises
        ------
        TypeError
            It has met some: its state belongs to these, not to copies of them.
        """
        has_named = any(isinstance(each, DistributedVariable) for each in self.without_decay)
        if self._slots.has_met or self._accumulation.micro_step or has_named or self.remote is not None:
            raise TypeError(
                f"this {type(self).__name__} has met variables, to which its state belongs, so it cannot be copied. "
                "Make another one with the same arguments; `restore(optimizer.state())` gives it the same state"
            )
        new = copy.copy(self)
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new

    def rule_only(self) -> Optimizer:
        """Return a copy with rule and settings, for somebody else to update variables of his own with.  Local.

        It has no slots, no steps, and none of what needs whole gradients of several variables or micro-batches:
        clipping by norm, loss scale, accumulation, leaving steps out.  Variables without weight decay are known by
        name.
        """
        new = copy.copy(self)
        new.scratch = slices.SliceScratch()
        new.without_decay = [by_name(each) for each in self.without_decay]
        new._begin(Clipping(clipvalue=self.clipvalue), LossScale(1.0), False, 1)
        return new

    def keep_slots(self, variable: Any, slots: list[Any]) -> None:
        """Keep the slots of a variable in other memory, to which they have been copied.  Local."""
        self._slots.keep(variable, slots)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a reference where servers hold the variables: there is one such optimizer in a job."""
        return super().__reduce_ex__(protocol) if self.remote is None else self.remote.reference(self)


def _coalesced(gradients: Sequence[Any]) -> list[Any]:
    """Return gradients with each row named once."""
    return [each.coalesced() if isinstance(each, IndexedSlices) else each for each in gradients]
