"""Predictions of all replicas put together, in the order of the input rows.

A replica keeps the predictions for its part of each batch.  At the end the replicas tell each other the rows of each
part, and structure and dtypes of the arrays, since a replica may have had no row at all.  Then they gather each array
once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy

from mpidist import arrays, nest
from mpidist.input import structure


def gathered(strategy: Any, parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Return the predictions for all rows in input order, the same on every rank.  Collective."""
    replica = strategy.extended.replica_id
    lengths = [length for length in rows if length]
    own = [_on_host(part, length, replica) for part, length in zip(parts, lengths, strict=True)]
    told = _exchange(strategy, {"rows": list(rows), "like": structure.outline(own[0]) if own else None})
    likes = [each["like"] for each in told if each["like"] is not None]
    if not likes:
        raise ValueError("there is nothing to predict: the data have no rows")
    own = own or [structure.without_rows(likes[0])]
    leaves = zip(*map(nest.flatten, own), strict=True)
    order = input_order([each["rows"] for each in told])
    return nest.pack(own[0], [strategy.gather(_joined(each, replica), axis=0)[order] for each in leaves])


def input_order(rows_of_replicas: Sequence[Sequence[int]]) -> numpy.ndarray:
    """Return the places of the input rows, batch by batch, in arrays that are gathered replica by replica.  Local."""
    steps = max(map(len, rows_of_replicas))
    lengths = numpy.array([[*rows, *[0] * (steps - len(rows))] for rows in rows_of_replicas], "int64")
    starts = (lengths.reshape(-1).cumsum() - lengths.reshape(-1)).reshape(lengths.shape)
    pieces = zip(starts.T.reshape(-1), lengths.T.reshape(-1), strict=True)
    return numpy.concatenate([numpy.arange(start, start + length) for start, length in pieces])


def _joined(parts: Sequence[numpy.ndarray], replica: int) -> numpy.ndarray:
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise ValueError(
            f"rank {replica}: predict_fn returned predictions of several shapes for a row: {sorted(shapes)}; give all "
            "rows predictions of one shape"
        )
    return numpy.concatenate(parts)


def _on_host(part: Any, rows: int, replica: int) -> Any:
    def converted(leaf: Any) -> Any:
        array = arrays.to_array(leaf)
        if array.shape[:1] != (rows,):
            raise ValueError(
                f"rank {replica}: predict_fn returned an array of shape {array.shape} for {rows} rows; it must return "
                "one prediction for each row"
            )
        return arrays.on_host(array)

    return nest.pack(part, map(converted, nest.flatten(part)))


def _exchange(strategy: Any, own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the notes of all replicas, in replica order.  Collective."""
    line = numpy.frombuffer((json.dumps(own) + "\n").encode(), "uint8")
    return [json.loads(text) for text in strategy.gather(line, axis=0).tobytes().decode().splitlines()]
