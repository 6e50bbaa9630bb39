"""`GradientStages`: what happens to gradients before the rule, in order.

Micro-batches are added up; then, when the gradients have been summed over the replicas, steps that are not finite are
left out, and gradients are scaled and clipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.device.answers import Limits
from mpidist.optimizers.accumulation import Accumulation
from mpidist.optimizers.clipping import Clipping, is_finite
from mpidist.optimizers.loss_scale import LossScale
from mpidist.optimizers.slices import SliceScratch
from mpidist.optimizers.step_notes import StepNotes
from mpidist.variables import sums_over_parts


class GradientStages(StepNotes):
    """The stages of one optimizer.  `micro_batches` make one update; `skipped_steps` counts updates left out."""

    def __init__(self, micro_batches: int, loss_scale: LossScale, skip_nonfinite: bool, clipping: Clipping) -> None:
        self.accumulation = Accumulation(micro_batches)
        self.loss_scale, self.skip_nonfinite, self.clipping = loss_scale, skip_nonfinite, clipping
        self._skipped_steps = 0
        self._scratch = SliceScratch()

    def anew(self) -> GradientStages:
        """Return stages with the same settings in the middle of nothing.  Local."""
        return GradientStages(self.accumulation.count, self.loss_scale, self.skip_nonfinite, self.clipping)

    @property
    def skipped_steps(self) -> int:
        """Updates left out."""
        self.settle()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self.settle()
        self._skipped_steps = value

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a step with a gradient that is not finite is left out: asked for, or needed by the loss scale."""
        return self.skip_nonfinite or self.loss_scale.dynamic

    @property
    def look_at_gradients(self) -> bool:
        """Whether whole gradients are needed before any of them is applied."""
        return self.clipping.needs_norms or self.skips_nonfinite

    @property
    def factor(self) -> float:
        """What a sum is multiplied by because of loss scale and micro-batches."""
        return 1.0 / (self.loss_scale.scale * self.accumulation.count)

    @property
    def only_factor(self) -> float | None:
        """The factor, where nothing else is done to gradients; None otherwise."""
        return None if self.look_at_gradients or self.accumulation.count > 1 else self.factor

    def limits(self, scale: float) -> Limits:
        """Return what a device is asked to do in place of `factors`."""
        clipping = self.clipping
        is_each = clipping.clipnorm is not None
        norm = clipping.clipnorm if is_each else clipping.global_clipnorm
        return Limits(self.factor * scale, norm, is_each, self.skips_nonfinite)

    def factors(self, gradients: Sequence[Any], variables: Sequence[Any], scale: float) -> list[float] | None:
        """Return what to multiply every summed gradient by; None if the step is left out, which is counted.

        Local, and the same on all ranks without asking, since all have the same bits of the summed gradients.  Where
        variables are split, the ranks of a replica ask each other: collective among them.  `gradients` has what may
        differ from 0 in each, not looked at unless stages `look_at_gradients`; they are multiplied by `scale` besides
        the `factor`.
        """
        factor = self.factor * scale  # of the loss scale that these gradients have
        if self.skips_nonfinite:
            has_overflow = any(sums_over_parts(variables, [not is_finite(each) for each in gradients]))
            self.loss_scale.note(has_overflow)
            self.note(has_overflow)
            if has_overflow:
                return None
        return self.clipping.factors(gradients, variables, factor, self._scratch)

    def _count(self, is_left_out: bool) -> None:
        self._skipped_steps += is_left_out
