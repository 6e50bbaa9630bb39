"""`StepNotes`: what counts steps, where a device tells only later whether a step was left out."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist.device.answers import Answer


class StepNotes(abc.ABC):
    """Base of what takes note of each step once, in their order.

    Of the last step there may be an answer, which is asked for when somebody reads what depends on it.
    """

    _answer: Answer | None = None

    @abc.abstractmethod
    def _count(self, is_left_out: bool) -> None:
        """Take note of a step, behind all steps before."""

    def note(self, is_left_out: bool) -> None:
        """Take note of a step.  Local; waits for the answer to the step before."""
        self.settle()
        self._count(is_left_out)

    def expect(self, answer: Answer) -> None:
        """Take note of a step later, by its answer.  Local; waits for the answer to the step before."""
        self.settle()
        self._answer = answer

    def settle(self) -> None:
        """Take note of the last step, where there is an answer.  Local; waits for it."""
        if self._answer is not None:
            is_left_out = self._answer()  # an error leaves it where it is
            self._answer = None
            self._count(is_left_out)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a pickle and a copy hold, with all steps made so far."""
        self.settle()
        return dict(vars(self))
