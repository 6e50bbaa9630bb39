"""One training step on this replica's part of a batch: gradients weighted by rows, one fused sum, one update.

The global batch has R rows.  Replica r has R_r of them, and their mean gradient g_r; it contributes g_r R_r / R.  The
sum is the mean gradient of all R rows.  The feed of the batch knows R before the step (`input.sharding.Share`).  No
weight is above 1, so what does not overflow on one rank with all rows does not overflow here.  Weighted gradients of
16-bit floats are float32: a product that was rounded to 16 bits might vanish.

Where n replicas have equal parts, each weight is 1 / n.  Then gradients go into a mean as they are.  Loss and votes are
one small array more in the same call.

Long gradients are better applied while they are summed, slice by slice.  Gradients of several micro-batches are not
reduced in every step.  In both cases loss and votes go ahead in a short call of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from mpidist import arrays
from mpidist.device.memory import kept_empty
from mpidist.input import structure
from mpidist.input.sharding import Share
from mpidist.optimizers import Optimizer
from mpidist.optimizers.slices import compute_dtype
from mpidist.options import ReduceOp
from mpidist.training.metrics import Metric
from mpidist.training.model import Evaluation, Model
from mpidist.training.own_time import OwnTime


class Totals(NamedTuple):
    """Rows, loss and votes of all replicas in a step."""

    rows: int
    loss: float
    votes: float


class TrainStep:
    """The step; called in a replica."""

    def __init__(self, model: Model, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._extended = model.strategy.extended
        self._replicas = self._extended.num_replicas
        self._destinations = [_COUNTS, *model.trainable]
        self._counts = _Counts(model.trainable[0].value)
        # of weighted gradients and of none, used again in each step
        self._products: list[Any] = []
        self._zeros: list[Any] = []
        are_short = [variable.dtype.itemsize < 4 for variable in model.trainable]
        self._has_short_floats, self._has_long_floats = any(are_short), not all(are_short)
        self.own_time = OwnTime()

    def __call__(self, batch: Any, share: Share | None, vote: bool) -> tuple[Totals, Evaluation | None]:
        """Train on this replica's part of a batch; of one without rows there is no Evaluation.  Collective."""
        rows = rows_of(batch)
        self._model.begin_step()
        evaluation = self._model.train(batch) if rows else None
        self.own_time.pause()
        if self._replicas == 1:
            share = Share(rows, True)
        assert share is not None
        if not share.rows:
            return Totals(0, 0.0, float(vote) if self._replicas == 1 else 0.0), None  # votes are for the step after
        gradients = None if evaluation is None else evaluation.gradients
        counts = (evaluation.loss * rows if evaluation is not None else 0.0, float(vote))
        step = self._after_counting if self._counts_go_ahead() else self._with_counts
        return Totals(share.rows, *step(counts, gradients, rows, share)), evaluation

    def _counts_go_ahead(self) -> bool:
        optimizer = self._optimizer
        if self._replicas == 1:
            return False
        if optimizer.gradient_accumulation_steps > 1:
            return True
        # short floats are never applied while they are summed: their sum has to be divided before it is rounded
        return not self._has_short_floats and optimizer.updates_in_reduction(self._model.trainable)

    def _with_counts(
        self, counts: tuple[float, float], gradients: list[Any] | None, rows: int, share: Share
    ) -> tuple[float, float]:
        """Reduce counts and gradients in one call, and update."""
        as_they_are = self._may_be_summed(share)
        sent = self._as_sent(gradients, rows, share, as_they_are)
        reduced = self._extended.reduce_arrays(
            ReduceOp.MEAN if as_they_are else ReduceOp.SUM,
            [self._counts.put(counts), *sent],
            destinations=self._destinations,
        )
        loss, votes = self._counts.read(reduced[0])
        self._optimizer.reduce_and_update(reduced[1:], self._model.trainable, are_sums=True)
        return (loss * self._replicas, votes * self._replicas) if as_they_are else (loss, votes)

    def _after_counting(
        self, counts: tuple[float, float], gradients: list[Any] | None, rows: int, share: Share
    ) -> tuple[float, float]:
        """Sum the counts, and leave the gradients to the optimizer."""
        # what is accumulated is weighted always, so that it does not depend on the number of replicas
        (summed,) = self._extended.reduce_arrays(ReduceOp.SUM, [numpy.array(counts, "f8")])
        loss, votes = summed.tolist()
        as_they_are = self._optimizer.gradient_accumulation_steps == 1 and self._may_be_summed(share)
        sent = self._as_sent(gradients, rows, share, as_they_are)
        scale = 1 / self._replicas if as_they_are else 1.0
        self._optimizer.reduce_and_update(sent, self._model.trainable, scale=scale)
        return loss, votes

    def _may_be_summed(self, share: Share) -> bool:
        """Return whether gradients go into the sum as they are, to be divided after it."""
        # All ranks do alike: gradients in shared buffers are summed where they lie, in one call of all ranks.
        # A sum that is looked at for overflows must not have one of its own; that of 16-bit floats has more room.
        return share.even and not (self._has_long_floats and self._optimizer.skips_nonfinite and self._replicas > 1)

    def _as_sent(self, gradients: list[Any] | None, rows: int, share: Share, as_they_are: bool) -> list[Any]:
        """Return the gradients, weighted in memory of ours if need be; zeros where there are no rows."""
        if gradients is None:
            self._zeros = self._zeros or self._model.zeros()
            return self._zeros
        if as_they_are:
            return gradients
        self._products = self._products or [
            kept_empty(gradient.shape, compute_dtype(gradient.dtype), gradient) for gradient in gradients
        ]
        for gradient, product in zip(gradients, self._products, strict=True):
            numpy.multiply(gradient, rows / share.rows, out=product, dtype=product.dtype, casting="same_kind")
        return self._products


#: The name of the counts in messages, in the place of a variable.
_COUNTS = "loss and votes"


class _Counts:
    """Loss and votes as an array like the gradients, so that they share a bucket; of 16-bit floats, as float32."""

    def __init__(self, like: Any) -> None:
        dtype = like.dtype if like.dtype in (numpy.dtype("float32"), numpy.dtype("float64")) else "float32"
        self._host = numpy.zeros(2, dtype)
        self._array = kept_empty(2, dtype, like) if arrays.is_device(like) else self._host

    def put(self, counts: tuple[float, float]) -> Any:
        """Return the array with these counts."""
        self._host[:] = counts
        if self._array is not self._host:
            self._array[...] = arrays.namespace(self._array).asarray(self._host)
        return self._array

    def read(self, reduced: Any) -> list[float]:
        """Return the counts of a reduced array."""
        found: list[float] = (arrays.as_host(reduced) if self._array is not self._host else reduced).tolist()
        return found


def any_rank(strategy: Any, flag: bool) -> bool:
    """Return whether a flag is set on any rank of a strategy.  Collective: every rank calls it in the same order."""
    extended = strategy.extended
    flag = bool(extended.any_in_replica(flag))
    if extended.num_replicas == 1:
        return flag
    (votes,) = extended.reduce_arrays(ReduceOp.SUM, [numpy.array(int(flag))])
    return bool(votes)


def count(metrics: Sequence[Metric], batch: Any, evaluation: Evaluation) -> int:
    """Add loss and predictions of a batch to metrics, of which the first is the loss; return its rows.  Local."""
    loss, *others = metrics
    rows = rows_of(batch)
    loss.sums["total"] += evaluation.loss * rows
    loss.sums["count"] += rows
    for metric in others:
        metric.update_state(batch[1], evaluation.predictions)
    return rows


def rows_of(batch: Any) -> int:
    """Return the number of rows of this replica's part of a batch.  Local."""
    first = next(structure.leaves(batch), None)
    shape = getattr(first, "shape", ())
    if not shape:
        raise ValueError(f"a batch must be arrays with one row for each example, got {type(first).__name__}")
    return int(shape[0])
