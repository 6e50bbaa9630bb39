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
from mpidist.frameworks.keras import backends, checks, metrics, step_parts
from mpidist.frameworks.keras.callbacks import flat_callbacks
from mpidist.frameworks.keras.classes import distribute, is_of_keras, of_keras, replica_of
from mpidist.frameworks.keras.given import adapter_of, split, three
from mpidist.frameworks.keras.inputs import PartAdapter
from mpidist.frameworks.keras.model import SAVING, compute_loss, link_optimizers
from mpidist.frameworks.keras.served_replica import ServedReplica, models_of
from mpidist.frameworks.keras.served_step import (
    ServedTraining,
    StepResult,
    on_host,
    step,
    trainable_parts,
    training_of,
)
from mpidist.input.from_function import InputContext
from mpidist.parameter_server.coordinator.coordinator import ClusterCoordinator

#: So many batches for each worker are handed out ahead: one is computed, and one waits at least.
_AHEAD = 8

#: The hooks of a callback before and after each batch; for the latter logs are computed.
_BEGINNINGS = ("on_train_batch_begin", "on_batch_begin")
_ENDS = ("on_train_batch_end", "on_batch_end")


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
    epochs = min(epochs, keras.config.max_epochs() or epochs)
    if validation_split and validation_data is None:
        arrays, validation_data = split(arrays, validation_split)
    training = _begun(self, arrays, batch_size, steps_per_epoch, shuffle, class_weight)
    sizes = {"batch_size": validation_batch_size or batch_size, "steps": validation_steps}
    listed = keras.callbacks.CallbackList(
        flat_callbacks(callbacks),
        add_history=True,
        add_progbar=verbose != 0,
        verbose=1 if verbose == "auto" else verbose,
        epochs=epochs,
        steps=training.steps,
        model=self,
    )
    validation = _validation(self, validation_data, validation_freq, sizes, listed)
    self.stop_training = False
    listed.on_train_begin()
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
    self._eval_epoch_iterator = None
    listed.on_train_end(logs)
    training.write()  # what callbacks have set, such as the best weights
    return self.history


def _validation(
    model: Any, data: Any, often: Any, sizes: dict[str, Any], callbacks: keras.callbacks.CallbackList
) -> Callable[[int], dict[str, Any]]:
    """Return what says, at the end of an epoch, the results of an evaluation, if one is due then."""
    x, y, sample_weight = three(data)
    # Private: `evaluate` goes through the same data again and again by it
    model._eval_epoch_iterator = None

    def validation(epoch: int) -> dict[str, Any]:
        is_due = (epoch + 1) % often == 0 if isinstance(often, int) else epoch + 1 in often
        if data is None or not is_due:
            return {}
        if model._eval_epoch_iterator is None:
            model._eval_epoch_iterator = backends.seam().EpochIterator(
                x=x,
                y=y,
                sample_weight=sample_weight,
                batch_size=sizes["batch_size"],
                steps_per_epoch=sizes["steps"],
                steps_per_execution=model.steps_per_execution,
                shuffle=False,
            )
        given = {**sizes, "callbacks": callbacks, "return_dict": True, "_use_cached_eval_dataset": True}
        found = model.evaluate(x, y, sample_weight=sample_weight, **given)
        return {f"val_{name}": value for name, value in found.items()}

    return validation


def _train_on_batch(
    self: Any, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
) -> Any:
    rows = len(keras.tree.flatten(x)[0])
    training = _begun(self, (x, y, sample_weight), rows, None, False, class_weight)
    logs = training.epoch()
    # Private: the order of metrics
    return logs if return_dict else self._flatten_metrics_in_order(logs)


def _begun(
    model: Any, arrays: tuple[Any, Any, Any], batch_size: int | None, steps: int | None, shuffle: Any, class_weight: Any
) -> _Training:
    """Return a training.  The first one is the end of the program on workers, which make gradients from there on.

    Collective before there is a coordinator: every rank that is no server calls it in the same order.

    RuntimeError: on the evaluator.  ValueError: a function that makes data sets, and no number of steps; or the model
    is not compiled.  NotImplementedError: its class has methods in the place of those that are put over Keras', or
    variables that have no gradients; or the strategy restores servers.
    """
    replica: ServedReplica = replica_of(model)
    if replica.is_evaluator:
        raise RuntimeError(
            f"{type(model).__name__} is trained on the evaluator, which takes no part in the training: give it a "
            'SidecarEvaluator where `strategy.cluster_resolver.task_type == "evaluator"`'
        )
    if own := [name for name in ("fit", "train_on_batch", "make_train_function") if not of_keras(model, name)]:
        raise NotImplementedError(
            f"{type(model).__name__} has a {own[0]} of its own, in whose place servers train the model: put what it "
            "does into train_step, or into a function that calls fit"
        )
    if replica.strategy._on_server_failure == "restore":
        raise NotImplementedError(
            'on_server_failure="restore" needs checkpoints of what servers hold, and those of a Keras model are in '
            "files of Keras: leave it out, save by BackupAndRestore, and start the job again when a server has died"
        )
    if not model.compiled:
        raise ValueError(f"{type(model).__name__} is not compiled: call compile(optimizer, loss) before it is trained")
    x = arrays[0]
    dataset_fn = x if callable(x) and not (hasattr(x, "shape") or isinstance(x, keras.utils.PyDataset)) else None
    if dataset_fn is None:
        adapter = adapter_of(replica, "fit", arrays, batch_size, steps, shuffle, class_weight)
        batches = _Batches(adapter, steps)
        source: _Batches | None = batches
        look, steps = batches.first, steps or adapter.num_batches
    else:
        if steps is None:
            raise ValueError(
                "fit was given a function that makes a data set for each worker, which may have any length: say by "
                "steps_per_epoch how many batches all workers together make an epoch of"
            )
        source, look = None, lambda: iter(dataset_fn(InputContext(replica.workers)))
    # Private: builds model, metrics, losses and optimizer by the shapes of a batch, at which it looks only if need be
    model._symbolic_build(iterator=((0, 0, [on_host(next(each()))]) for each in [look]))
    if source is not None:
        source.reset()
    checks.require_gradients(model)
    checks.require_no_constraints(model)
    if replica.batches_per_step:
        step_parts.require_parts(model, dataset_fn is not None)
    replica.adopt(model)
    return _Training(model, source, dataset_fn, steps)


# -- a training -------------------------------------------------------------------------------------------------------


class _Batches:
    """Batches epoch by epoch, as Keras counts them."""

    def __init__(self, adapter: PartAdapter, steps: int | None) -> None:
        self._adapter, self._steps = adapter, steps
        self._count = adapter.num_batches  # where it is not known, it is when they have come to their end
        self._under_way: Iterator[Any] | None = None
        self._taken = 0

    def first(self) -> Iterator[Any]:
        """Return batches to look at the first one, as Keras does."""
        self._adapter.on_epoch_begin()
        return self._adapter.batches()

    def reset(self) -> None:
        """Begin anew: Keras says so, whether it has looked or not."""
        self._adapter.on_epoch_end()

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

    `batches`: None where each worker has a data set of its own.  `dataset_fn`: that makes these.  `steps`: of an epoch;
    None where nobody knows how many batches there are.
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
        self._dataset_fn = dataset_fn
        strategy = self._replica.strategy
        self._replica.adopt_optimizer(model)
        if strategy._cluster_coordinator is None:
            for each in models_of(strategy):
                replica_of(each).workers_compilations = replica_of(each).compilations
        self._coordinator = ClusterCoordinator(strategy)  # workers do not come further
        self._is_told = False
        self._micro_step = 0

    def _begin(self) -> None:
        """Tell workers and servers what they do not know of the model, its optimizer, and which layers are trained."""
        model, replica = self._model, self._replica
        replica.adopt_optimizer(model)
        self.write()
        optimizer = replica.own_optimizer
        assert optimizer is not None
        served = tuple(replica.served[id(each)] for each in replica.shared(model))
        number = models_of(replica.strategy).index(model)
        parts, config = trainable_parts(model), replica.compile_config(model)
        told = ServedTraining(number, optimizer, served, parts, config, self._dataset_fn)
        if not told.is_like(replica.told, self._is_told):
            make = functools.partial(training_of, told)
            replica.told = told
            replica.iterator = iter(self._coordinator.create_per_worker_dataset(make))
        self._is_told = True
        replica.epochs += 1

    def write(self) -> None:
        """Give servers what was set here: weights, and the steps, slots and learning rate of the optimizer."""
        self._replica.write(self._model)
        self._replica.write_optimizer(self._model)

    def _read(self) -> None:
        """Take over what the servers have."""
        self._replica.strategy.extended.pull()
        self._replica.read(self._model)
        self._replica.read_optimizer(self._model, self._micro_step)

    def epoch(self, callbacks: keras.callbacks.CallbackList | None = None) -> dict[str, Any]:
        """Have an epoch computed, and return its logs.  The model has the servers' values then, also after an error.

        Exception: what a step has raised on a worker, or a callback here.
        """
        self._begin()
        totals = _Totals(self._model, self._replica.workers)
        try:
            done = self._go_through(callbacks, totals)
            self._coordinator.join()  # for the batches that were handed out before a callback stopped the training
        except BaseException:
            with suppress(Exception):  # the first error that was met is the one that counts
                self._coordinator.join()
            with suppress(Exception):
                self._read()
            raise
        if done < (self.steps or 1) and not self._model.stop_training:
            warnings.warn(
                f"the data ended after {done} of {self.steps or 'at least 1'} batches of an epoch: let them repeat, or "
                "ask for fewer steps_per_epoch",
                stacklevel=4,
            )
            self._model.stop_training = self._batches is None  # those of workers do not begin anew
        self._read()
        return totals.logs(are_kept=True)

    def _go_through(self, callbacks: keras.callbacks.CallbackList | None, totals: _Totals) -> int:
        """Have the batches of an epoch computed, and return of how many workers have said something."""
        several = [] if callbacks is None else callbacks.callbacks
        done, is_watched = 0, any(map(_is_watching, several))
        are_logs_read = any(_has(each, hook) for each in several for hook in _ENDS)
        is_in_turn = self._replica.workers == 1 or self._replica.batches_per_step
        try:
            for done, result in enumerate(self._results(callbacks, is_watched), 1):
                totals.add(result)
                self._micro_step = result.micro_step if is_in_turn else 0
                if callbacks is not None:
                    if is_watched:
                        self._read()
                    callbacks.on_train_batch_end(done - 1, totals.logs() if are_logs_read else {})
                    if is_watched:
                        self.write()
                if self._model.stop_training:
                    break
        except OutOfRangeError:  # the epoch is shorter than was said
            self._join_ends()
        return done

    def _join_ends(self) -> None:
        """Wait for the batches that workers have, whose data may come to their ends too; another error is one."""
        is_over = False
        while not is_over:
            with suppress(OutOfRangeError):
                self._coordinator.join()
                is_over = True

    def _results(self, callbacks: keras.callbacks.CallbackList | None, is_watched: bool) -> Iterator[StepResult]:
        """Yield what workers say of the batches of an epoch, in the order in which these were handed out.

        A batch begins, for callbacks, when the one before it has ended; where workers wait for that, before it is
        computed.
        """

        def begin() -> None:
            if callbacks is not None:
                callbacks.on_train_batch_begin(next(numbers))
                if is_watched:
                    self.write()

        batches, numbers, workers = self._given(), itertools.count(), self._replica.workers
        # who watches a single worker sees what one process shows
        at_once = self._replica.batches_per_step or (1 if is_watched and workers == 1 else 0)
        while several := list(itertools.islice(batches, at_once)):
            begin()
            for number, result in enumerate(self._made_of(several)):
                if number:
                    begin()
                yield result
        waiting: deque[Any] = deque()
        for args in batches:
            waiting.append(self._coordinator.schedule(step, args=args))
            if len(waiting) >= _AHEAD * workers:
                begin()
                yield waiting.popleft().fetch()
        while waiting:
            begin()
            yield waiting.popleft().fetch()

    def _given(self) -> Iterator[tuple[Any, ...]]:
        """Yield what a worker is given of each batch of an epoch."""
        replica = self._replica
        batches = itertools.repeat((), self.steps or 0) if self._batches is None else zip(self._batches.epoch())
        return ((replica.iterator, replica.epochs, *batch) for batch in batches)

    def _made_of(self, several: Sequence[tuple[Any, ...]]) -> list[StepResult]:
        """Have batches computed that see the same variables, and return what workers say of each."""
        results = [each.fetch() for each in [self._coordinator.schedule(step, args=args) for args in several]]
        if not self._replica.batches_per_step:
            return results
        own = self._replica.own_optimizer
        assert own is not None
        step_parts.update(self._model, self._replica, [result.part for result in results])
        return [result._replace(micro_step=own.micro_step, part=None) for result in results]  # its gradients are many


class _Totals:
    """The logs of an epoch, from what workers have said last of their batches."""

    def __init__(self, model: Any, workers: int) -> None:
        self._model, self._workers = model, workers
        self._variables = model.metrics_variables
        self._said: dict[str, StepResult] = {}
        self._last: StepResult | None = None

    def add(self, result: StepResult) -> None:
        """Count a batch."""
        self._last = result
        said = self._said.get(result.worker)
        if said is None or said.batches < result.batches:  # a batch of a worker that died runs later than it was given
            self._said[result.worker] = result

    def logs(self, are_kept: bool = False) -> dict[str, Any]:
        """Return the results of metrics so far, as Keras gives them; of other numbers what the last batch gave.

        `are_kept`: whether the model's metrics are to have these results.
        """
        if self._last is None:
            return {}
        model, last = self._model, self._last
        totals = self._of_all_workers()
        results = metrics.with_values(self._variables, totals, model.get_metrics_result)
        if are_kept:
            for variable, value in zip(self._variables, totals, strict=True):
                variable.assign(value)
        if results.keys() == last.logs.keys():
            return results
        if self._workers == 1:
            return dict(last.logs)
        own = metrics.with_values(self._variables, last.metrics, model.get_metrics_result)
        of_metrics = {name for name, value in last.logs.items() if metrics.is_close(value, own.get(name))}
        return {name: results[name] if name in of_metrics else value for name, value in last.logs.items()}

    def _of_all_workers(self) -> list[numpy.ndarray]:
        """Return what the variables of metrics have over all workers: sums, or what a variable says."""
        every = [result.metrics for result in self._said.values()]
        if len(every) == 1:
            return every[0]
        rules = [metrics.rule_of(variable) for variable in self._variables]
        return [_together(rule, values) for rule, values in zip(rules, zip(*every, strict=True), strict=True)]


def _together(rule: str, values: Sequence[numpy.ndarray]) -> numpy.ndarray:
    if rule == "only_first_replica":
        return values[0]
    total = numpy.sum(values, axis=0, dtype="float64")
    return (total / len(values) if rule == "mean" else total).astype(values[0].dtype)


def _is_watching(callback: Any) -> bool:
    """Return whether a callback may read or write the model between two batches: the user's, or one that saves."""
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)):
        return bool(getattr(callback, "save_freq", None) != "epoch")
    is_own = not is_of_keras(type(callback)) or isinstance(callback, keras.callbacks.LambdaCallback)
    return is_own and any(_has(callback, hook) for hook in (*_BEGINNINGS, *_ENDS))


def _has(callback: Any, hook: str) -> bool:
    """Return whether a callback has a hook, by its class or by itself."""
    method = getattr(callback, hook)
    return getattr(method, "__func__", method) is not getattr(keras.callbacks.Callback, hook)


_METHODS = {**SAVING, "compute_loss": compute_loss, "fit": _fit, "train_on_batch": _train_on_batch}
