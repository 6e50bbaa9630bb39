"""What a user gives to `fit` and its like, sorted out: arrays or something that gives batches, and their settings."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy

from mpidist.collectives.mismatch import fact
from mpidist.frameworks.keras import facts
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.inputs import ArrayBatches, DatasetInput, KerasBatches, PartAdapter, rows_of
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.input.dataset import Dataset
from mpidist.input.distributed import DistributedDataset, DistributedIterator

#: Rows of a global batch of arrays, as in Keras.
_BATCH_SIZE = 32


def adapter_of(
    replica: ModelReplica,
    what: str,
    arrays: tuple[Any, Any, Any],
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool | str = False,
    class_weight: Any = None,
) -> PartAdapter:
    """Return the input of Keras with this replica's parts of the batches.

    Collective: every rank calls it in the same order.

    `what`: the method that was called, for messages.  `arrays`: inputs, labels, weights; or something that gives
    batches, and two times None.  `batch_size`, `steps`, `shuffle`, `class_weight`: as for `fit` of Keras.
    CollectiveMismatchError, on all ranks: they were given different arrays or settings.  ValueError or
    NotImplementedError: it is no input.
    """
    x, y, sample_weight = arrays
    if isinstance(x, PartAdapter):
        return x
    if not are_arrays(arrays):
        _require_nothing_beside(x, y, sample_weight)
        if isinstance(x, (Dataset, DistributedDataset, DistributedIterator)):
            x = DatasetInput(x)
        if isinstance(x, DatasetInput):
            _require_fit(x, steps, class_weight)
        batches = KerasBatches(replica, x, shuffle, class_weight)
        replica.replicas.check(
            f"Keras {what}", [fact("batches in an epoch", batches.num_batches), fact("steps", steps)]
        )
        return batches
    x, y, sample_weight = map(on_host, arrays)
    if class_weight is not None:
        sample_weight = _weights_of_classes(y, sample_weight, class_weight)
    sample_weight = _for_each_output(y, sample_weight)
    rows = rows_of((x, y, sample_weight))
    size = batch_size or (math.ceil(rows / steps) if steps else _BATCH_SIZE)
    settings = {"batch_size": size, "shuffle": shuffle, "steps": steps}
    facts.compare_arrays(replica, f"Keras {what}", (x, y, sample_weight), settings)
    # a step is given as many parts as Keras gives it, and one part as it is
    batches = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
    return ArrayBatches(replica, batches, size, shuffle)


def are_arrays(given: Any) -> bool:
    """Return whether everything in a nested structure is an array, or None.  Local."""
    leaves = [leaf for leaf in keras.tree.flatten(given) if leaf is not None]
    return bool(leaves) and all(hasattr(leaf, "shape") and hasattr(leaf, "__len__") for leaf in leaves)


def on_host(given: Any) -> Any:
    """Return nested arrays of any library as arrays of NumPy.  Local."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else _on_host(leaf), given)


def _on_host(leaf: Any) -> numpy.ndarray:
    if isinstance(leaf, numpy.ndarray):
        return leaf
    if not hasattr(leaf, "__array__"):
        raise NotImplementedError(
            f"a distributed Keras model takes dense arrays, got a {type(leaf).__module__}.{type(leaf).__name__}; pass "
            "a dense array, or a keras.utils.PyDataset that makes dense batches"
        )
    return to_numpy(leaf) if hasattr(leaf, "device") else numpy.asarray(leaf)


def split(arrays: tuple[Any, Any, Any], validation_split: float) -> tuple[Any, Any]:
    """Return the first rows, and the last ones for a validation: `validation_split` of all of them.  Local.

    ValueError: they are no arrays, or one of the two would have no rows.
    """
    if not are_arrays(arrays):
        raise ValueError(
            f"validation_split is for arrays, got a {type(arrays[0]).__name__}; give validation_data in its place"
        )
    arrays = tuple(map(on_host, arrays))
    rows = rows_of(arrays)
    at = math.floor(rows * (1.0 - validation_split))
    if not 0 < at < rows:
        raise ValueError(
            f"{rows} rows cannot be split by validation_split={validation_split}: there would be {at} rows to train "
            f"with and {rows - at} to validate with"
        )

    def cut(first: int, last: int) -> Any:
        return keras.tree.map_structure(lambda leaf: None if leaf is None else leaf[first:last], arrays)

    return cut(0, at), cut(at, rows)


def three(data: Any) -> tuple[Any, Any, Any]:
    """Return inputs, labels and weights of what is given as validation data.  Local.  ValueError: it is more."""
    if not isinstance(data, (tuple, list)):
        return data, None, None
    if len(data) > 3:
        raise ValueError(f"validation_data must be (inputs, labels, weights) or a part of it, got {len(data)} things")
    x, y, sample_weight = (*data, None, None)[:3]
    return x, y, sample_weight


def _require_nothing_beside(x: Any, y: Any, sample_weight: Any) -> None:
    if y is not None or sample_weight is not None:
        raise ValueError(
            f"y and sample_weight are given with arrays only; a {type(x).__module__}.{type(x).__name__} gives batches "
            "(inputs, labels, weights) of its own"
        )


def _require_fit(x: DatasetInput, steps: int | None, class_weight: Any) -> None:
    """Raise ValueError where Keras would go on forever, or leave something out without a word."""
    if x.is_endless and steps is None:
        raise ValueError("the data set repeats forever; give steps_per_epoch, validation_steps or steps")
    if class_weight is not None:
        raise ValueError("class_weight is for arrays; give a data set of (inputs, labels, weights) in its place")


def _weights_of_classes(y: Any, sample_weight: Any, class_weight: Any) -> numpy.ndarray:
    """Return a weight for each row, by the class that its label is, or has the greatest value for."""
    if sample_weight is not None:
        raise ValueError("class_weight and sample_weight cannot be given together")
    if y is None or keras.tree.is_nested(y):
        raise ValueError("class_weight is for models with one output, and needs labels")
    classes = y.argmax(axis=-1) if y.ndim > 1 and y.shape[-1] > 1 else y.reshape(len(y))
    classes = numpy.round(classes)
    weights = numpy.ones(classes.shape, keras.config.floatx())
    for number, weight in class_weight.items():
        weights[classes == number] = weight
    return weights


def _for_each_output(y: Any, sample_weight: Any) -> Any:
    """Return the weights of rows for each output, where there are several and one array of weights."""
    if sample_weight is None or not keras.tree.is_nested(y) or keras.tree.is_nested(sample_weight):
        return sample_weight
    return keras.tree.map_structure(lambda _: sample_weight, y)
