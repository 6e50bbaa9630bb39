"""`Optimizer`: from gradients of every replica to updated variables.

A family is a subclass with a *rule*: a function on flat contiguous arrays (parameter, gradient, slots, scratch), that
works in place, allocates nothing, and so can be applied to whole variables or to any slices of them.
"""

from __future__ import annotations

import abc
import copy
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar

import numpy

from mpidist import arrays, context
from mpidist.fusion.pipeline import Packed
from mpidist.optimizers import slices, sparse
from mpidist.optimizers.accumulation import Accumulation
from mpidist.optimizers.clipping import Clipping, is_finite
from mpidist.optimizers.loss_scale import LossScale
from mpidist.optimizers.one_copy import OneCopyUpdates
from mpidist.optimizers.remote import RemoteUpdates
from mpidist.optimizers.saved_slots import SLOTS, SavedSlots, described, slots_in
from mpidist.optimizers.sharded import ShardedUpdates
from mpidist.optimizers.slots import Slots
from mpidist.optimizers.updates.here import update_here
from mpidist.optimizers.updates.variable_list import VariableList, VariableLists, apart, unpacked
from mpidist.options import ReduceOp
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


class Options(OptionsButDecay, total=False):
    """The options of every `Optimizer`."""

    weight_decay: float | None


NO_PATHS: Mapping[int, str] = MappingProxyType({})
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Step:
    """What one step does to one variable, but for the gradient.

    Attributes
    ----------
    coefficients : tuple of float
        What `Optimizer.coefficients` returned for this step.
    factor : float
        Multiplies the gradient: loss scale, micro-batches and norm together.
    decay : float
        Share of the parameter that is taken away before the rule.
    variable : Variable, optional
        Whose step it is, for rules that need more of it than a slice.
    """

    coefficients: tuple[float, ...]
    factor: float = 1.0
    decay: float = 0.0
    variable: Any = None


class Optimizer(abc.ABC):
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

    slot_names: tuple[str, ...] = ()
    #: Arrays of the slice's size that `update_slice` may write intermediate results to; at least 1.
    scratch_count = 1
    #: Whether a gradient of 0 leaves parameter and slots as they are: rows without a gradient need not be touched.
    zero_gradient_changes_nothing = False
    #: Who updates in its place, where other processes hold the variables; None where this one does.
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
        if weight_decay is not None and not weight_decay >= 0:
            raise ValueError(f"weight_decay must be 0 or more, or None; got {weight_decay}")
        self._learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.clipping = Clipping(clipnorm, clipvalue, global_clipnorm)
        self.loss_scale = LossScale(1.0 if loss_scale_factor is None else loss_scale_factor)
        self.skip_nonfinite = skip_nonfinite
        self._iterations = 0
        self.skipped_steps = 0
        self._accumulation = Accumulation(gradient_accumulation_steps or 1)
        self._slots = Slots(self.slot_names, self.initial_slots())
        self._sharded = ShardedUpdates(self._slots)
        self._one_copy = OneCopyUpdates()
        self._without_decay: list[DistributedVariable | re.Pattern[str]] = []
        self.scratch = slices.Scratch()
        self._lists = VariableLists()
        self._checked: tuple[Any, VariableList | None] = (None, None)
        context.get_strategy().extended.adopt_optimizer(self)

    # -- what a family says -------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        """Return the numbers of one step that `update_slice` needs.  Local.

        Parameters
        ----------
        learning_rate : float
        iterations : int
            Steps made before this one.
        """

    @abc.abstractmethod
    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        """Update `parameter` and `slots` in place.  Local; allocates nothing.

        Parameters
        ----------
        parameter, gradient : array, shape (n,), contiguous
            Of the same floating dtype of at least 32 bits; `gradient` is not changed.
        slots : list of array, shape (n,), contiguous
            In the order of `slot_names`.
        scratch : list of array, shape (n,), contiguous
            `scratch_count` arrays with anything in them.
        coefficients : tuple of float
            What `coefficients` returned for this step.
        """

    def renew_slice(
        self,
        new: Any,
        parameter: Any,
        gradient: Any,
        slots: list[Any],
        scratch: list[Any],
        coefficients: tuple[float, ...],
    ) -> None:
        """Write to `new`, which is other memory, what `update_slice` would make of `parameter`, which stays.

        Local; everything else as for `update_slice`, and the same bits.  A family may do it with fewer passes.
        """
        new[...] = parameter
        self.update_slice(new, gradient, slots, scratch, coefficients)

    def initial_slots(self) -> Mapping[str, float]:
        """Return what slots are filled with at first, by name; 0 for those that are not named.  Local."""
        return {}

    @property
    def elementwise(self) -> bool:
        """Whether slices of the summed gradients may be applied by themselves, by `update`, in any order."""
        return self.elementwise_stages

    @property
    def elementwise_stages(self) -> bool:
        """Whether nothing that is done to the gradients before the rule needs more of them than an element."""
        return not (self.clipping.needs_norms or self.skips_nonfinite)

    @property
    def joins(self) -> bool:
        """Whether neighbours of the same decay are updated alike, so that one call does for all of them."""
        return type(self).step_of is Optimizer.step_of and type(self).update is Optimizer.update

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

    def exclude_from_weight_decay(
        self, var_list: Iterable[DistributedVariable] = (), var_names: Iterable[str] = ()
    ) -> None:
        """Leave variables out of the weight decay.  Local.

        Parameters
        ----------
        var_list : iterable of Variable
        var_names : iterable of str
            Regular expressions that are searched for in the variables' names.
        """
        self._without_decay += [*var_list, *(re.compile(name) for name in var_names)]

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
            _require_pairs(pairs)
            pairs = _with_gradients(pairs)
            variables = [variable for _, variable in pairs]
            _require_replica_context(variables)
            checked = [_as_gradient(gradient, variable) for gradient, variable in pairs], variables
            self._checked = _context(), self._lists.of(variables)
        self.reduce_and_update(*checked, are_sums=skip_gradients_aggregation)

    def _checked_before(self, pairs: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """Return gradients and variables that need no look, as the last call's were checked.  Local."""
        where, listed = self._checked
        if listed is None or where != _context():
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
        if is_reduced and not context.in_cross_replica_context():
            extended = context.get_strategy().extended
            updates = extended.fused_update() if self.elementwise and is_dense and not listed.is_light else None
            sharded = self._sharded.plan(updates, gradients, variables)
            if sharded is not None:
                sharded.run(self, gradients, self.steps(listed, [self._gradient_factor() * scale] * len(variables)))
                self.iterations += 1
                return
            packs = extended.reduce_flat(gradients, listed.names) if listed.is_packed and is_dense else None
            packs = listed.packed(_sum_over_replicas(gradients, variables)) if packs is None else packs
        else:
            self._sharded.release(variables)
            packs = listed.packed([each.coalesced() if isinstance(each, IndexedSlices) else each for each in gradients])
        factors = self._factors(packs, variables, scale)
        if factors is None:
            return
        if is_dense and listed.has_copies:
            update_here(self, self._slots, listed, packs, factors)
        else:
            self._update_each(unpacked(packs), variables, self.steps(listed, factors))
        self.iterations += 1

    def _update_each(self, gradients: list[Any], variables: list[Any], steps: list[Step]) -> None:
        """Update variables one by one, and those of which there is one copy together."""
        together = []
        for each in zip(gradients, variables, steps, strict=True):
            if each[1].one_copy is None:
                self.update_part(*each)
                each[1].note_change()
            else:
                together.append(each)
        if together:
            self._one_copy.run(self, *zip(*together, strict=True))

    def _push(self, gradients: list[Any], variables: list[Any], is_reduced: bool, scale: float) -> None:
        """Let those who hold the variables update them."""
        assert self.remote is not None
        if is_reduced:
            gradients = _sum_over_replicas(gradients, variables)
        factors = self._factors(apart(gradients), variables, scale)
        if factors is not None:
            self.remote.push(self, gradients, variables, factors)

    def steps(self, listed: VariableList, factors: Sequence[float]) -> list[Step]:
        """Return what the next step, of these factors, does to every variable of a list.  Local."""
        step_for = self.step_fn(listed)
        return [step_for(member, factor) for member, factor in enumerate(factors)]

    def step_fn(self, listed: VariableList) -> Callable[[int, float], Step]:
        """Return what gives the next step of a list's variable, by its position and its factor.  Local."""
        learning_rate = self.learning_rate
        coefficients = self.coefficients(learning_rate, self.iterations)
        if not self.joins:
            return lambda member, factor: self.step_of(listed.variables[member], learning_rate, coefficients, factor)
        decays, known = self.decays(listed), {}

        def step_of(member: int, factor: float) -> Step:
            key = factor, decays[member]
            if key not in known:
                known[key] = Step(coefficients, factor, learning_rate * key[1])
            return known[key]

        return step_of

    def decays(self, listed: VariableList) -> list[float]:
        """Return the weight decay of each variable of a list.  Local."""
        return listed.decays((self.weight_decay, len(self._without_decay)), self.decay_of)

    def _factors(self, packs: Sequence[Packed], variables: Sequence[Any], scale: float) -> list[float] | None:
        """Return what to multiply every gradient by; None if the step is left out, which is counted.

        Local, and the same on all ranks without asking, since all have the same bits of the summed gradients; an
        `elementwise` optimizer does not look at them.  Where variables are split, the ranks of a replica ask each
        other: collective among them.
        """
        factor = self._gradient_factor() * scale
        if self.elementwise_stages:
            return [factor] * len(variables)
        values = [sparse.values_of(gradient) for gradient in unpacked(packs)]
        if self.skips_nonfinite:
            has_overflow = any(sums_over_parts(variables, [not is_finite(each) for each in values]))
            self.loss_scale.update(has_overflow)
            if has_overflow:
                self.skipped_steps += 1
                return None
        return self.clipping.factors(values, variables, factor, self.scratch)

    def step_of(self, variable: Any, learning_rate: float, coefficients: tuple[float, ...], factor: float) -> Step:
        """Return what this step does to one variable.  Local."""
        return Step(coefficients, factor, learning_rate * self.decay_of(variable))

    def decay_of(self, variable: Any) -> float:
        """Return the weight decay of one variable, 0 where it is excluded.  Local."""
        if not self.weight_decay:
            return 0.0
        excluded = any(
            each is variable if isinstance(each, DistributedVariable) else each.search(variable.name)
            for each in self._without_decay
        )
        return 0.0 if excluded else self.weight_decay

    @property
    def gradient_factor(self) -> float | None:
        """What every gradient is multiplied by, whatever it is; None where that depends on the gradients."""
        loss_scale = self.loss_scale
        if self.skip_nonfinite or loss_scale.dynamic or self._accumulation.count > 1 or self.clipping.needs_norms:
            return None
        return 1.0 / loss_scale.scale

    def _gradient_factor(self) -> float:
        return 1.0 / (self.loss_scale.scale * self._accumulation.count)

    @property
    def cuts_variables(self) -> bool:
        """Whether a stretch of a variable may be updated by itself, once its step is known."""
        return type(self).update is Optimizer.update

    def elements_to_update(self, gradient: Any, variable: Any, step: Step) -> int:
        """Return how many elements the update of a variable goes through.  Local."""
        return gradient.values.size if self._updates_rows(gradient, step) else math.prod(variable.shape)

    def _updates_rows(self, gradient: Any, step: Step) -> bool:
        """Whether only those rows of the variable are touched that have a gradient."""
        return isinstance(gradient, IndexedSlices) and self.zero_gradient_changes_nothing and not step.decay

    def update_part(self, gradient: Any, variable: Any, step: Step, start: int = 0, stop: int | None = None) -> None:
        """Update a stretch of the `elements_to_update` of one variable, by default all of them.

        Local; the slots of the variable must be whole.

        Parameters
        ----------
        gradient : array or IndexedSlices with each row once
            Of the whole variable.
        variable : DistributedVariable
        step : Step
        start, stop : int
            Of rows of which some elements are before `stop`, those are meant that begin after `start` or there.
        """
        slots, parameter = self.slot_arrays(variable), variable.storage
        if self._updates_rows(gradient, step):
            rows = gradient if stop is None else sparse.rows_within(gradient, start, stop)
            self._update_rows(parameter, rows, slots, step)
            return
        where = slice(start, parameter.size if stop is None else stop)
        is_sparse = isinstance(gradient, IndexedSlices)
        flat = sparse.dense_within(gradient, where) if is_sparse else self.scratch.flat(gradient)[where]
        self.update(parameter.reshape(-1)[where], flat, slices.pick(slots, where), step)

    def _update_rows(self, parameter: Any, gradient: IndexedSlices, slots: list[Any], step: Step) -> None:
        """Update the rows that have a gradient, each once."""
        rows, whole = gradient.indices, [parameter, *(slot.reshape(parameter.shape) for slot in slots)]
        taken = [array[rows] for array in whole]
        flat_parameter, *flat_slots = [array.reshape(-1) for array in taken]
        self.update(flat_parameter, gradient.values.reshape(-1), flat_slots, step)
        for array, new in zip(whole, taken, strict=True):
            array[rows] = new

    def update(self, parameter: Any, gradient: Any, slots: list[Any], step: Step) -> None:
        """Apply the rule to flat contiguous arrays of any length and floating dtype, in place.  Local.

        Parameters
        ----------
        parameter, gradient : array, shape (n,), contiguous
        slots : list of array, shape (n,), contiguous
            Float32 for parameters of 16 bits: those are updated in float32 and rounded once.
        step : Step
        """
        for p, g, s, scratch, store in self._slices(parameter, gradient, slots, step.factor):
            self._update_block(p, g, s, scratch, step)
            if store is not None:
                store[...] = p

    def _update_block(self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], step: Step) -> None:
        """Apply the rule to one of the `_blocks`, with gradients that `_takes_unchanged`, in place.  Local."""
        if step.decay:
            numpy.multiply(parameter, step.decay, out=scratch[0])
            parameter -= scratch[0]
        self.update_slice(parameter, gradient, slots, scratch, step.coefficients)

    def _takes_unchanged(self, step: Step) -> bool:
        """Return whether gradients are neither multiplied nor clipped before the rule, `update_slice`.  Local."""
        return step.factor == 1 and self.clipping.clipvalue is None and type(self).update is Optimizer.update

    def _blocks(self, parameter: Any, slots: list[Any]) -> Iterator[tuple[slice, Any, list[Any], list[Any]]]:
        """Yield (where, parameter, slots, scratch) of every slice of a flat array of at least 32 bits.  Local.

        For `_update_block`; they stay good as long as the arrays.
        """
        scratch = self.scratch.arrays(parameter, parameter.dtype, self.scratch_count)
        for where in slices.bounds(parameter):
            p, *s = slices.pick([parameter, *slots], where)
            yield where, p, s, slices.pick(scratch, slice(0, len(p)))

    def _slices(
        self, parameter: Any, gradient: Any, slots: list[Any], factor: float
    ) -> Iterator[tuple[Any, Any, list[Any], list[Any], Any]]:
        """Yield (parameter, gradient, slots, scratch, where to round the parameter to, if anywhere) of every slice.

        Parameter and gradient come in the dtype of the computation, the gradient multiplied and clipped by value.
        """
        dtype = slices.compute_dtype(parameter.dtype)
        is_narrow, limit = parameter.dtype != dtype, self.clipping.clipvalue
        is_changed = gradient.dtype != dtype or factor != 1 or limit is not None
        scratch = self.scratch.arrays(parameter, dtype, self.scratch_count + is_changed + is_narrow)
        for where in slices.bounds(parameter):
            p, g, *s = slices.pick([parameter, gradient, *slots], where)
            short = slices.pick(scratch, slice(0, len(p)))
            store = None
            if is_changed:
                g = _changed(g, short.pop(), factor, limit)
            if is_narrow:
                store, wide = p, short.pop()
                wide[...] = p
                p = wide
            yield p, g, s, short, store

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
        self._accumulation.check(state, variables)

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
        saved = self._slots_to_restore(state, variables)
        self._accumulation.restore(state, variables)
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
            It has: what it knows of them is not true of copies of them.
        """
        has_named = any(isinstance(each, DistributedVariable) for each in self._without_decay)
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
        new._iterations = new.skipped_steps = 0
        new.clipping = Clipping(clipvalue=self.clipping.clipvalue)
        new.loss_scale, new.skip_nonfinite = LossScale(1.0), False
        new._accumulation = Accumulation(1)
        new._slots = Slots(new.slot_names, new.initial_slots())
        new._sharded, new._one_copy, new.scratch = ShardedUpdates(new._slots), OneCopyUpdates(), slices.Scratch()
        new._lists, new._checked = VariableLists(), (None, None)
        new._without_decay = [_by_name(each) for each in self._without_decay]
        return new

    def keep_slots(self, variable: Any, slots: list[Any]) -> None:
        """Keep the slots of a variable in other memory, to which they have been copied.  Local."""
        self._slots.keep(variable, slots)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a reference where servers hold the variables: there is one such optimizer in a job."""
        return super().__reduce_ex__(protocol) if self.remote is None else self.remote.reference(self)


def _by_name(excluded: DistributedVariable | re.Pattern[str]) -> re.Pattern[str]:
    """Return a pattern for what is left out of the weight decay: a variable with all its shards, or what it was."""
    if isinstance(excluded, re.Pattern):
        return excluded
    return re.compile(rf"^{re.escape(excluded.name)}(/part_\d+)?$")


def _changed(gradient: Any, buffer: Any, factor: float, limit: float | None) -> Any:
    """Return the gradient in the buffer, multiplied by a factor, then cut off at a limit."""
    buffer[...] = gradient
    if factor != 1:
        buffer *= factor
    if limit is not None:
        numpy.clip(buffer, -limit, limit, out=buffer)
    return buffer


def _require_pairs(pairs: list[Any]) -> None:
    """Raise TypeError unless all are (gradient, variable), with variables that gradients can update."""
    for number, pair in enumerate(pairs):
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and isinstance(pair[1], DistributedVariable)):
            got = f"({', '.join(type(each).__name__ for each in pair)})" if is_pair else type(pair).__name__
            raise TypeError(
                f"`apply_gradients` takes pairs (gradient, variable), in this order; pair {number} is {got}. Variables "
                "are made by `mpidist.Variable`"
            )
        gradient, variable = pair
        if gradient is not None and not _is_floating(variable.dtype):
            raise TypeError(
                f"variable {variable.name!r} is {variable.dtype} and cannot be updated by gradients; give it a "
                "floating dtype (Variable(value, dtype='float32')), or leave it out and use `assign`"
            )


def _context() -> Any:
    """Return what the answer of `_require_replica_context` depends on, besides the variables."""
    return context.get_strategy(), context.in_cross_replica_context()


def _is_floating(dtype: Any) -> bool:
    # ml_dtypes' floats, bfloat16 for one, are of kind V
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.names is None)


def _with_gradients(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the pairs that have a gradient; warns about the others."""
    present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    names = [variable.name for gradient, variable in pairs if gradient is None]
    if not present:
        raise ValueError(f"no gradients provided for any variable: all are None, for the variables {names}")
    if names:
        warnings.warn(f"gradients are None for the variables {names}; they are not updated", stacklevel=3)
    return present


def _require_replica_context(variables: list[Any]) -> None:
    """Raise RuntimeError where gradients of several replicas would have to be summed, outside `run`."""
    strategy = context.get_strategy()
    foreign = [variable for variable in variables if variable.strategy is not strategy]
    replicas = max(each.num_replicas_in_sync for each in (strategy, *(variable.strategy for variable in foreign)))
    if replicas == 1 or not (foreign or context.in_cross_replica_context()):
        return
    if context.in_cross_replica_context() or context.is_default(strategy):
        raise RuntimeError(
            f"`apply_gradients` sums over {replicas} replicas and was called outside of a replica. Call it in the "
            "function that you give to `strategy.run`."
        )
    raise RuntimeError(_foreign_text(foreign[0], strategy))


def _foreign_text(variable: Any, strategy: Any) -> str:
    """Return the message about a variable that is updated in a replica of a strategy which is not its own."""
    cure = "create it inside `with strategy.scope():` of the strategy whose `run` you call"
    if context.is_default(variable.strategy):
        return f"variable {variable.name!r} was not created in the scope of {strategy}; {cure}"
    return (
        f"Mixing different tf.distribute.Strategy objects: variable {variable.name!r} was created in the scope of "
        f"{variable.strategy}, and `apply_gradients` was called in `run` of {strategy}; make one strategy, or {cure}"
    )


def _as_gradient(gradient: Any, variable: Any) -> Any:
    """Return the gradient as an array, or as rows, of its variable's kind and dtype."""
    if isinstance(gradient, IndexedSlices):
        return sparse.rows_of_variable(gradient, variable)
    gradient = arrays.to_array(gradient)
    if variable.one_copy is not None and arrays.is_device(gradient):
        gradient = arrays.as_host(gradient)
    if gradient.shape != variable.shape:
        raise ValueError(
            f"the gradient for variable {variable.name!r} has shape {gradient.shape}, expected {variable.shape}"
        )
    return sparse.of_dtype(gradient, variable)


def _sum_over_replicas(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Return the sums over all replicas: arrays in one fused call, then rows one by one.  Collective."""
    extended, found = context.get_strategy().extended, list(gradients)
    dense = [number for number, each in enumerate(gradients) if not isinstance(each, IndexedSlices)]
    if dense:
        destinations = [variables[number] for number in dense]
        sums = extended.reduce_arrays(ReduceOp.SUM, [gradients[number] for number in dense], destinations=destinations)
        for number, total in zip(dense, sums, strict=True):
            found[number] = total
    return [sparse.sum_over_replicas(each, extended) if isinstance(each, IndexedSlices) else each for each in found]
