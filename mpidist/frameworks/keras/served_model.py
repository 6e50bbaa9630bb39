"""`fit` of a Keras model whose variables are on servers: the chief hands batches to workers, which do not wait."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy

from mpidist.errors import OutOfRangeError
from mpidist.frameworks.keras import metrics
from mpidist.frameworks.keras.callbacks import flat_callbacks
from mpidist.frameworks.keras.classes import distribute, replica_of
from mpidist.frameworks.keras.given import adapter_of, split
from mpidist.frameworks.keras.inputs import PartAdapter
from mpidist.frameworks.keras.model import SAVING, link_optimizers
from mpidist.frameworks.keras.served_replica import ServedReplica, models_of
from mpidist.frameworks.keras.served_step import ServedTraining, StepResult, on_host, step, trainable_parts, training_of
from mpidist.input.from_function import InputContext
from mpidist.parameter_server.coordinator.coordinator import ClusterCoordinator

#: So many batches for each worker are handed out ahead: one is computed, and one waits at least.
_AHEAD = 8

#: The hooks of a callback for which logs are computed after each batch.
_OF_BATCHES = ("on_train_batch_end", "on_batch_end")


def serve_model(model: keras.Model, strategy: Any) -> None:
    """Let servers hold the variables of a model, also of one whose constructor has not run yet.  Local."""
    distribute(model, _METHODS, ServedReplica(strategy))
    models_of(strategy).append(model)
    link_optimizers(model)


def begin_served(models: Sequence[Any]) -> None:
    """Have servers hold the variables that models have, and give the models the chief's values.

    Collective: every rank that is no server calls it in the same order, with the same models.
    """
    for model in models:
        replica = replica_of(model)
        if model.built and not replica.is_evaluator:
            replica.adopt(model)
            replica.read(model)


# -- put over the methods of a model ----------------------------------------------------------------------------------


def _fit(
    self: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
) -> Any:
    arrays = x, y, sample_weight
    if validation_split and validation_data is None:
        arrays, validation_data = split(arrays, validation_split)
    training = _begun(self, arrays, batch_size, steps_per_epoch, shuffle, class_weight)
    sizes = {"batch_size": validation_batch_size or batch_size, "steps": validation_steps}
    validation = _validation(self, validation_data, validation_freq, sizes)
    listed = keras.callbacks.CallbackList(
        flat_callbacks(callbacks),
        add_history=True,
        add_progbar=verbose != 0,
        verbose=1 if verbose == "auto" else verbose,
        epochs=epochs,
        steps=training.steps,
        model=self,
    )
    self.stop_training = False
    listed.on_train_begin()
    training.begin()
    # Private: BackupAndRestore says here with which epoch training goes on
    first = initial_epoch if self._initial_epoch is None else self._initial_epoch
    logs: dict[str, Any] = {}
    for epoch in range(first, epochs):
        listed.on_epoch_begin(epoch)
        logs = training.epoch(listed)
        logs |= validation(epoch)
        listed.on_epoch_end(epoch, logs)
        if self.stop_training:
            break
    listed.on_train_end(logs)
    training.begin()  # what callbacks have set, such as the best weights
    return self.history


def _validation(model: Any, data: Any, often: Any, sizes: dict[str, Any]) -> Callable[[int], dict[str, Any]]:
    """Return what says, at the end of an epoch, the results of an evaluation, if one is due then."""
    x, y, sample_weight = (*data, None, None)[:3] if isinstance(data, (tuple, list)) else (data, None, None)

    def validation(epoch: int) -> dict[str, Any]:
        is_due = (epoch + 1) % often == 0 if isinstance(often, int) else epoch + 1 in often
        if data is None or not is_due:
            return {}
        found = model.evaluate(x, y, sample_weight=sample_weight, return_dict=True, verbose=0, **sizes)
        return {f"val_{name}": value for name, value in found.items()}

    return validation


def _train_on_batch(
    self: Any, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
) -> Any:
    rows = len(keras.tree.flatten(x)[0])
    training = _begun(self, (x, y, sample_weight), rows, None, False, class_weight)
    training.begin()
    logs = training.epoch()
    # Private: the order of metrics
    return logs if return_dict else self._flatten_metrics_in_order(logs)


def _begun(
    model: Any, arrays: tuple[Any, Any, Any], batch_size: int | None, steps: int | None, shuffle: Any, class_weight: Any
) -> _Training:
    """Return a training.  The first one is the end of the program on workers, which make gradients from there on.

    Collective before there is a coordinator: every rank that is no server calls it in the same order.

    Raises
    ------
    RuntimeError
        On the evaluator.
    ValueError
        A function that makes data sets, and no number of steps.
    """
    replica: ServedReplica = replica_of(model)
    if replica.is_evaluator:
        raise RuntimeError(
            f"{type(model).__name__} is trained on the evaluator, which takes no part in the training: give it a "
            'SidecarEvaluator where `strategy.cluster_resolver.task_type == "evaluator"`'
        )
    if not model.compiled:
        raise ValueError(f"{type(model).__name__} is not compiled: call compile(optimizer, loss) before it is trained")
    dataset_fn = arrays[0] if _makes_data(arrays[0]) else None
    if dataset_fn is None:
        adapter = adapter_of(replica, "fit", arrays, batch_size, steps, shuffle, class_weight)
        source: _Batches | None = _Batches(adapter, steps)
        look, steps = adapter.batches, steps or adapter.num_batches
    else:
        if steps is None:
            raise ValueError(
                "fit was given a function that makes a data set for each worker, which may have any length: say by "
                "steps_per_epoch how many batches all workers together make an epoch of"
            )
        source, look = None, lambda: iter(dataset_fn(InputContext(replica.workers)))
    # Private: builds model, metrics, losses and optimizer by the shapes of a batch, at which it looks only if need be
    model._symbolic_build(iterator=((0, 0, [replica.seen(on_host(next(each())))]) for each in [look]))
    replica.adopt(model)
    return _Training(model, source, dataset_fn, steps)


def _makes_data(x: Any) -> bool:
    """Return whether this is a function that makes a data set."""
    return callable(x) and not hasattr(x, "shape") and not isinstance(x, keras.utils.PyDataset)


# -- a training -------------------------------------------------------------------------------------------------------


class _Batches:
    """Batches epoch by epoch, as Keras counts them."""

    def __init__(self, adapter: PartAdapter, steps: int | None) -> None:
        self._adapter, self._steps = adapter, steps
        self._count = adapter.num_batches  # where it is not known, it is when they have come to their end
        self._under_way: Iterator[Any] | None = None
        self._taken = 0

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of an epoch, as arrays of NumPy: so many as were asked for, or all.

        Those of the next epoch come behind these, until there are no more; then they begin anew.
        """
        self._adapter.on_epoch_begin()
        if self._steps is None:
            self._under_way = None
        steps = itertools.count() if self._steps is None else range(self._steps)
        for _ in steps:
            if self._under_way is None:
                self._under_way, self._taken = self._adapter.batches(), 0
            batch = next(self._under_way, None) if self._taken != self._count else None
            if batch is None:
                self._count = self._taken
                break
            self._taken += 1
            yield on_host(batch)
        # Keras draws the order of the next epoch at once where it knows that this one is over, and anew as that begins
        if self._taken == self._count:
            self._under_way, self._taken = (self._adapter.batches() if self._adapter.num_batches else None), 0
        self._adapter.on_epoch_end()


class _Training:
    """The chief's part of a training: what it hands out, and what comes back.

    Parameters
    ----------
    model : keras.Model
    batches : _Batches or None
        None where each worker has a data set of its own.
    dataset_fn : callable or None
        That makes these.
    steps : int or None
        Of an epoch; None where nobody knows how many batches there are.
    """

    def __init__(
        self,
        model: Any,
        batches: _Batches | None,
        dataset_fn: Callable[[InputContext], Any] | None,
        steps: int | None,
    ) -> None:
        self.steps = steps
        self._model, self._batches = model, batches
        self._replica: ServedReplica = replica_of(model)
        strategy = self._replica.strategy
        self._replica.adopt_optimizer(model)
        if strategy._cluster_coordinator is None:
            for each in models_of(strategy):
                replica_of(each).workers_optimizer = getattr(each, "optimizer", None)
        self._coordinator = ClusterCoordinator(strategy)  # workers do not come further
        config = self._replica.compile_config(model)
        optimizer = self._replica.own_optimizer
        assert optimizer is not None
        variables = self._replica.shared(model)
        told = ServedTraining(
            models_of(strategy).index(model),
            optimizer,
            config,
            self._replica.example,
            tuple(self._replica.served[id(each)] for each in variables),
            trainable_parts(model),
            dataset_fn,
        )
        if not told.is_like(self._replica.told):
            make = functools.partial(training_of, told)
            self._replica.told = told
            self._replica.iterator = iter(self._coordinator.create_per_worker_dataset(make))
        self._iterator = self._replica.iterator
        self._ahead = _AHEAD * self._replica.workers

    def begin(self) -> None:
        """Give servers what was set here: weights, and the steps, slots and learning rate of the optimizer."""
        self._replica.write(self._model)
        self._replica.write_optimizer(self._model)

    def epoch(self, callbacks: keras.callbacks.CallbackList | None = None) -> dict[str, float]:
        """Have an epoch computed, and return its logs.  The model has the servers' values then.

        Raises
        ------
        Exception
            What a step has raised on a worker.
        """
        self.begin()  # a callback may have set the learning rate
        model, totals, done = self._model, _Totals(self._model), 0
        for done, result in enumerate(self._results(callbacks), 1):
            totals.add(result)
            if callbacks is not None:
                callbacks.on_train_batch_end(done - 1, totals.logs() if _reads_batches(callbacks) else {})
            if model.stop_training:
                break
        self._coordinator.join()  # for the batches that were handed out before a callback stopped the training
        if done < (self.steps or 1) and not model.stop_training:
            warnings.warn(
                f"the data ended after {done} of {self.steps or 'at least 1'} batches of an epoch: let them repeat, or "
                "ask for fewer steps_per_epoch",
                stacklevel=2,
            )
            model.stop_training = self._batches is None  # those of workers do not begin anew
        self._replica.strategy.extended.pull()
        self._replica.read(model)
        self._replica.read_optimizer(model)
        return totals.logs()

    def _results(self, callbacks: keras.callbacks.CallbackList | None) -> Iterator[StepResult]:
        """Yield what workers say of the batches of an epoch, in the order in which these were handed out."""
        waiting: deque[Any] = deque()
        batches = iter(range(self.steps or 0)) if self._batches is None else self._batches.epoch()
        try:
            for number, batch in enumerate(batches):
                if callbacks is not None:
                    callbacks.on_train_batch_begin(number)
                own = (self._iterator,) if self._batches is None else (self._iterator, batch)
                waiting.append(self._coordinator.schedule(step, args=own))
                if len(waiting) >= self._ahead:
                    yield waiting.popleft().fetch()
            while waiting:
                yield waiting.popleft().fetch()
        except OutOfRangeError:  # the epoch is shorter than was said
            self._drop_rest()
        except Exception:
            self._drop_rest()
            raise

    def _drop_rest(self) -> None:
        """Wait for the batches that workers have; the first error that was met is the one that counts."""
        with suppress(Exception):
            self._coordinator.join()


class _Totals:
    """The metrics of an epoch: what the batches have added to their variables, and what a step returned besides."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._variables = model.metrics_variables
        self._sums: list[numpy.ndarray] | None = None
        self._last: dict[str, float] = {}

    def add(self, result: StepResult) -> None:
        """Count a batch."""
        self._last = result.logs
        self._sums = result.metrics if self._sums is None else list(map(numpy.add, self._sums, result.metrics))

    def logs(self) -> dict[str, float]:
        """Return the results of metrics so far; of other numbers those of the last batch."""
        if self._sums is None:
            return {}
        for variable, value in zip(self._variables, self._sums, strict=True):
            variable.assign(value)
        found = {name: metrics.number(value) for name, value in self._model.get_metrics_result().items()}
        return {**{name: value for name, value in self._last.items() if name not in found}, **found}


def _reads_batches(callbacks: keras.callbacks.CallbackList) -> bool:
    """Return whether a callback looks at the logs of batches."""
    return any(
        getattr(type(each), hook) is not getattr(keras.callbacks.Callback, hook)
        for each in callbacks.callbacks
        for hook in _OF_BATCHES
    )


_METHODS = {**SAVING, "fit": _fit, "train_on_batch": _train_on_batch}
