"""Loss scaling: small float16 gradients are kept from vanishing by a larger loss, and made small again after the sum.

A scale is fixed, or found while training: it grows after many steps without an overflow, and shrinks at each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from mpidist.optimizers.step_notes import StepNotes

if TYPE_CHECKING:
    from mpidist.device.answers import Answer

_LARGEST = 2.0**127  # larger ones are infinite in float32


class LossScale(StepNotes):
    """A scale that is fixed, or is halved after an overflow, and doubled after so many steps without one.

    Parameters
    ----------
    scale : float
        Positive; the first one where it changes.
    growth_steps : int, optional
        Steps without an overflow after which it is doubled.  None: it is fixed.

    Attributes
    ----------
    dynamic : bool
        Whether a step with an overflow is skipped, and the scale then shrinks.
    """

    def __init__(self, scale: float = 1.0, growth_steps: int | None = None) -> None:
        if growth_steps is not None and growth_steps < 1:
            raise ValueError(f"the loss scale grows after 1 step or more, got {growth_steps}")
        if not 0 < scale <= _LARGEST:
            raise ValueError(f"a loss scale must be positive and finite, got {scale}")
        self._scale = float(scale)
        self.growth_steps = growth_steps
        self.dynamic = growth_steps is not None
        self._steps = 0

    @property
    def scale(self) -> float:
        """The scale of the next step."""
        self.settle()
        return self._scale

    @scale.setter
    def scale(self, value: float) -> None:
        self.settle()
        self._scale = value

    def expect(self, answer: Answer) -> None:
        if self.dynamic:  # a fixed scale is read without a wait
            super().expect(answer)

    def _count(self, is_left_out: bool) -> None:
        if self.growth_steps is None:
            return
        if is_left_out:
            self._steps, self._scale = 0, max(self._scale / 2, 1.0)
            return
        self._steps += 1
        if self._steps >= self.growth_steps:
            self._steps, self._scale = 0, min(self._scale * 2, _LARGEST)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: a scale that changes, and the steps since it last did.  Local."""
        return {"loss_scale": self.scale, "loss_scale_steps": self._steps} if self.dynamic else {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave; a fixed scale stays, and one that has nothing there.  Local."""
        if self.dynamic:
            self.scale = float(state.get("loss_scale", self.scale))
            self._steps = int(state.get("loss_scale_steps", self._steps))


_O = TypeVar("_O")


def LossScaleOptimizer(  # noqa: N802 - a factory with the name of Keras' class
    inner_optimizer: _O, initial_scale: float = 2.0**15, dynamic_growth_steps: int = 2000
) -> _O:
    """Give an optimizer a dynamic loss scale, and return this optimizer.  Local.

    Multiply the loss by it with `Optimizer.scale_loss`; a step with a gradient that is not finite is left out by all
    ranks, and the scale halved.

    Parameters
    ----------
    inner_optimizer : Optimizer
    initial_scale : float
    dynamic_growth_steps : int
        Steps without an overflow after which the scale is doubled.

    Returns
    -------
    Optimizer
        `inner_optimizer`.

    Raises
    ------
    TypeError
        It is no optimizer, or `dynamic_growth_steps` is None.
    """
    scaled: Any = inner_optimizer
    if not hasattr(scaled, "loss_scale"):
        raise TypeError(f"LossScaleOptimizer takes an optimizer of mpidist.optimizers, got {inner_optimizer!r}")
    if dynamic_growth_steps is None:
        raise TypeError(
            "dynamic_growth_steps must be a number of steps, got None; a fixed scale is an optimizer's option "
            "loss_scale_factor"
        )
    scaled.loss_scale = LossScale(initial_scale, dynamic_growth_steps)
    return inner_optimizer
