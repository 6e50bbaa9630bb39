"""Losses as TensorFlow's guide has them: each replica divides by the rows of the global batch."""

from __future__ import annotations

import numpy
import torch

from mpidist.frameworks.torch.replicas import replicas_of


def compute_average_loss(
    per_example_loss: torch.Tensor,
    sample_weight: torch.Tensor | None = None,
    global_batch_size: int | None = None,
) -> torch.Tensor:
    """Return this replica's part of the mean loss over the global batch; sums over the replicas are the mean.

    Collective without `global_batch_size`: every rank calls it in the same order.

    Parameters
    ----------
    per_example_loss : tensor, shape (rows, ...)
        As of a loss function with ``reduction="none"``; there may be no rows.
    sample_weight : tensor, optional
        What each loss is multiplied by.
    global_batch_size : int, optional
        By default the rows of all replicas.

    Returns
    -------
    tensor, no dimensions
        Its gradient is this replica's part of that of the global batch.

    Raises
    ------
    ValueError
        A scalar loss, or a global batch of no rows.
    """
    if per_example_loss.dim() == 0:
        raise ValueError("compute_average_loss takes a loss for each example: a loss function with reduction='none'")
    if global_batch_size is None:
        rows = numpy.array([len(per_example_loss)], numpy.int64)
        replicas_of().reduce("sum", [rows], "global_batch_size")
        global_batch_size = int(rows[0])
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size={global_batch_size}: it is 1 or more")
    weighted = per_example_loss if sample_weight is None else per_example_loss * sample_weight
    return weighted.sum() / global_batch_size
