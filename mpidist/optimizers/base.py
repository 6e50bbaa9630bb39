"""`Optimizer`: from gradients of every replica to updated variables, stage by stage.

In order: micro-batches are accumulated, gradients summed over the replicas, steps that are not finite left out,
gradients clipped (`gradient_stages`), and the rule of the family (`Rule`) applied.  How the sum and the rule are
carried out, and whether as one, is the strategy's affair (`updates`).
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypedDict, TypeVar

from mpidist import context
from mpidist.collectives.exchange.plain import whole
from mpidist.hints import meant
from mpidist.optimizers.clipping import Clipping
from mpidist.optimizers.gradient_stages import GradientStages
from mpidist.optimizers.gradients import checked_gradients, place_of_call
from mpidist.optimizers.loss_scale import LossScale
from mpidist.optimizers.rule import LearningRate, Rule, by_name
from mpidist.optimizers.saved_slots import SLOTS, SavedSlots, described, slots_in
from mpidist.optimizers.updates.local import LocalUpdates
from mpidist.optimizers.updates.updates import Updates
from mpidist.optimizers.updates.variable_list import VariableLists
from mpidist.variables import DistributedVariable

_T = TypeVar("_T")

if TYPE_CHECKING:
    from typing_extensions import Unpack
elif sys.version_info >= (3, 11):
    from typing import Unpack
else:

    class Unpack(Generic[_T]):
        """What `typing.get_type_hints` finds in Python 3.10, which has no ``Unpack``."""


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
        these micro-batches is applied.  `iterations`, and with it a schedule, counts updates; a schedule of Keras
        counts micro-batches there.
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

    #: None in a rule by itself.
    _updates: Updates | None = None

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
        **unknown: NoReturn,
    ) -> None:
        if unknown:
            raise TypeError(f"{type(self).__name__} has no option {(name := min(unknown))!r}; {self._meant(name)}")
        super().__init__(learning_rate, weight_decay, clipvalue)
        loss_scale = LossScale(1.0 if loss_scale_factor is None else loss_scale_factor)
        clipping = Clipping(clipnorm, clipvalue, global_clipnorm)
        count = 1 if gradient_accumulation_steps is None else gradient_accumulation_steps
        self._stages = GradientStages(count, loss_scale, skip_nonfinite, clipping)
        self._lists = VariableLists()
        self._updates = context.get_strategy().extended.updates(self, None)

    def _meant(self, name: str) -> str:
        taken = [each for of in (type(self), Optimizer) for each in inspect.signature(of).parameters.values()]
        return meant(name, {each.name for each in taken if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)})

    @property
    def elementwise(self) -> bool:
        """Whether slices of the summed gradients may be applied by themselves, by `update`, in any order."""
        return self.takes_slices and not self._stages.look_at_gradients

    @property
    def _of_updates(self) -> Updates:
        assert self._updates is not None, "a rule by itself makes no steps"
        return self._updates

    # -- what users set -----------------------------------------------------------------------------------------------

    @property
    def iterations(self) -> int:
        """Updates made.  Local; where servers hold the variables, they are asked."""
        return self._iterations if self._updates is None else self._updates.iterations

    @iterations.setter
    def iterations(self, value: int) -> None:
        if self._updates is not None:
            name = f"{type(self).__name__}.iterations"
            value = whole(value, name)
            if not 0 <= value < 2**63:
                raise ValueError(f"{name} must be from 0 to 2**63 - 1, got {value}; set the number of updates made")
            self._updates.iterations = value
        self._iterations = value

    def _set_learning_rate(self, value: LearningRate) -> None:
        super()._set_learning_rate(value)
        if self._updates is not None:
            self._updates.set_learning_rate(value)

    def read_learning_rate(self) -> None:
        """Take over the learning rate that servers have, which another process may have set.

        Local, but collective among the ranks of a worker of servers.  Nothing changes where there are no servers, or
        where the learning rate is a function of the steps.
        """
        if self._updates is not None and (rate := self._updates.learning_rate()) is not None:
            self._restore_rate({"learning_rate": rate})

    def exclude_from_weight_decay(
        self, var_list: Iterable[DistributedVariable] = (), var_names: Iterable[str] = ()
    ) -> None:
        """Leave variables out of the weight decay.  Local; as for `Rule.exclude_from_weight_decay`, also in errors.

        RuntimeError where servers have the optimizer already, which go by the settings that they got.
        """
        if self._updates is not None:
            self._updates.require_changeable(self, "exclude_from_weight_decay")
        super().exclude_from_weight_decay(var_list, var_names)

    @property
    def loss_scale(self) -> LossScale:
        """What losses are multiplied by."""
        return self._stages.loss_scale

    @loss_scale.setter
    def loss_scale(self, value: LossScale) -> None:
        self._stages.loss_scale = value

    @property
    def skip_nonfinite(self) -> bool:
        """Whether a step with a gradient that is not finite is to be left out."""
        return self._stages.skip_nonfinite

    @skip_nonfinite.setter
    def skip_nonfinite(self, value: bool) -> None:
        self._stages.skip_nonfinite = value

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with a gradient that is not finite is left out: asked for, or needed by the loss scale."""
        return self._stages.skips_nonfinite

    @property
    def skipped_steps(self) -> int:
        """Updates left out.  Local; where servers hold the variables, they are asked for those of all workers."""
        of_all = None if self._updates is None else self._updates.skipped_steps()
        return self._stages.skipped_steps if of_all is None else of_all

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches that make one update."""
        return self._stages.accumulation.count

    @property
    def micro_step(self) -> int:
        """Micro-batches accumulated since the last update."""
        return self._stages.accumulation.micro_step

    def forget_micro_batches(self) -> None:
        """Leave out what was accumulated since the last update.  Local."""
        self._stages.accumulation.restore({}, [])

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
            A gradient has its variable's shape, or some of its rows, and is copied to the host where its variable lies
            there.  A variable whose gradient is None is left as it is.  No gradient may be a view of a variable of the
            list: it may be read when that has been updated.
        skip_gradients_aggregation : bool
            Do not sum: for gradients that already are sums, the same on every replica.

        Raises
        ------
        TypeError
            A pair is not (gradient, variable); a variable is not of a floating dtype, or lies on a GPU and its gradient
            on the host.
        ValueError
            If there is no gradient at all, a gradient's shape is not its variable's, or a variable comes twice.
        RuntimeError
            With more than one replica: outside `strategy.run`, or a variable was not created in the strategy's scope.
        """
        pairs = list(gradients_and_variables)
        if self._of_updates.step_again(self._stages, pairs):
            return
        checked = self._checked_before(pairs)
        if checked is None:
            checked = checked_gradients(pairs)
            self._lists.checked = place_of_call(), self._lists.of(checked[1])
        self.reduce_and_update(*checked, are_sums=skip_gradients_aggregation)

    def _checked_before(self, pairs: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """Return gradients and variables that need no look, as the last call's were checked.  Local."""
        where, listed = self._lists.checked
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
        return self.elementwise and self._updates_of(variables).pays_in_reduction(self._lists.of(variables))

    def _updates_of(self, variables: Sequence[Any]) -> Updates:
        """Return what carries out steps on variables of their strategy, from now on.  Local."""
        self._updates = variables[0].strategy.extended.updates(self, self._updates)
        return self._updates

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
        listed = self._lists.of(variables)
        accumulation, updates = self._stages.accumulation, self._updates_of(variables)
        updates.require_updatable(self, variables)
        listed.enter()
        if accumulation.count > 1:
            whole = accumulation.add(gradients, variables, are_sums=are_sums)
        if whole is not None:
            updates.step(self, self._stages, whole, listed, are_sums=are_sums, scale=scale)

    # -- state --------------------------------------------------------------------------------------------------------

    def slots(self, variable: DistributedVariable) -> dict[str, Any]:
        """Return the slots of a variable by name, in its shape; live views where they are kept whole.

        Collective where they are kept in slices, each on one rank (large models under a strategy of several ranks);
        Local otherwise.
        """
        return self._of_updates.slots(variable)

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
        stages = self._stages
        plain, saved = self._of_updates.state(self)
        entries: dict[str, Any] = {"class": type(self).__name__, "slot_names": list(self.slot_names)}
        entries |= {
            "skipped_steps": stages.skipped_steps,
            **self.loss_scale.state(),
            **stages.accumulation.state(paths),
        }
        entries |= plain
        if self.slot_names:
            entries |= described(saved, SLOTS, paths)
        for number, each in enumerate(saved):
            entries.update({f"{number}/{slot}": array for slot, array in each.arrays.items()})
        return entries

    def check(self, state: Mapping[str, Any], variables: Mapping[str, Any] = NO_VARIABLES) -> None:
        """Raise what `restore` would raise, and change nothing.  Local."""
        self._slots_to_restore(state, variables)
        self._stages.accumulation.saved_in(state, variables)

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
        stages = self._stages
        saved, sums = self._slots_to_restore(state, variables), stages.accumulation.saved_in(state, variables)
        stages.accumulation.restore(state, sums)
        self._of_updates.restore(state, saved)
        self._iterations = int(state["iterations"])
        stages.skipped_steps = int(state.get("skipped_steps", 0))
        self._restore_rate(state)
        self.loss_scale.restore(state)

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
        self._of_updates.match(saved)
        return saved

    # -- copies -------------------------------------------------------------------------------------------------------

    def __copy__(self) -> Optimizer:
        """Return a copy that shares everything, steps and slots too.

        But where servers make the steps of this one, those of the copy are made here, from its own slots.
        """
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        if not isinstance(self._updates, LocalUpdates):
            new._stages, new._updates = self._stages.anew(), LocalUpdates(self.slot_names, self.initial_slots())
            new._updates.iterations = self._iterations
            new._lists = VariableLists()
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Optimizer:
        """Return a copy of an optimizer that has met no variables.

        Raises
        ------
        TypeError
            It has met some: its state belongs to these, not to copies of them.
        """
        has_named = any(isinstance(each, DistributedVariable) for each in self._without_decay)
        if self._of_updates.has_met or self.micro_step or has_named:
            raise TypeError(
                f"this {type(self).__name__} has met variables, to which its state belongs, so it cannot be copied. "
                "Make another one with the same arguments; `restore(optimizer.state())` gives it the same state"
            )
        new = object.__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle and a deep copy hold, in a dict of its own: a subclass may leave something out."""
        return dict(vars(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a reference where servers hold the variables: there is one such optimizer in a job."""
        reference = None if self._updates is None else self._updates.reference(self)
        return super().__reduce_ex__(protocol) if reference is None else reference


def rule_of(optimizer: Rule) -> Rule:
    """Return the rule of an optimizer, for somebody else to update variables of his own with.  Local.

    It is of the same class, and has settings and learning rate: no steps, slots, stages or lists.  Variables without
    weight decay are known by name.
    """
    rule: Rule = object.__new__(type(optimizer))
    settings = vars(optimizer).items()
    rule.__dict__.update({name: value for name, value in settings if name not in _NOT_OF_THE_RULE})
    rule._without_decay, rule._iterations = [by_name(each) for each in optimizer._without_decay], 0
    return rule


#: What an optimizer has besides its rule.
_NOT_OF_THE_RULE = frozenset({"_stages", "_updates", "_lists"})
