"""`Estimator`: a model function and a folder of checkpoints; trains, evaluates and predicts."""

from __future__ import annotations

import copy
import logging
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpidist.errors import CheckpointNotFoundError, quoted
from mpidist.strategies import workers
from mpidist.strategies.default import STRATEGY
from mpidist.strategies.workers import Workers
from mpidist.training import hdf5_file
from mpidist.training.checkpoint import Checkpoint, together
from mpidist.training.checkpoint_manager import CheckpointManager, newest_in, number_of
from mpidist.training.estimator.built_model import POSITION, VARIABLES, BuiltModel, without_rows
from mpidist.training.estimator.evaluation import ModelEvaluation, record
from mpidist.training.estimator.hooks import (
    CheckpointSaverListener,
    Hooks,
    Session,
    SessionRunHook,
    checked_hooks,
    checked_listeners,
)
from mpidist.training.estimator.prediction import predicted
from mpidist.training.estimator.run_config import RunConfig
from mpidist.training.estimator.saver import Saver
from mpidist.training.estimator.spec import EstimatorSpec, ModeKeys, ModelFunction
from mpidist.training.estimator.step_batches import StepBatches, StepPosition, require_input_fn
from mpidist.training.estimator.train_loop import TrainLoop
from mpidist.training.given_path import given_path
from mpidist.world import world_communicator

_log = logging.getLogger("mpidist")


class Estimator:
    """Trains, evaluates and asks the model of a model function.  The folder of checkpoints is all that it keeps.

    Each call begins with the newest checkpoint of `model_dir`, and `train` ends with a new one.  A training that was
    killed goes on where its newest checkpoint is, at any number of ranks.

    Collective: every rank makes it in the same order.

    Parameters
    ----------
    model_fn : callable
        ``model_fn(features, labels, mode, params, config)`` returns an `EstimatorSpec`.  It names the arguments that it
        wants.  It is called in the scope of the strategy, once for each mode.  ``features`` and ``labels`` have the
        structure, dtypes and shapes of a batch, and no rows.
    model_dir : str or Path, optional
        Made at the first save.  Default: that of `config`, or else a temporary folder, which the log names.
    config : RunConfig, optional
    params : dict, optional
        Copied, and given to `model_fn`.

    Raises
    ------
    TypeError
        `model_fn` is no function, or `config` no RunConfig.
    ValueError
        `model_fn` has unknown arguments; `model_dir` and `config` name two folders; an evaluator has no folder.
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        config = RunConfig() if config is None else config
        if not isinstance(config, RunConfig):
            raise TypeError(f"config must be an instance of `RunConfig`, but provided {quoted(config)}.")
        self._model_fn = ModelFunction(model_fn, params)
        self._params = copy.deepcopy(dict(params or {}))
        self._directory = _directory(model_dir, config)
        self._config = config.replace(model_dir=str(self._directory))
        self._built: dict[tuple[str, int, str], BuiltModel] = {}
        self._serves_on = False  # servers hold what was trained here

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints."""
        return str(self._directory)

    @property
    def config(self) -> RunConfig:
        """The settings, with the folder."""
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of what model functions get."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """The model function."""
        return self._model_fn.fn

    def eval_dir(self, name: str | None = None) -> str:
        """Return the folder in which evaluations of a name are recorded.  Local."""
        return os.path.join(self.model_dir, "eval" if not name else f"eval_{name}")

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint, as this rank sees it; None if there is none.  Local."""
        return newest_in(self._directory) or None

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables in the newest checkpoint.  Local: reads the file.

        Raises
        ------
        CheckpointNotFoundError
            There is no checkpoint.
        """
        return sorted(variables_in(self.latest_checkpoint(), self._directory))

    def get_variable_value(self, name: str) -> Any:
        """Return a variable of the newest checkpoint.  Local: reads the file.

        Raises
        ------
        CheckpointNotFoundError
            There is no checkpoint.
        ValueError
            It has no such variable.
        """
        found = variables_in(self.latest_checkpoint(), self._directory)
        if name not in found:
            raise ValueError(f"the newest checkpoint has no variable {name!r}; it has {sorted(found)}")
        return found[name]

    # -- training -----------------------------------------------------------------------------------------------------

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> Estimator:
        """Train until the data end, or a number of steps is reached, and save.

        Collective: every rank calls it in the same order.  Under a `ParameterServerStrategy` every worker calls it, and
        steps are those of all workers together.

        The data of each call begin anew.  Only a training that was killed goes on with the batch behind its checkpoint.

        Parameters
        ----------
        input_fn : callable
            Returns a `Dataset` with batches for one replica, or another iterable of batches ``(features, labels)``.
            It is called on each rank.  It may name ``input_context``, ``mode``, ``params`` and ``config`` among its
            arguments.  Under strategies of one machine all ranks make the same data set, and each takes every n-th
            batch; elsewhere each rank has a data set of its own.
        hooks : sequence of SessionRunHook, optional
        steps : int, optional
            Steps beyond those that were made before.
        max_steps : int, optional
            Global step to end at; nothing is done if there is a checkpoint of it.
        saving_listeners : sequence of CheckpointSaverListener, optional

        Returns
        -------
        Estimator
            This one.

        Raises
        ------
        ValueError
            Both `steps` and `max_steps` are given, or one is not positive; several ranks have no `train_distribute`;
            the data have no batch; or a model that begins has an optimizer with steps on another one.
        TypeError
            `input_fn`, a hook, a listener, or what `input_fn` returns is none.
        CheckpointError
            On all ranks: a checkpoint is of another model, or the folder cannot be written to.
        NanLossDuringTrainingError
            On all ranks: a loss is NaN.
        """
        _require_steps(steps=steps, max_steps=max_steps)
        require_input_fn(input_fn)
        own_hooks = checked_hooks(hooks), checked_listeners(saving_listeners)
        strategy = self._strategy_to_train()
        newest = _from_chief(lambda: newest_in(self._directory), "newest checkpoint")
        if max_steps is not None and newest and number_of(Path(newest)) >= max_steps:
            _log.info("Skipping training since max_steps has already saved.")
            return self
        self._train(input_fn, strategy, steps, max_steps, *own_hooks)
        return self

    def _train(
        self,
        input_fn: Callable[..., Any],
        strategy: Any,
        steps: int | None,
        max_steps: int | None,
        given_hooks: list[SessionRunHook],
        listeners: list[CheckpointSaverListener],
    ) -> None:
        position = StepPosition()
        path = CheckpointManager(Checkpoint(**{POSITION: position}), self._directory, None).restore_or_initialize()
        is_new = path is None and not self._serves_on
        if is_new:
            self._forget(ModeKeys.TRAIN)
        read = None if isinstance(strategy.extended, Workers) else position
        batches = StepBatches(input_fn, strategy, self._named(ModeKeys.TRAIN), read)
        built = self._build(ModeKeys.TRAIN, strategy, batches.outline)
        if is_new:
            _require_no_steps(built)
        spec, of_chief = built.spec, strategy.extended.is_chief
        own_hooks = [*spec.training_hooks, *(spec.training_chief_hooks if of_chief else [])]
        hooks = Hooks([*given_hooks, *own_hooks], Session())
        saver = Saver(built, self._directory, self._config, listeners)
        hooks.begin()
        if path is not None and not self._serves_on:
            built.checkpoint.restore(path)
        self._serves_on = built.is_served
        if built.is_served:  # what the first worker found counts for all
            optimizer = built.optimizer
            assert optimizer is not None
            built.position.global_step = int(_from_chief(lambda: str(optimizer.iterations), "steps on servers"))
        hooks.session.global_step = built.position.global_step
        saver.begin(path is not None)
        hooks.created()
        last_step = built.position.global_step + steps if steps is not None else max_steps
        TrainLoop(built, saver, hooks, self._config.log_step_count_steps).run(batches, last_step)
        hooks.end()

    # -- evaluation and prediction ------------------------------------------------------------------------------------

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Return loss, metrics and global step of a checkpoint.

        Collective: every rank calls it in the same order.  Under `eval_distribute` each replica evaluates its batches,
        and all rows count alike.  Without it, or under a `ParameterServerStrategy`, each rank evaluates all of them.

        Parameters
        ----------
        input_fn : callable
            As for `train`.
        steps : int, optional
            Batches of each replica; all by default.
        hooks : sequence of SessionRunHook, optional
        checkpoint_path : str or Path, optional
            Default: the newest checkpoint.  Where there is none, the model that was never trained is evaluated, with a
            warning in the log.
        name : str, optional
            Of the folder in which the chief records the result, beside that of others.

        Returns
        -------
        dict
            ``loss``, ``global_step`` and the metrics of the specification, in the order of their names.

        Raises
        ------
        ValueError
            `steps` is not positive, or the data have no rows.
        TypeError, CheckpointError
            As for `train`.
        """
        _require_steps(steps=steps)
        path = self._path(checkpoint_path, "evaluate")
        if not path:
            self._forget(ModeKeys.EVAL)
        evaluation, batches = self.evaluation(input_fn, steps, hooks)
        if path:
            evaluation.built.checkpoint.restore_here(path)
        results = evaluation.results(batches)
        record(self.eval_dir(name), results)
        return results

    def evaluation(
        self, input_fn: Callable[..., Any], steps: int | None = None, hooks: Sequence[SessionRunHook] | None = None
    ) -> tuple[ModelEvaluation, StepBatches]:
        """Return what evaluates, before a checkpoint is restored, and its data.  Collective, as `evaluate`."""
        require_input_fn(input_fn)
        own_hooks = checked_hooks(hooks)
        strategy = self._config.eval_distribute
        if strategy is None or isinstance(strategy.extended, Workers):
            strategy = STRATEGY
        batches = StepBatches(input_fn, strategy, self._named(ModeKeys.EVAL))
        built = self._build(ModeKeys.EVAL, strategy, batches.outline)
        return ModelEvaluation(built, steps, own_hooks), batches

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Collection[str] | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Return an iterator over the predictions for all rows of `input_fn`, which each rank makes by itself.

        Collective: every rank calls it in the same order.  Iterating is Local.

        Parameters
        ----------
        input_fn : callable
            As for `train`; labels are not looked at.
        predict_keys : collection of str, optional
            Those entries that are wanted, where predictions are a dict.
        hooks : sequence of SessionRunHook, optional
        checkpoint_path : str or Path, optional
            As for `evaluate`.
        yield_single_examples : bool
            False yields batches in place of rows.

        Raises
        ------
        TypeError, ValueError, CheckpointError
            As for `evaluate`; iterating raises ValueError where there is no entry of `predict_keys`.
        """
        require_input_fn(input_fn)
        own_hooks = checked_hooks(hooks)
        path = self._path(checkpoint_path, "predict")
        batches = StepBatches(input_fn, STRATEGY, self._named(ModeKeys.PREDICT))
        built = self._new_model(ModeKeys.PREDICT, STRATEGY, batches.outline)  # another call must not change this one's
        if path:
            built.checkpoint.restore_here(path)
        return predicted(built, batches, predict_keys, yield_single_examples, own_hooks)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _named(self, mode: str) -> dict[str, Any]:
        return {"mode": mode, "params": self.params, "config": self._config}

    def _path(self, checkpoint_path: Any, verb: str) -> str:
        """Return the checkpoint to restore, the same on all ranks of this worker; "" with a warning for none."""
        if checkpoint_path is not None:
            return str(given_path(checkpoint_path, "checkpoint_path", is_file=True))
        path: str = together(lambda: newest_in(self._directory), "newest checkpoint")
        if not path:
            _log.warning(
                "Could not find trained model in model_dir: %s, running initialization to %s.", self.model_dir, verb
            )
        return path

    def _forget(self, mode: str) -> None:
        """Drop the models of a mode: without a checkpoint to restore they keep the values of an earlier call."""
        self._built = {key: built for key, built in self._built.items() if key[0] != mode}

    def _build(self, mode: str, strategy: Any, outline: Any) -> BuiltModel:
        key = (mode, id(strategy), repr(outline))
        if key not in self._built:
            self._built[key] = self._new_model(mode, strategy, outline)
        return self._built[key]

    def _new_model(self, mode: str, strategy: Any, outline: Any) -> BuiltModel:
        features, labels = without_rows(outline)
        if mode == ModeKeys.PREDICT:
            labels = None
        with strategy.scope():
            spec = self._model_fn(features, labels, mode, self.params, self._config)
            return BuiltModel(spec, strategy)

    def _strategy_to_train(self) -> Any:
        if self._config.is_evaluator:
            raise RuntimeError("this process is the evaluator, which does not train: call train_and_evaluate")
        strategy: Any = self._config.train_distribute or STRATEGY
        ranks = world_communicator().size
        if not strategy.extended.spans_ranks and ranks > 1:
            raise ValueError(
                f"{ranks} ranks are to train, and train_distribute is {self._config.train_distribute!r}: each would "
                "train a model of its own. Give RunConfig(train_distribute=mpidist.MultiWorkerMirroredStrategy())"
            )
        if strategy.extended.has_coordinator:
            raise ValueError(
                "an Estimator has every worker train by itself, and a ClusterCoordinator has been made, which calls "
                "functions on the workers: make no coordinator"
            )
        return strategy


def _directory(model_dir: Any, config: RunConfig) -> Path:
    """Return the folder, a temporary one of the chief's if none is named."""
    named = [given_path(each, "model_dir") for each in (model_dir, config.model_dir) if each is not None]
    if len(set(named)) > 1:
        raise ValueError(
            "`model_dir` are set both in constructor and `RunConfig`, but with different values. In constructor: "
            f"'{model_dir}', in `RunConfig`: '{config.model_dir}' "
        )
    if named:
        return named[0]
    if config.is_evaluator:
        raise ValueError("an evaluator needs model_dir: the folder in which the others save")
    found = _from_chief(lambda: tempfile.mkdtemp(prefix="mpidist-estimator-"), "temporary folder")
    if config.is_chief:  # of all ranks one tells
        _log.warning("Using temporary folder as model directory: %s", found)
    return Path(found)


def _from_chief(fn: Callable[[], str], what: str) -> str:
    """Return the chief's text on all ranks, or that of the first of workers that train by themselves.  Collective."""
    job = workers.of_job()
    found: str = job.by_first_worker(fn) or "" if job.train_apart else together(fn, what)
    return found


def _require_no_steps(built: BuiltModel) -> None:
    """Raise ValueError if a model that begins has an optimizer that would go on from its steps on another one."""
    optimizer = built.optimizer
    assert optimizer is not None
    if not built.is_served and optimizer.iterations and optimizer._of_updates.has_met:
        raise ValueError(
            f"this {type(optimizer).__name__} has made {optimizer.iterations} steps on another model, and this one "
            "begins: make an optimizer for each, in model_fn, or for a linear model by its name or a function, such as "
            "optimizer=lambda: mpidist.optimizers.Adam(0.1)"
        )


def _require_steps(**given: int | None) -> None:
    if len([value for value in given.values() if value is not None]) > 1:
        raise ValueError("Can not provide both steps and max_steps.")
    require_positive(given)


def require_positive(numbers: Mapping[str, float | None], or_zero: bool = False) -> None:
    """Raise ValueError for a number that is not above 0, or, with `or_zero`, is below it; None is no number.  Local."""
    for name, value in numbers.items():
        if value is not None and not (value > 0 or (or_zero and value == 0)):
            raise ValueError(f"Must specify {name} {'>=' if or_zero else '>'} 0, given: {value}")


def variables_in(path: str | None, directory: Path) -> dict[str, Any]:
    """Return the variables of a checkpoint, and its global step; CheckpointNotFoundError for None.  Local."""
    if path is None:
        raise CheckpointNotFoundError(f"there is no checkpoint in {directory}: train first")
    arrays, numbers = hdf5_file.read(Path(path))
    start = f"{VARIABLES}/"
    found: dict[str, Any] = {name[len(start) :]: array for name, array in arrays.items() if name.startswith(start)}
    return {**found, "global_step": int(numbers[f"{POSITION}/global_step"])}
