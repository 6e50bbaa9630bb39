"""Predictions of all replicas, put together in the order of the input rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy

from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.shares import BatchShare


def gathered(replica: ModelReplica, found: Any, shares: Sequence[BatchShare]) -> Any:
    """Return the predictions for all rows, the same on every rank.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    replica : ModelReplica
    found : nested arrays
        Of the rows that this replica was given, batch by batch.
    shares : sequence of BatchShare
        Of the batches.
    """
    given = sum(share.given_rows for share in shares)
    counts = numpy.concatenate([numpy.full(share.given_rows, share.own_rows > 0) for share in shares])
    order = _input_order([share.rows for share in shares], replica.count)

    def joined(leaf: Any) -> numpy.ndarray:
        array = numpy.asarray(leaf)
        if len(array) != given:
            raise ValueError(
                f"{replica.name}: the model made {len(array)} predictions of {given} rows; a distributed model must "
                "make one for each row"
            )
        return replica.communicator.all_gather(numpy.ascontiguousarray(array[counts]), axis=0)[order]

    return keras.tree.map_structure(joined, found)


def _input_order(rows: Sequence[int], count: int) -> numpy.ndarray:
    """Return the places of the input rows in what is gathered replica by replica."""
    parts = [[BatchShare.of(each, number, count).own_rows for each in rows] for number in range(count)]
    lengths = numpy.array(parts, "int64")
    starts = (lengths.reshape(-1).cumsum() - lengths.reshape(-1)).reshape(lengths.shape)
    pieces = zip(starts.T.reshape(-1), lengths.T.reshape(-1), strict=True)
    return numpy.concatenate([numpy.arange(start, start + length) for start, length in pieces])
