"""`Trainer`: `fit`, `evaluate` and `predict` with Keras' meaning, for a function that returns loss and gradients.

Every rank runs the same loop.  In a step the ranks talk once: one call reduces gradients, loss and votes for an end.
Where gradients are long, loss and votes go ahead in a short call.  Metrics are added up over the ranks at the end of an
epoch or of an evaluation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy

from mpidist import context
from mpidist.collectives.mismatch import fact
from mpidist.input.agreement import Facts
from mpidist.input.distributed import DistributedDataset
from mpidist.input.sharding import Share
from mpidist.optimizers import Optimizer
from mpidist.optimizers.updates.variable_list import require_once
from mpidist.training import batches as feeding
from mpidist.training import predictions
from mpidist.training.batches import Batches
from mpidist.training.callbacks.base import Callback, CallbackList, History, Logs
from mpidist.training.callbacks.of_keras import as_callback
from mpidist.training.callbacks.progress_bar import ProgressBar
from mpidist.training.metrics import Mean, Metric
from mpidist.training.metrics import get as get_metric
from mpidist.training.metrics.base import over_replicas
from mpidist.training.model import Model, arguments
from mpidist.training.own_time import SlowReplica
from mpidist.training.train_step import TrainStep, any_rank, count, rows_of
from mpidist.training.training_state import TrainingPosition, TrainingState
from mpidist.transports import WorldKept, in_kept_world, innermost

#: The end of every message about settings that differ: with them the ranks' copies of the variables would drift apart
#: without a word.
_ADVICE = (
    "Every rank must make the same trainer and give `fit` the same arguments; a callback that changes the optimizer "
    "must do so on every rank (`trainer.from_chief(value)` is the chief's number on all of them)"
)

#: Where the settings of an optimizer are known: a user's class may have numbers of its own.
_OURS = Optimizer.__module__.partition(".")[0] + "."


class Trainer:
    """Trains variables by a function that returns loss and gradients, on all replicas of the variables' strategy.

    N ranks do what one rank does on the global batch.  Everything is weighted by rows, so batches may be uneven.  A
    replica may have no rows at all; the functions are not called there.

    Local: making one sends nothing.

    Parameters
    ----------
    value_and_grad_fn : callable
        ``fn(parameters, x, y)`` returns ``(loss, gradients)``: the mean loss over the rows given, and its gradient.
        It may return ``((loss, predictions), gradients)``, from which metrics are computed then.  A batch that is a
        tuple is passed as several arguments, any other as one.  From any library: by hand, autograd, JAX, PyTorch.
    variables : variable, or nested lists, tuples and dicts of variables
        Of one strategy.  ``parameters`` has this structure, with each variable's `value` in its place, and so has
        ``gradients``.  Gradients of variables that are not trainable are ignored.  Where PyTorch is imported, the
        parameters are copies, and writing to one is an error.
    optimizer : Optimizer
    metrics : sequence of Metric, str or callable
        Updated with labels and predictions: the second and first member of a batch that is a tuple ``(x, y)``.  See
        `mpidist.metrics.get`.
    predict_fn : callable, optional
        ``fn(parameters, x)`` returns the predictions, one for each row.
    loss_fn : callable, optional
        ``fn(parameters, x, y)`` returns the mean loss, or ``(loss, predictions)``.  `evaluate` calls it, which wants
        neither gradients nor dropout.  By default `evaluate` takes the loss of `value_and_grad_fn`.

    Attributes
    ----------
    strategy : Strategy
    variables : list of Variable
    optimizer : Optimizer
    metrics : list of Metric
    history : History
        Of the last `fit`.
    stop_training : bool
        See `fit`.
    last_loss : float
        Of this rank's rows in the last step, 0 if there were none.
    rows_trained : int
        Rows that this rank has trained on.
    slow_replica : SlowReplica or None
        The slow one of the last epoch: its `times` are those of the others' median, on the host, without reductions.
        None below 1.1 times.

    Raises
    ------
    TypeError
        Something is not what it should be.
    ValueError
        The variables are not all of one strategy, or not of the strategy in whose scope the trainer is made.
    """

    def __init__(
        self,
        value_and_grad_fn: Callable[..., Any],
        variables: Any,
        optimizer: Optimizer,
        metrics: Iterable[Metric | str | Callable[..., Any]] = (),
        predict_fn: Callable[..., Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be a mpidist.optimizers.Optimizer, got {type(optimizer).__name__}")
        metrics_here = [get_metric(metric) for metric in metrics]
        self._model = Model(value_and_grad_fn, variables, predict_fn, loss_fn, needs_predictions=bool(metrics_here))
        self.strategy = _require_scope(self._model.strategy)
        self.kept_world = WorldKept(innermost())
        self.variables = self._model.variables
        self.optimizer = optimizer
        self.metrics = [_of_strategy(metric, self.strategy) for metric in metrics_here]
        _require_names(self.metrics)
        self._loss = _of_strategy(Mean("loss"), self.strategy)
        self._step = TrainStep(self._model, optimizer)
        self._position = TrainingPosition()
        self._callbacks: Sequence[Callback] = ()
        self._data: Any = None
        self._is_training = self._stop_now = self.stop_training = False
        self.last_loss, self.rows_trained = 0.0, 0
        self.slow_replica: SlowReplica | None = None
        self.history = History()

    # -- for users -----------------------------------------------------------------------------------------------------

    @in_kept_world
    def fit(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Sequence[Callback] = (),
        validation_data: Any = None,
        shuffle: bool = True,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
        seed: int = 0,
    ) -> History:
        """Train for some epochs.

        Collective: every rank calls it in the same order, with the same data: all rows, on every rank.

        A callback ends the training by ``trainer.stop_training = True``, on one rank or all.  This is a vote, which
        goes along with the next step; after that step all ranks end together.  At the end of an epoch votes are counted
        at once.

        Parameters
        ----------
        x : arrays, Dataset, distributed data set, or iterable of global batches
            Arrays may be nested in tuples and dicts; with `y` they are the inputs, without it the whole batch.  A list
            of numbers, or of lists of them, is one array.  So is a list of arrays with `y`; without `y` its arrays are
            batches.
        y : array, optional
            Labels; only with arrays.
        batch_size : int, optional
            Rows of a global batch, over all replicas; only with arrays.  32 by default.
        epochs : int
            Number of the epoch to train to.
        verbose : int or str
            See `mpidist.callbacks.ProgressBar`; without effect if one is among the callbacks.
        callbacks : sequence of Callback
            Or callbacks of Keras that need no model of Keras.
        validation_data : tuple of arrays, Dataset, or iterable of global batches, optional
            Evaluated after every epoch; its logs begin with ``val_``.
        shuffle : bool
            Whether arrays are shuffled, in another order every epoch, the same on any number of ranks.
        sample_weight : array, optional
            A third member of every batch; only with arrays.
        initial_epoch : int
            The epoch to begin with, from 0.
        steps_per_epoch : int, optional
            An epoch has so many batches; needed for data that repeat forever.
        validation_steps, validation_batch_size, validation_freq : int, optional
            Batches of a validation; rows of such a batch, where validation data are arrays; epochs from one validation
            to the next.
        seed : int
            Of the shuffle.

        Returns
        -------
        History
            Loss and metrics of every epoch, over all rows of all ranks; the same on every rank.

        Raises
        ------
        TypeError, ValueError
            A function returned something else than it should; names the rank.  Or `x` is a list of arrays of one
            dimension and one length without `y`: they may be rows or batches.  Or validation data have no end.
        RuntimeError
            A callback has restored a checkpoint of another step elsewhere than in `on_epoch_end`.
        CollectiveMismatchError
            On all ranks: their data, functions, metrics or optimizers differ, such as in the learning rate.
        """
        if not isinstance(validation_freq, (int, numpy.integer)) or validation_freq < 1:
            raise ValueError(f"validation_freq must be a whole number of epochs, 1 or more, got {validation_freq}")
        # only here: a variable with two names, as of tied weights, is evaluated and predicts like any other
        require_once(
            self._model.trainable, "comes twice among the variables to train, and has one gradient; list it once"
        )
        seeds = seed if shuffle else None
        self._data = feeding.distributed(self.strategy, x, y, sample_weight, batch_size, seeds)
        if self._data is not x:  # one that was given has a position of its own
            _begin_with_epoch(self._data, initial_epoch, steps_per_epoch)
        data = Batches(self._data, steps_per_epoch)
        validation = self._validation(validation_data, validation_batch_size, batch_size, validation_steps)
        self.history = History()
        self._callbacks = _with_bar([*callbacks, self.history], verbose)
        params = {"epochs": epochs, "steps": data.steps, "validates": validation is not None}
        called = CallbackList(self._callbacks, self, params)
        self._position.begin_epoch(initial_epoch)
        self._position.batch_size = getattr(self._data, "global_batch_size", None) or 0
        self.stop_training = self._stop_now = False
        self.strategy.run(self._model.read_variables)
        self._is_training = True
        try:
            self._fit(data, epochs, called, validation, validation_freq)
        finally:
            self._is_training = False
        return self.history

    @in_kept_world
    def evaluate(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[Callback] = (),
        return_dict: bool = False,
    ) -> Any:
        """Return the mean loss and the metrics over all rows.

        Collective: every rank calls it in the same order, with the same data.  The ranks talk at the end only.

        Parameters
        ----------
        x, y, batch_size, sample_weight
            As for `fit`.
        verbose : int or str
            See `mpidist.callbacks.ProgressBar`; without effect if one is among the callbacks.
        steps : int, optional
            Evaluate only so many batches.
        callbacks : sequence of Callback
        return_dict : bool

        Returns
        -------
        float, list of float, or dict
            The loss; ``[loss, *metrics]`` if there are metrics; or a dict, if asked for.

        Raises
        ------
        ValueError
            On all ranks: the data have no rows, of which no loss could be told, or no end, and there are no `steps`;
            or, as for `fit`, they may be rows or batches.
        """
        data = feeding.distributed(self.strategy, x, y, sample_weight, batch_size)
        logs = self._evaluate(*self._one_walk(data, steps, callbacks, verbose))
        if return_dict:
            return logs
        return list(logs.values()) if self.metrics else logs["loss"]

    @in_kept_world
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> Any:
        """Return the predictions for all rows, in input order, on every rank.

        Collective: every rank calls it in the same order, with the same data.  The ranks talk at the end only.

        Parameters
        ----------
        x : as for `fit`
            Of batches that are tuples, the first member is taken.  A list of arrays is one array.
        batch_size : int, optional
            Rows of a global batch; only with arrays.  32 by default.
        verbose : int or str
            See `mpidist.callbacks.ProgressBar`; without effect if one is among the callbacks.
        steps : int, optional
            Predict only so many batches.
        callbacks : sequence of Callback

        Returns
        -------
        numpy.ndarray, or nested tuples and dicts of them
            What `predict_fn` returns, for all rows: as many as the data have.

        Raises
        ------
        ValueError
            There is no `predict_fn`, there are no rows, or no end of them, or it did not return one prediction for
            each row.
        """
        inputs = (x,) if isinstance(x, list) and feeding.are_arrays((x,)) else x
        data = feeding.distributed(self.strategy, inputs, batch_size=batch_size)
        batches, called = self._one_walk(data, steps, callbacks, verbose)
        parts, rows = [], []
        called.call("on_predict_begin", {})
        for number, batch in enumerate(batches.epoch()):
            called.call("on_predict_batch_begin", number, {})
            rows.append(rows_of(batch))
            if rows[-1]:
                parts.append(self.strategy.run(self._model.predict, (arguments(batch)[0],)))
            called.call("on_predict_batch_end", number, {})
        found = predictions.gathered(self.strategy, parts, rows)
        called.call("on_predict_end", {})
        return found

    # -- for callbacks ------------------------------------------------------------------------------------------------

    @property
    def is_chief(self) -> bool:
        """Whether this rank is the one that writes files and shows progress."""
        return self.strategy.extended.is_chief

    @property
    def epoch(self) -> int:
        """The epoch of the next step, from 0."""
        return self._position.epoch

    @property
    def steps_made(self) -> int:
        """Training steps made, all epochs and calls of `fit` together."""
        return self._position.steps_made

    @property
    def rows_of_epoch(self) -> int:
        """Rows of the present epoch so far, of all ranks."""
        return self._position.rows

    def stop_now(self) -> None:
        """End the training after this step.

        Local.  For decisions that all ranks make at the same turn, from what all of them know, such as logs.  For a
        decision of one rank set ``stop_training``.
        """
        self._stop_now = self.stop_training = True

    def from_chief(self, value: float) -> float:
        """Return the chief's number on all ranks.  Collective: every rank calls it in the same order."""
        return self.strategy.extended.first_in_replica(self.each_rank(value)[0])

    def each_rank(self, value: float) -> list[float]:
        """Return the number that each rank gave, in rank order.  Collective: every rank calls it in the same order."""
        return self.strategy.gather(numpy.array([value], "float64"), axis=0).tolist()

    def require_same_settings(self, **arguments: Any) -> None:
        """Raise CollectiveMismatchError on all ranks unless all have the same optimizer, metrics and arguments.

        Collective: every rank calls it in the same order.
        """
        agreement = self.strategy.extended._agreement()
        if agreement.needed:
            agreement.compare("fit", _facts_of(self.optimizer, self.metrics, arguments), _ADVICE)

    def checkpoint_objects(self) -> dict[str, Any]:
        """Return the parts of a checkpoint of this training by name, as arguments of `Checkpoint`.  Local.

        The data set of the present `fit` is one of them, if it has a position.
        """
        structure: Any = self._model.structure
        objects = {
            "variables": structure if isinstance(structure, (dict, list, tuple)) else [structure],
            "optimizer": self.optimizer,
            "training": TrainingState(self._position, [self._loss, *self.metrics], self._callbacks),
        }
        if hasattr(self._data, "state") and hasattr(self._data, "restore"):
            objects["dataset"] = self._data
        return objects

    # -- training -----------------------------------------------------------------------------------------------------

    def _fit(
        self, data: Batches, epochs: int, called: CallbackList, validation: Batches | None, validation_freq: int
    ) -> None:
        position, logs = self._position, {}
        called.call("on_train_begin", {})
        while position.epoch < epochs:
            epoch = position.epoch
            step = position.step
            called.call("on_epoch_begin", epoch, {})
            self._require_place(epoch, step)
            self.require_same_settings(
                epoch=epoch, epochs=epochs, steps=data.steps_per_epoch, validation_freq=validation_freq
            )
            is_whole = self._train_epoch(data, called)
            logs = self._results()
            if self.strategy.num_replicas_in_sync > 1:
                self.slow_replica = SlowReplica.of(self.each_rank(self._step.own_time.seconds))
            if validation is not None and (epoch + 1) % validation_freq == 0:
                logs.update({f"val_{name}": value for name, value in self._evaluate(validation, called).items()})
            if is_whole:  # else a checkpoint that is saved now goes on in the middle of this epoch, as the data do
                position.begin_epoch(epoch + 1)
            called.call("on_epoch_end", epoch, logs)
            self.require_same_settings(epoch=epoch)
            if any_rank(self.strategy, self.stop_training):
                break
        called.call("on_train_end", logs)

    def _train_epoch(self, data: Batches, called: CallbackList) -> bool:
        """Make the steps of an epoch; return whether it came to its end, rather than to that of the training."""
        position = self._position
        if not position.is_in_epoch:
            for metric in (self._loss, *self.metrics):
                metric.reset_state()
        begin_hooks, end_hooks = called.hooks("on_train_batch_begin"), called.hooks("on_train_batch_end")
        run, train_on = self.strategy.run, self._train_on
        self._step.own_time.begin()
        epoch, first = position.epoch, position.step
        for step, batch in enumerate(data.epoch(first), first):
            for hook in begin_hooks:
                hook(step, {})
                self._require_place(epoch, step, data.are_left)  # the batch is taken already
            totals = run(train_on, (batch, data.share))
            position.advance(totals.rows, totals.loss)
            logs = {"loss": position.mean_loss}
            for hook in end_hooks:
                hook(step, logs)
            self._require_place(epoch, step + 1)
            if totals.votes or self._stop_now:
                self.stop_training = True
                return False
            self._step.own_time.go_on()  # after the hooks, which may call all ranks
        if not position.is_in_epoch:
            raise ValueError(
                f"the data gave no batch in epoch {position.epoch}; an iterator can be gone through once only: give a "
                "data set, or the number of steps of an epoch"
            )
        return True

    def _require_place(self, epoch: int, step: int, are_left: bool = False) -> None:
        """Raise RuntimeError if a callback has restored another place of the training than the present one."""
        if are_left or (self._position.epoch, self._position.step) != (epoch, step):
            raise RuntimeError(
                f"a callback has restored a checkpoint of step {self._position.step} of epoch {self._position.epoch} "
                f"before step {step} of epoch {epoch}, where the data cannot go back; restore it in `on_epoch_end`, or "
                "restore variables and optimizer alone"
            )

    def _train_on(self, batch: Any, share: Share | None) -> Any:
        """Make a step with this replica's part of a batch; runs in the replica."""
        vote = self.strategy.extended.any_in_replica(self.stop_training)
        totals, evaluation = self._step(batch, share, vote)
        self.last_loss = 0.0 if evaluation is None else evaluation.loss
        if evaluation is not None:
            self.rows_trained += count([self._loss, *self.metrics], batch, evaluation)
        return totals

    # -- walks through data -------------------------------------------------------------------------------------------

    def _one_walk(
        self, data: Any, steps: int | None, callbacks: Sequence[Callback], verbose: int | str
    ) -> tuple[Batches, CallbackList]:
        batches = Batches.of_evaluation(self._beside_training(data), steps)
        self.strategy.run(self._model.read_variables)
        return batches, CallbackList(_with_bar(callbacks, verbose), self, {"epochs": 1, "steps": batches.steps})

    def _validation(
        self, data: Any, batch_size: int | None, train_batch_size: int | None, steps: int | None
    ) -> Batches | None:
        if data is None:
            return None
        if isinstance(data, tuple) and not 1 <= len(data) <= 3:
            raise ValueError(
                f"validation_data is a tuple (x,), (x, y) or (x, y, sample_weight), got one of {len(data)}; inputs "
                "that are a tuple are a tuple in it: ((a, b), y)"
            )
        x, y, weights = [*data, None, None][:3] if isinstance(data, tuple) else (data, None, None)
        if not isinstance(data, tuple) and not feeding.are_arrays(data):
            if batch_size is not None:
                raise ValueError(
                    f"validation_batch_size cannot be given with a {type(data).__name__}, which gives batches of its "
                    "own"
                )
        elif batch_size is None:
            batch_size = train_batch_size
        found = feeding.distributed(self.strategy, x, y, weights, batch_size)
        return Batches.of_evaluation(self._beside_training(found), steps)

    def _beside_training(self, data: Any) -> Any:
        """Return data to be walked through; those of the training as a copy, so that their position stays as it is."""
        if data is not self._data or not isinstance(data, DistributedDataset):
            return data
        beside = copy.copy(data)
        beside.restore({"epoch": data.epoch})  # where a training goes on in the middle of an epoch, all rows count too
        return beside

    def _evaluate(self, data: Batches, called: CallbackList) -> Logs:
        """Return loss and metrics over all rows.  Collective."""
        metrics = [self._loss, *self.metrics]
        kept = [{name: sums.copy() for name, sums in metric.sums.items()} for metric in metrics]
        for metric in metrics:
            metric.reset_state()
        called.call("on_test_begin", {})
        begin_hooks, end_hooks = called.hooks("on_test_batch_begin"), called.hooks("on_test_batch_end")
        for number, batch in enumerate(data.from_the_start()):
            for hook in begin_hooks:
                hook(number, {})
            if rows_of(batch):
                self.strategy.run(self._test_on, (batch,))
            for hook in end_hooks:
                hook(number, {})
        logs = self._results(needs_rows=True)
        if self._is_training:
            for metric, sums in zip(metrics, kept, strict=True):
                for name, value in sums.items():
                    metric.sums[name][...] = value
        called.call("on_test_end", logs)
        return logs

    def _test_on(self, batch: Any) -> None:
        """Evaluate this replica's part of a batch; runs in the replica."""
        count([self._loss, *self.metrics], batch, self._model.test(batch))

    def _results(self, needs_rows: bool = False) -> Logs:
        """Return loss and metrics over all rows, in one call; of no rows a ValueError, if asked for.  Collective."""
        metrics = [self._loss, *self.metrics]
        totals = over_replicas(metrics, self.strategy.extended)
        if needs_rows and not totals[0]["count"]:
            raise ValueError(
                "there is nothing to evaluate: the data have no rows. Look at the filters of the data set; what can be "
                "gone through once only is no data set"
            )
        return {metric.name: metric.compute(sums) for metric, sums in zip(metrics, totals, strict=True)}


def _require_scope(strategy: Any) -> Any:
    """Return the variables' strategy; ValueError in the scope of another one."""
    if context.has_strategy() and context.get_strategy() is not strategy:
        raise ValueError(
            f"the variables belong to {strategy!r}, and the trainer is made in the scope of "
            f"{context.get_strategy()!r}; create the variables in that scope too"
        )
    return strategy


def _with_bar(callbacks: Sequence[Callback], verbose: int | str) -> list[Callback]:
    """Return the callbacks with a progress bar: the user's, or else one."""
    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    return [*map(as_callback, callbacks), *([] if has_bar else [ProgressBar(verbose)])]


def _of_strategy(metric: Metric, strategy: Any) -> Metric:
    """Return the metric; takes one that was made outside of all scopes into the strategy."""
    if context.is_default(metric.strategy):
        metric.strategy = strategy
    if metric.strategy is not strategy:
        raise ValueError(f"metric {metric.name!r} belongs to {metric.strategy!r}, the variables to {strategy!r}")
    return metric


def _require_names(metrics: Sequence[Metric]) -> None:
    names = ["loss", *(metric.name for metric in metrics)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"metrics need names of their own, also other than 'loss'; these come twice: {twice}")


def _begin_with_epoch(data: Any, epoch: int, steps_per_epoch: int | None) -> None:
    """Let a data set begin where the epochs before would have left it."""
    if not epoch or not isinstance(data, DistributedDataset):
        return
    if steps_per_epoch is None:
        data.begin(epoch)
        return
    try:
        epochs = -(-len(data) // steps_per_epoch)  # of one pass: the last one ends with the data
    except TypeError:  # it repeats forever
        epochs = epoch + 1
    passes, epoch = divmod(epoch, max(epochs, 1))
    data.begin(passes, epoch * steps_per_epoch)


def _facts_of(optimizer: Optimizer, metrics: Sequence[Metric], arguments: Mapping[str, Any]) -> Facts:
    """Return optimizer, metrics and arguments of a training, for `Agreement.compare`.  Local."""
    named = ", ".join(f"{metric.name} ({type(metric).__name__})" for metric in metrics)
    return [
        fact("optimizer", f"{type(optimizer).__name__}({_settings_of(optimizer)})"),
        fact("learning rate", repr(optimizer.learning_rate)),
        fact("iterations", optimizer.iterations),
        fact("loss scale", optimizer.loss_scale.scale),
        fact("gradient_accumulation_steps", optimizer.gradient_accumulation_steps),
        fact("clipping", str(optimizer._stages.clipping)),
        fact("skip_nonfinite", optimizer.skip_nonfinite),
        fact("metrics", named or "none"),
        *(fact(name, value) for name, value in arguments.items()),
    ]


def _settings_of(optimizer: Optimizer) -> str:
    if not type(optimizer).__module__.startswith(_OURS):
        return ""
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, (bool, int, float))}
    return ", ".join(f"{name}={value!r}" for name, value in sorted(numbers.items()) if not name.startswith("_"))
