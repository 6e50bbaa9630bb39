"""`Updates`: how the steps of one optimizer are carried out, and the slots of its variables.  A strategy gives it."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.optimizers.gradient_stages import GradientStages
from mpidist.optimizers.rule import LearningRate, Rule
from mpidist.optimizers.saved_slots import SavedSlots
from mpidist.optimizers.updates.variable_list import VariableList


class Updates(abc.ABC):
    """The steps of one optimizer, and the slots of its variables.  Given by `StrategyExtended.updates`."""

    #: Steps made, wherever they were asked for.
    iterations: int

    def step_again(self, stages: GradientStages, pairs: Sequence[tuple[Any, Any]]) -> bool:
        """Make a step for a list of variables that is known, with no need to look at each.

        Return whether it was such a list; if not, nothing has been done.  Errors as for `step`.  `pairs` are as given
        to `Optimizer.apply_gradients`, not looked at yet.
        """
        return False

    def require_updatable(self, rule: Rule, variables: Sequence[Any]) -> None:  # noqa: B027 - whole ones are here
        """Raise NotImplementedError where a rule cannot update variables as they are kept.  Local."""

    @abc.abstractmethod
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
        """Sum gradients over the replicas, and update.

        Collective: every replica calls it in the same order.  Local for one replica, and for sums where nobody else
        takes part in the update.  `stages` are those between the sum and the rule.  With `are_sums` nothing is summed;
        sums are multiplied by `scale` while they are applied.
        """

    def pays_in_reduction(self, listed: VariableList) -> bool:
        """Return whether gradients, where slices may be applied, are likely to be applied while they are summed.

        Local, and the same on all ranks.
        """
        return False

    def skipped_steps(self) -> int | None:
        """Return the steps left out by all who share this optimizer; None where this process knows of all."""
        return None

    def learning_rate(self) -> float | None:
        """Return the learning rate, a number, that others may have set; None where it is the rule's own."""
        return None

    def require_changeable(self, rule: Rule, what: str) -> None:  # noqa: B027 - the rule is asked at each step
        """Raise RuntimeError where a change of the rule, by the method `what`, would have no effect.  Local."""

    def set_learning_rate(self, value: LearningRate) -> None:  # noqa: B027 - the rule is asked at each step
        """Take note of the learning rate of later steps."""

    @abc.abstractmethod
    def state(self, rule: Rule) -> tuple[dict[str, Any], list[SavedSlots]]:
        """Return ``iterations``, and ``learning_rate`` where it is a number; and all slots, whole."""

    @abc.abstractmethod
    def match(self, saved: Sequence[SavedSlots]) -> None:
        """Bind saved slots to variables; ValueError where it cannot be told to which one they belong."""

    @abc.abstractmethod
    def restore(self, state: Mapping[str, Any], saved: Sequence[SavedSlots]) -> None:
        """Take over a state of this strategy or of another, with slots that have been matched."""

    @abc.abstractmethod
    def slots(self, variable: Any) -> dict[str, Any]:
        """Return the slots of a variable by name, in its shape: live views where they are kept whole, else copies."""

    @property
    def has_met(self) -> bool:
        """Whether it knows variables, or must not be copied for another reason."""
        return True

    def reference(self, optimizer: Any) -> tuple[Any, ...] | None:
        """Return what a pickle holds of the optimizer in its place; None for the optimizer itself."""
        return None
