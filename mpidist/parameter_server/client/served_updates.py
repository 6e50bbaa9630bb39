"""`ServedUpdates`: how an optimizer of this process has the servers update their variables."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any
from weakref import ref

import numpy

from mpidist import context
from mpidist.optimizers.base import Optimizer
from mpidist.optimizers.gradient_stages import GradientStages
from mpidist.optimizers.gradients import coalesced, sum_over_replicas
from mpidist.optimizers.rule import Rule
from mpidist.optimizers.saved_slots import SavedSlots, bind_by_name
from mpidist.optimizers.slices import compute_dtype
from mpidist.optimizers.sparse import values_of
from mpidist.optimizers.updates.updates import Updates
from mpidist.optimizers.updates.variable_list import VariableList
from mpidist.parameter_server.client.client import Client
from mpidist.parameter_server.client.plans import PlannedList
from mpidist.parameter_server.client.served_variable import ServedVariable
from mpidist.parameter_server.layout import slots_of
from mpidist.parameter_server.pickles import pickled
from mpidist.parameter_server.registry import Registry, optimizer_of
from mpidist.variables import IndexedSlices

#: How many lists of variables are pushed again without a look at each.
_KNOWN_LISTS = 16

#: The types of their gradients, which need no look either.
_ARRAYS = {numpy.ndarray}


class ServedUpdates(Updates):
    """The updates of one optimizer by servers.

    They get its rule and settings once, with its first gradients; steps and slots are theirs from then on.  What needs
    whole gradients (clipping by norm, loss scale, accumulation) is done before they are pushed.
    """

    def __init__(self, registry: Registry, optimizer: Optimizer, number: int) -> None:
        self._registry = registry
        self._client = registry.client
        self._optimizer = optimizer
        self._number = number
        self._is_registered = False
        # Lists of whole variables that were pushed before, the last one first, whose gradients were all arrays; each
        # with its plan, while the client keeps it, which is void once the client is of another generation.
        self._known: deque[tuple[tuple[ServedVariable, ...], int, ref[PlannedList]]] = deque(maxlen=_KNOWN_LISTS)

    def require_updatable(self, rule: Rule, variables: Sequence[Any]) -> None:
        """Raise NotImplementedError if the rule, which needs a variable whole, would see shards of it.  Local."""
        if rule.takes_slices:  # of any variable
            return
        for variable in variables:
            if len(variable.specs) > 1 and not rule.takes_slices_of(variable):
                kind = type(rule).__name__
                raise NotImplementedError(
                    f"{kind} needs whole variables, and {variable.name!r} has {len(variable.specs)} shards, which "
                    "servers update one by one. Make the strategy without a variable_partitioner, or take another "
                    "optimizer"
                )

    def require_changeable(self, rule: Rule, what: str) -> None:
        """Raise RuntimeError if this process has given the rule to the servers.  Local."""
        if self._is_registered:
            raise RuntimeError(
                f"{what} would have no effect: the servers have this {type(rule).__name__} already, and go by the "
                f"settings that they got. Call {what} before the first apply_gradients, before learning_rate or "
                "iterations are set, and before a checkpoint is saved or restored"
            )

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
        """Sum gradients over a worker's ranks, and push them, to be applied as one step; does not wait for it."""
        variables = listed.variables
        if not are_sums and variables[0].strategy.extended.num_replicas > 1:
            gradients = sum_over_replicas(gradients, variables)
        else:
            gradients = coalesced(gradients)
        factors = stages.factors([values_of(each) for each in gradients], variables, scale)
        if not self._is_registered:
            self._register()
        if factors is None:
            self._client.skip(self._number)
        else:
            self._push(gradients, variables, factors, stages.accumulation.count)

    def _push(
        self, gradients: Sequence[Any], variables: Sequence[Any], factors: list[float], micro_batches: int
    ) -> None:
        gradients, scale = _with_one_factor(gradients, variables, factors, micro_batches)
        if len(variables) == 1:
            pairs = variables[0].pushed(gradients[0])
        else:
            pairs = [
                part
                for gradient, variable in zip(gradients, variables, strict=True)
                for part in variable.pushed(gradient)
            ]
        client = self._client
        if not isinstance(client, Client):
            client.push(self._number, pairs, scale)
            return
        generation = client.generation
        plan = client.push(self._number, pairs, scale)
        if set(map(type, gradients)) == _ARRAYS and all(type(each) is ServedVariable for each in variables):
            self._known.appendleft((tuple(variables), generation, ref(plan)))

    def step_again(self, stages: GradientStages, pairs: Sequence[tuple[Any, Any]]) -> bool:
        """Push gradients for a list of variables that was pushed before; return whether it was one.  Local."""
        try:
            gradients, variables = zip(*pairs, strict=True)
        except (TypeError, ValueError):  # no pairs: who looks at each says so
            return False
        factor, number = stages.only_factor, len(variables)
        for again in self._known:
            if number == len(again[0]) and all(map(is_, variables, again[0])):
                break
        else:
            return False
        known, generation, planned = again
        client = self._client
        plan = planned() if generation == client.generation else None
        if plan is None or client.guard is not None:  # its plans may be void by the time they are pushed
            return False
        if factor is None or known[0].strategy is not context.get_strategy() or set(map(type, gradients)) != _ARRAYS:
            return False
        client.push_planned(self._number, plan, gradients, factor)
        return True

    def _register(self) -> None:
        """Send the optimizer."""
        self._client.register_optimizer(self._optimizer, self._number)
        self._is_registered = True

    def _if_met(self, ask: Callable[[int], Any], unknown: Any = None) -> Any:
        """Return what the servers answer about the optimizer, `unknown` if they have not met it."""
        try:
            return ask(self._number)
        except KeyError:
            return unknown

    # -- steps and settings -------------------------------------------------------------------------------------------

    @property
    def iterations(self) -> int:
        """Steps made, this client's pushes included."""
        return self._if_met(self._client.iterations, self._optimizer._iterations)

    @iterations.setter
    def iterations(self, value: int) -> None:
        """Count steps from `value` on."""
        if not self._is_registered:
            self._register()
        self._client.set_iterations(self._number, value)

    def skipped_steps(self) -> int | None:
        """Return the steps that all workers have left out; None if the servers have not met the optimizer."""
        return self._if_met(self._client.skipped_steps)

    def learning_rate(self) -> float | None:
        """Return the learning rate that the servers have; None where it is a function, or they have not met it."""
        return self._if_met(self._client.learning_rate)

    def set_learning_rate(self, value: Any) -> None:
        """Set the learning rate of later steps: a number, or a function of the steps made."""
        if not self._is_registered:
            self._register()
        self._client.set_learning_rate(self._number, value if callable(value) else float(value))

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def state(self, rule: Rule) -> tuple[dict[str, Any], list[SavedSlots]]:
        """Return steps and learning rate; and all slots, whole as any strategy has them."""
        if self._if_met(self._client.iterations) is None:  # all of them: another worker may be registering it
            self._register()
        state = self._client.optimizer_state(self._number)
        variables = self._registry.variables
        saved = []
        for number, parts_of_slot in sorted(_by_variable(state).items()):
            variable = variables[number]
            saved.append(SavedSlots(variable.name, self._whole(variable, parts_of_slot), variable))
        return {name: value for name, value in state.items() if name in _PLAIN}, saved

    def match(self, saved: Sequence[SavedSlots]) -> None:
        """Bind saved slots to variables of the servers."""
        bind_by_name(saved, [each for each in self._registry.by_name().values() if each.trainable])
        if lost := [each.name for each in saved if each.variable is None]:
            raise ValueError(f"slots were saved for variables {lost}, which the servers do not have: the model differs")

    def restore(self, state: Mapping[str, Any], saved: Sequence[SavedSlots]) -> None:
        """Take over a state of this strategy or of another, with slots that have been matched."""
        self._register()
        entries: dict[str, Any] = {name: state[name] for name in _PLAIN if name in state}
        for each in saved:
            for slot, array in each.arrays.items():
                entries.update(_cut(each.variable, slot, array))
        entries["iterations"] = int(state["iterations"])
        self._client.restore_optimizer(self._number, entries)

    def slots(self, variable: Any) -> dict[str, Any]:
        """Return copies of the slots of a variable by name, in its shape."""
        found = _by_variable(self._client.optimizer_state(self._number)).get(variable.number, {})
        return self._whole(variable, found)

    def _whole(self, variable: Any, parts_of_slot: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
        """Return the slots of a variable whole; shards that have none yet have those of new ones."""
        initial = self._optimizer.initial_slots()
        return {slot: _joined(variable, parts, initial.get(slot, 0)) for slot, parts in parts_of_slot.items()}

    def reference(self, optimizer: Optimizer) -> tuple[Any, ...]:
        """Return what a pickle holds of the optimizer."""
        return optimizer_of, (self._number, pickled(copy.copy(optimizer)))


#: What a state has besides slots, and servers keep.
_PLAIN = ("iterations", "learning_rate", "skipped_steps")


def _with_one_factor(
    gradients: Sequence[Any], variables: Sequence[Any], factors: list[float], micro_batches: int
) -> tuple[Sequence[Any], float]:
    """Return gradients, and the one factor that is left to the servers."""
    scale = factors[0]
    if any(compute_dtype(variable.dtype) != variable.dtype for variable in variables):
        # what travels in 16 bits keeps its loss scale, and is a mean of micro-batches, whose sum may be too large
        scale = max((factor for factor in factors if factor == factor), default=1.0) * micro_batches
    elif any(factor != scale for factor in factors):
        scale = 1.0
    if all(factor == scale for factor in factors):
        return gradients, scale
    return [_times(each, factor / scale) for each, factor in zip(gradients, factors, strict=True)], scale


def _times(gradient: Any, factor: float) -> Any:
    """Return a gradient times a factor, one of 16 bits in float32."""
    if isinstance(gradient, IndexedSlices):
        return gradient.with_values(_times(gradient.values, factor))
    dtype = compute_dtype(gradient.dtype)
    return gradient.astype(dtype, copy=False) * dtype.type(factor)


def _by_variable(state: Mapping[str, Any]) -> dict[int, dict[str, dict[int, Any]]]:
    """Return variable -> slot -> shard -> array, of what servers keep as ``"variable/shard/slot"``."""
    slots: dict[int, dict[str, dict[int, Any]]] = {}
    for (number, shard), own in slots_of(state).items():
        for slot, value in own.items():
            slots.setdefault(number, {}).setdefault(slot, {})[shard] = value
    return slots


def _joined(variable: ServedVariable, parts: Mapping[int, Any], initial: float) -> Any:
    """Return the slot of a variable whole; the initial value where a shard is missing."""
    dtype = next(iter(parts.values())).dtype
    whole = [
        numpy.reshape(parts.get(spec.key[1], numpy.full(spec.shape, initial, dtype)), spec.shape)
        for spec in variable.specs
    ]
    return whole[0] if len(whole) == 1 else numpy.concatenate(whole)


def _cut(variable: ServedVariable, slot: str, value: Any) -> dict[str, Any]:
    """Return the slot of a variable by shard, as servers keep it."""
    return {
        f"{variable.number}/{spec.key[1]}/{slot}": part
        for spec, (_, part) in zip(variable.specs, variable.pushed(value), strict=True)
    }
