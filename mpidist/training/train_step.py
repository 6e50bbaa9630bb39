"""One training step on this replica's part of a batch: gradients weighted by rows, one fused sum, one update.

Replica r, with the mean gradient g_r of its R_r rows, is to contribute g_r R_r / R, where R is the number of rows of
the global batch.  R is not known before the sum, nor need it be: all replicas divide by the same *expected* number,
which is the R of the step before, and the sum is corrected where that was wrong, as for the last batch of an epoch.
Of n replicas with equal parts each has the weight 1 / n, which is that of a mean; so the gradients go into the
reduction as they are.  The counts of the step are one small array more in the same call.

Gradients that are long are better applied while they are summed, slice by slice, and for that R must be known before;
those of several micro-batches are not reduced in every step.  In both cases the counts go ahead in a call of their own,
which is short beside the rest, and there is nothing to correct.
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
        self._counts = _Counts(model.trainable[0].value)
        self._weighted = _Weighted(model)

    def __call__(self, batch: Any, vote: bool, expected: int) -> tuple[Totals, Evaluation | None]:
        """Train on this replica's part of a batch.

        Collective: every rank calls it in the same order, those without rows too.

        Parameters
        ----------
        batch : array, or nested tuples and dicts of arrays
        vote : bool
        expected : int
            The rows that the global batch is likely to have, the same number on all ranks; 0 if that is not known.

        Returns
        -------
        (Totals, Evaluation or None)
            Of all replicas; and of this one, None if it has no rows.
        """
        rows = rows_of(batch)
        self._model.begin_step()
        evaluation = self._model.train(batch) if rows else None
        gradients = None if evaluation is None else evaluation.gradients
        counts = (rows, evaluation.loss * rows if evaluation is not None else 0.0, float(vote))
        if self._replicas > 1 and self._counts_go_ahead():
            return self._after_counting(counts, gradients), evaluation
        return self._with_counts(counts, gradients, expected), evaluation

    def _counts_go_ahead(self) -> bool:
        optimizer = self._optimizer
        return optimizer.gradient_accumulation_steps > 1 or optimizer.updates_in_reduction(self._model.trainable)

    def _with_counts(self, counts: tuple[int, float, float], gradients: list[Any] | None, expected: int) -> Totals:
        """Reduce counts and gradients in one call, and update."""
        expected = self._expected_rows(counts[0], expected)
        if not expected:
            return Totals(0, 0.0, counts[2] if self._replicas == 1 else 0.0)  # votes are for the step after
        weight = counts[0] * self._replicas / expected
        sent = gradients if gradients is not None and weight == 1 else self._weighted(gradients, weight)
        reduced = self._extended.reduce_arrays(
            ReduceOp.MEAN, [self._counts.put(counts), *sent], destinations=self._destinations
        )
        totals = self._counts.totals(reduced[0], self._replicas)
        if not totals.rows:
            return totals
        if totals.rows != expected:
            for gradient in reduced[1:]:
                gradient *= expected / totals.rows
        self._optimizer.reduce_and_update(reduced[1:], self._model.trainable, are_sums=True)
        return totals

    def _expected_rows(self, rows: int, expected: int) -> int:
        """Return the number of rows to divide by; collective where nothing is expected."""
        if self._replicas == 1:
            return rows
        if not expected:
            (total,) = self._extended.reduce_arrays(ReduceOp.SUM, [numpy.array(rows)])
            return int(total)
        return expected

    def _after_counting(self, counts: tuple[int, float, float], gradients: list[Any] | None) -> Totals:
        """Sum the counts, and leave the gradients to the optimizer.

        It is a matter of all ranks together whether gradients go into the sum as they are, not of each: in buffers that
        ranks share they are summed where they lie, in a call that all must make.
        """
        rows, loss, vote = counts
        (summed,) = self._extended.reduce_arrays(ReduceOp.SUM, [numpy.array([rows, loss, vote, rows * rows], "f8")])
        total, loss, votes, squares = summed.tolist()
        if total:
            are_even = squares * self._replicas == total * total
            weight = rows * self._replicas / total
            sent = gradients if gradients is not None and are_even else self._weighted(gradients, weight)
            self._optimizer.reduce_and_update(sent, self._model.trainable, scale=1 / self._replicas)
        return Totals(int(total), loss, votes)


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
