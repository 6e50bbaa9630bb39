"""What a worker of a `ParameterServerStrategy` does for `fit` of a Keras model: the gradients of a batch at a time."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy

from mpidist.errors import OutOfRangeError
from mpidist.frameworks.keras import backends, metrics
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.classes import of_keras, replica_of
from mpidist.frameworks.keras.compile_config import CompileConfig
from mpidist.frameworks.keras.current_step import step_of
from mpidist.frameworks.keras.inputs import given_rows
from mpidist.frameworks.keras.random_numbers import is_seed, own_random_numbers, own_seed
from mpidist.frameworks.keras.served_replica import ServedReplica, models_of
from mpidist.frameworks.keras.shares import BatchShare
from mpidist.frameworks.keras.step_parts import StepPart
from mpidist.input.from_function import InputContext
from mpidist.optimizers import Optimizer
from mpidist.parameter_server.coordinator.values import on_worker
from mpidist.parameter_server.registry import strategy_here


class ServedTraining(NamedTuple):
    """What workers are told of a training."""

    number: int
    """Of the model, among those of the strategy."""
    optimizer: Optimizer
    served: tuple[Any, ...]
    """On servers, by variable of the model."""
    trainable: tuple[tuple[bool, ...], tuple[bool, ...]]
    """See `trainable_parts`."""
    compile_config: CompileConfig | None
    """Of a model that was compiled anew after workers had come to the coordinator."""
    dataset_fn: Callable[[InputContext], Any] | None
    """None where the chief hands out batches."""

    def is_like(self, other: ServedTraining | None, goes_on: bool) -> bool:
        """Whether workers that were told the other one need not be told anything: their data sets may go on.  Local."""
        return (
            other is not None
            and self.compile_config is None
            and (goes_on or self.dataset_fn is None and other.dataset_fn is None)
            and self.optimizer is other.optimizer
            and self.trainable == other.trainable
        )


class StepResult(NamedTuple):
    """What a worker says of a batch."""

    worker: str
    """Which worker, and which life of it."""
    batches: int
    """How many the worker has computed in this epoch."""
    metrics: list[numpy.ndarray]
    """What the variables of metrics hold of these."""
    logs: dict[str, Any]
    """What the step returned."""
    micro_step: int
    """Micro-batches that were added up since the last update."""
    part: StepPart | None
    """Of a step of several batches, until that is made."""


def training_of(training: ServedTraining) -> Iterator[_Worker]:
    """Return what a scheduled `step` gets from its iterator: the worker's part of a training, again and again."""
    return itertools.repeat(_Worker(training))


def step(iterator: Iterator[_Worker], epoch: int, batch: Any = None) -> StepResult:
    """Compute the gradients of a batch, by default of the worker's next one, and push them.  On a worker."""
    return next(iterator).step(epoch, batch)


class _Worker:
    """A worker's part of a training."""

    def __init__(self, training: ServedTraining) -> None:
        models = models_of(strategy_here())
        if training.number >= len(models):
            raise RuntimeError(
                f"the chief trains model {training.number} of those made in scopes of the strategy, and worker "
                f"{on_worker.index} has made {len(models)}: make every model above the first fit or train_on_batch, "
                "which is the last line of the program on workers, and on all ranks"
            )
        self._training = training
        self._model = models[training.number]
        self._replica: ServedReplica = replica_of(self._model)
        self._optimizer = training.optimizer
        self._name = uuid.uuid4().hex
        self._epoch: int | None = None
        self._batches_of_epoch = 0
        self._is_ready = False
        index, count = on_worker.index or 0, on_worker.count or 1
        self._batches = None if training.dataset_fn is None else iter(training.dataset_fn(InputContext(count, index)))

    def _begin(self, batch: Any) -> None:
        """Make the model the chief's, at the first batch, by which it is built."""
        told, model, replica = self._training, self._model, self._replica
        if told.compile_config is not None:
            told.compile_config.apply(model)
            replica.steps = None
        # Private, as on the chief
        model._symbolic_build(iterator=((0, 0, [each]) for each in [batch]))
        own = replica.shared(model)
        _require_alike(model, own, told.served)
        replica.served.update((id(each), served) for each, served in zip(own, told.served, strict=True))
        if trainable_parts(model) != told.trainable:
            replica.steps = None
            for parts, flags in zip((list(model._flatten_layers()), model.variables), told.trainable, strict=True):
                for part, is_trainable in zip(parts, flags, strict=True):
                    part.trainable = is_trainable
        for variable in model.variables:
            if on_worker.index and is_seed(variable):
                state = to_numpy(variable)
                variable.assign(own_seed(state, on_worker.index))
        self._is_ready = True

    def step(self, epoch: int, batch: Any) -> StepResult:
        """Compute the gradients of a batch, and push them.

        OutOfRangeError: the worker's data set has no more.
        """
        model, replica, optimizer = self._model, self._replica, self._optimizer
        data = self._next() if batch is None else batch
        if not self._is_ready:
            self._begin(data)
        replica.read(model)
        if not of_keras(model, "train_step"):  # the user's, which may look at them
            replica.read_steps(model, optimizer)
        if epoch != self._epoch:
            model.reset_metrics()
            metrics.require_zeros(model, replica.workers)
            self._epoch, self._batches_of_epoch = epoch, 0
        self._batches_of_epoch += 1
        with own_random_numbers(on_worker.index or 0):
            logs, part = self._together(data) if replica.batches_per_step else (self._alone(data), None)
        held = [numpy.array(to_numpy(each)) for each in model.metrics_variables]
        logs = {name: _on_host(value) for name, value in metrics.flat(logs).items()}
        return StepResult(self._name, self._batches_of_epoch, held, logs, optimizer.micro_step, part)

    def _alone(self, data: Any) -> dict[str, Any]:
        """Make a step of a batch, which servers apply as it comes; return its logs."""
        model, replica = self._model, self._replica
        with step_of(replica):
            logs, gradients = backends.seam().gradients_of_step(model, replica, data)
        self._push(gradients)
        variables = replica.shared(model)
        for place, change in replica.changes(model).items():
            replica.add(variables[place], change)
        return logs

    def _together(self, data: Any) -> tuple[dict[str, Any], StepPart]:
        """Return the logs of a batch, and its part of a step."""
        model, replica, rows = self._model, self._replica, given_rows(data)
        with replica.step(BatchShare.of(rows, 0, 1)):
            logs, gradients = backends.seam().gradients_of_step(model, replica, data)
        return logs, StepPart(rows, gradients, replica.changes(model))

    def _push(self, gradients: Sequence[Any]) -> None:
        variables = [self._replica.served[id(each)] for each in self._model.trainable_variables]
        pairs = [(each, variable) for each, variable in zip(gradients, variables, strict=True) if each is not None]
        self._optimizer.apply_gradients(pairs)

    def _next(self) -> Any:
        assert self._batches is not None
        batch = next(self._batches, None)
        if batch is None:
            raise OutOfRangeError(
                f"the data set of worker {on_worker.index} has no more batches: let it repeat, or ask for fewer "
                "steps_per_epoch"
            )
        return on_host(batch)


def _require_alike(model: Any, own: Sequence[Any], served: Sequence[Any]) -> None:
    """Raise RuntimeError where the chief has made another model at this place."""
    here, there = [tuple(each.shape) for each in own], [tuple(each.shape) for each in served]
    if here != there:
        raise RuntimeError(
            f"{type(model).__name__} {model.name!r} has variables of the shapes {here} on worker {on_worker.index}, "
            f"and {there} on the chief: make the same models in the same order on all ranks"
        )


def on_host(batch: Any) -> Any:
    """Return the nested tensors of a batch as arrays of NumPy.  Local."""
    return keras.tree.map_structure(lambda leaf: None if leaf is None else to_numpy(leaf), batch)


def trainable_parts(model: keras.Model) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Return which layers of a model, itself first, and which of its variables are trained.  Local."""
    # Private: layers in layers, too, those that contain others first
    layers = tuple([bool(each.trainable) for each in model._flatten_layers()])
    return layers, tuple([each.trainable for each in model.variables])


def _on_host(value: Any) -> Any:
    found = metrics.number(value)
    return numpy.array(to_numpy(found)) if keras.ops.is_tensor(found) else found
