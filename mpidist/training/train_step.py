"""One training step on this replica's part of a batch: gradients weighted by rows, one fused sum, one update.

Replica r, with the mean gradient g_r of its R_r rows, is to contribute g_r R_r / R, where R is the number of rows of
the global batch.  R is not known before the sum, nor need it be: all replicas divide by the same *expected* number,
which is the R of the step before, and the sum is corrected where that was wrong, as for the last batch of an epoch.
Of n replicas with equal parts each has the weight 1 / n, which is that of a mean; so the gradients go into the
reduction as they are.  The counts of the step are one small array more in the same call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from mpidist import arrays
from mpidist.input import structure
from mpidist.optimizers import Optimizer
from mpidist.options import ReduceOp
from mpidist.training.model import Evaluation, Model


class Totals(NamedTuple):
    """What all replicas know together after a step.

    Attributes
    ----------
    rows : int
        Rows of the global batch.
    loss : float
        Sum of the losses of these rows, rounded to the dtype of the gradients.
    votes : float
        How many replicas voted for an end.
    """

    rows: int
    loss: float
    votes: float


class TrainStep:
    """The step; called in a replica.

    Parameters
    ----------
    model : Model
    optimizer : Optimizer
    """

    def __init__(self, model: Model, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._extended = model.strategy.extended
        self._replicas = self._extended.num_replicas
        self._destinations = [_COUNTS, *model.trainable]
        self._counts = _Counts(model.trainable[0].storage)
        self._weighted = _Weighted(model)
        self._expected = 0

    def __call__(self, batch: Any, vote: bool) -> tuple[Totals, Evaluation | None]:
        """Train on this replica's part of a batch.

        Collective: every rank calls it in the same order, those without rows too.

        Returns
        -------
        (Totals, Evaluation or None)
            Of all replicas; and of this one, None if it has no rows.
        """
        rows = rows_of(batch)
        evaluation = self._model.train(batch) if rows else None
        gradients = None if evaluation is None else evaluation.gradients
        counts = (rows, evaluation.loss * rows if evaluation is not None else 0.0, float(vote))
        is_alone, accumulates = self._replicas == 1, self._optimizer.gradient_accumulation_steps > 1
        step_fn = self._after_counting if accumulates and not is_alone else self._with_counts
        return step_fn(counts, gradients), evaluation

    def _with_counts(self, counts: tuple[int, float, float], gradients: list[Any] | None) -> Totals:
        """Reduce counts and gradients in one call, and update."""
        expected = self._expected_rows(counts[0])
        if not expected:
            return Totals(0, 0.0, counts[2] if self._replicas == 1 else 0.0)  # votes are for the step after
        sent = self._weighted(gradients, counts[0] * self._replicas / expected)
        reduced = self._extended.reduce_arrays(
            ReduceOp.MEAN, [self._counts.put(counts), *sent], destinations=self._destinations
        )
        totals = self._counts.totals(reduced[0], self._replicas)
        if not totals.rows:
            return totals
        if totals.rows != expected:
            for gradient in reduced[1:]:
                gradient *= expected / totals.rows
        self._expected = totals.rows
        pairs = zip(reduced[1:], self._model.trainable, strict=True)
        self._optimizer.apply_gradients(pairs, skip_gradients_aggregation=True)
        return totals

    def _expected_rows(self, rows: int) -> int:
        """Return the number of rows to divide by; collective in the first step."""
        if self._replicas == 1:
            return rows
        if not self._expected:
            (total,) = self._extended.reduce_arrays(ReduceOp.SUM, [numpy.array(rows)])
            self._expected = int(total)
        return self._expected

    def _after_counting(self, counts: tuple[int, float, float], gradients: list[Any] | None) -> Totals:
        """Sum the counts, and leave the gradients to the optimizer, which adds up several before it reduces them."""
        (summed,) = self._extended.reduce_arrays(ReduceOp.SUM, [numpy.array(counts)])
        totals = Totals(round(float(summed[0])), float(summed[1]), float(summed[2]))
        if totals.rows:
            sent = self._weighted(gradients, counts[0] / totals.rows)
            self._optimizer.apply_gradients(zip(sent, self._model.trainable, strict=True))
        return totals


#: What messages call the counts, in the place of a variable.
_COUNTS = "rows, loss and votes"


class _Counts:
    """The counts as an array like the gradients, so that they share a bucket; of 16-bit floats, as float32."""

    def __init__(self, like: Any) -> None:
        dtype = like.dtype if like.dtype in (numpy.dtype("float32"), numpy.dtype("float64")) else "float32"
        self._host = numpy.zeros(3, dtype)
        self._array = arrays.empty(3, dtype, like) if arrays.is_device(like) else self._host

    def put(self, counts: tuple[int, float, float]) -> Any:
        """Return the array with these counts."""
        self._host[:] = counts
        if self._array is not self._host:
            self._array[...] = arrays.namespace(self._array).asarray(self._host)
        return self._array

    def totals(self, mean: Any, replicas: int) -> Totals:
        """Return the totals, of the mean over the replicas."""
        rows, loss, votes = (arrays.as_host(mean) if self._array is not self._host else mean).tolist()
        return Totals(round(rows * replicas), loss * replicas, votes * replicas)


class _Weighted:
    """Gradients times a weight, in memory that is used again in the next step; those of the user are not changed."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._products: list[Any] = []
        self._zeros: list[Any] = []

    def __call__(self, gradients: list[Any] | None, weight: float) -> list[Any]:
        """Return the gradients times the weight; zeros for a replica without rows."""
        if gradients is None:
            self._zeros = self._zeros or self._model.zeros()
            return self._zeros
        if weight == 1:
            return gradients
        self._products = self._products or [arrays.empty_like(gradient) for gradient in gradients]
        for gradient, product in zip(gradients, self._products, strict=True):
            numpy.multiply(gradient, weight, out=product, casting="same_kind")
        return self._products


def rows_of(batch: Any) -> int:
    """Return the number of rows of this replica's part of a batch.  Local.

    Raises
    ------
    ValueError
        The batch has no array, or one is a scalar.
    """
    first = next(structure.leaves(batch), None)
    shape = getattr(first, "shape", ())
    if not shape:
        raise ValueError(f"a batch must be arrays with one row for each example, got {type(first).__name__}")
    return int(shape[0])
