"""What a worker of a `ParameterServerStrategy` does for `fit` of a Keras model: the gradients of a batch at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy

from mpidist.errors import OutOfRangeError
from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.classes import replica_of
from mpidist.frameworks.keras.current_step import step_of
from mpidist.frameworks.keras.served_replica import ServedReplica, models_of
from mpidist.frameworks.keras.variables import is_seed, own_seed
from mpidist.input.from_function import InputContext
from mpidist.optimizers import Optimizer
from mpidist.parameter_server.coordinator.values import on_worker
from mpidist.parameter_server.registry import strategy_here


class ServedTraining(NamedTuple):
    """What workers are told of a `fit`."""

    number: int
    """Of the model, among those of the strategy."""
    optimizer: Optimizer
    compile_config: dict[str, Any] | None
    """Of a model that was compiled anew after workers had come to the coordinator."""
    example: Any
    """A row of a batch, for a model that workers have not built; None for others."""
    served: tuple[Any, ...]
    """On servers, by variable of the model."""
    trainable: tuple[tuple[bool, ...], tuple[bool, ...]]
    """See `trainable_parts`."""
    dataset_fn: Callable[[InputContext], Any] | None
    """None where the chief hands out batches."""

    def is_like(self, other: ServedTraining | None) -> bool:
        """Whether workers that were told the other one need not be told anything.  Local."""
        return (
            other is not None
            and self.compile_config is None
            and self.dataset_fn is None
            and other.dataset_fn is None
            and self.optimizer is other.optimizer
            and self.trainable == other.trainable
        )


class StepResult(NamedTuple):
    """What a worker says of a batch."""

    metrics: list[numpy.ndarray]
    """What the variables of metrics hold of this batch alone."""
    logs: dict[str, float]
    """What the step returned."""


def training_of(training: ServedTraining) -> Iterator[_Worker]:
    """Return what a scheduled `step` gets from its iterator: the worker's part of a training, again and again."""
    return itertools.repeat(_Worker(training))


def step(iterator: Iterator[_Worker], batch: Any = None) -> StepResult:
    """Compute the gradients of a batch, by default of the worker's next one, and push them.  On a worker."""
    return next(iterator).step(batch)


class _Worker:
    """A worker's part of a training."""

    def __init__(self, training: ServedTraining) -> None:
        strategy = strategy_here()
        self._model = models_of(strategy)[training.number]
        self._replica: ServedReplica = replica_of(self._model)
        self._optimizer = training.optimizer
        if training.compile_config is not None:
            self._model.compile_from_config(training.compile_config)
            self._replica.steps = None
        # Private, as on the chief
        self._model._symbolic_build(iterator=((0, 0, [each]) for each in [training.example]))
        own = self._replica.shared(self._model)
        self._replica.served.update((id(each), served) for each, served in zip(own, training.served, strict=True))
        if trainable_parts(self._model) != training.trainable:
            self._replica.steps = None
            for parts, flags in zip((_layers(self._model), self._model.variables), training.trainable, strict=True):
                for part, is_trainable in zip(parts, flags, strict=True):
                    part.trainable = is_trainable
        index, count = on_worker.index or 0, on_worker.count or 1
        for variable in self._model.variables:
            if index and is_seed(variable):
                variable.assign(own_seed(numpy.asarray(keras.ops.convert_to_numpy(variable)), index))
        self._batches = None if training.dataset_fn is None else iter(training.dataset_fn(InputContext(count, index)))

    def step(self, batch: Any) -> StepResult:
        """Compute the gradients of a batch, and push them.

        Raises
        ------
        OutOfRangeError
            The worker's data set has no more.
        """
        model, replica = self._model, self._replica
        data = self._next() if batch is None else batch
        replica.read(model)
        model.reset_metrics()
        with step_of(replica):
            logs, gradients = backends.seam().gradients_of_step(model, replica, data)
        variables = [replica.served[id(each)] for each in model.trainable_variables]
        pairs = [(each, variable) for each, variable in zip(gradients, variables, strict=True) if each is not None]
        self._optimizer.apply_gradients(pairs)
        replica.write_changes(model)
        metrics = [numpy.array(keras.ops.convert_to_numpy(each)) for each in model.metrics_variables]
        return StepResult(metrics, {name: _number(value) for name, value in logs.items()})

    def _next(self) -> Any:
        assert self._batches is not None
        batch = next(self._batches, None)
        if batch is None:
            raise OutOfRangeError(
                f"the data set of worker {on_worker.index} has no more batches: let it repeat, or ask for fewer "
                "steps_per_epoch"
            )
        return on_host(batch)


def on_host(batch: Any) -> Any:
    """Return the nested tensors of a batch as arrays of NumPy.  Local."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else keras.ops.convert_to_numpy(leaf), batch)


def trainable_parts(model: keras.Model) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return which layers of a model, itself first, and which of its variables are trained.  Local."""
    return tuple([bool(each.trainable) for each in _layers(model)]), tuple([each.trainable for each in model.variables])


def _layers(model: keras.Model) -> list[Any]:
    # Private: layers in layers, too, those that contain others first
    return list(model._flatten_layers())


def _number(value: Any) -> float:
    array = keras.ops.convert_to_numpy(value) if not isinstance(value, dict) else None
    return float(array) if array is not None and array.ndim == 0 else math.nan
