"""`RemoteUpdates`: the updates of an optimizer by other processes that hold its variables."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.optimizers.saved_slots import SavedSlots


class RemoteUpdates(abc.ABC):
    """Updates of one optimizer, made where its variables are: pushes gradients, and asks for what is kept there.

    Given by `StrategyExtended.remote_updates`.
    """

    @abc.abstractmethod
    def push(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], factors: list[float]) -> None:
        """Send gradients, each to be multiplied by its factor, and to be applied as one step."""

    def push_again(self, optimizer: Any, pairs: Sequence[tuple[Any, Any]]) -> bool:
        """Push gradients for a list of variables that has been pushed before, with no need to look at each.

        Return whether it was such a list; if not, nothing has been done.  Errors as for `push`.

        Parameters
        ----------
        optimizer : Optimizer
        pairs : sequence of (gradient, variable)
            As given to `Optimizer.apply_gradients`, not looked at yet.
        """
        return False

    @property
    @abc.abstractmethod
    def iterations(self) -> int:
        """Steps made, by all that push."""

    @abc.abstractmethod
    def set_iterations(self, value: int) -> None:
        """Count steps from `value` on."""

    @abc.abstractmethod
    def set_learning_rate(self, value: Any) -> None:
        """Set the learning rate of later steps: a number, or a function of the steps made."""

    @abc.abstractmethod
    def state(self) -> tuple[dict[str, Any], list[SavedSlots]]:
        """Return ``iterations``, and ``learning_rate`` where it is a number; and all slots, whole."""

    @abc.abstractmethod
    def match(self, saved: Sequence[SavedSlots]) -> None:
        """Bind saved slots to variables; ValueError where the variable cannot be found."""

    @abc.abstractmethod
    def restore(self, state: Mapping[str, Any], saved: Sequence[SavedSlots]) -> None:
        """Take over a state of this strategy or of another, with slots that have been matched."""

    @abc.abstractmethod
    def slots(self, variable: Any) -> dict[str, Any]:
        """Return copies of the slots of a variable by name, in its shape."""

    @abc.abstractmethod
    def reference(self, optimizer: Any) -> tuple[Any, ...]:
        """Return what a pickle holds of the optimizer: where to find it in a process of the same job."""
