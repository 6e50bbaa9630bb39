"""`train_and_evaluate`: what each task of a cluster does, from one script."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpidist.errors import CheckpointError, quoted
from mpidist.strategies import workers
from mpidist.training.checkpoint_manager import checkpoints_in, number_of
from mpidist.training.estimator.estimator import Estimator, require_positive
from mpidist.training.estimator.evaluation import record
from mpidist.training.estimator.hooks import (
    CheckpointSaverListener,
    Session,
    SessionRunHook,
    checked_hooks,
    checked_listeners,
)
from mpidist.training.estimator.step_batches import require_input_fn
from mpidist.training.evaluator import end_of_training, written
from mpidist.training.train_step import any_rank

_log = logging.getLogger("mpidist")

#: How often an evaluator looks for a new checkpoint.
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class TrainSpec:
    """How `train_and_evaluate` trains.

    Parameters
    ----------
    input_fn, max_steps, hooks, saving_listeners
        As for `Estimator.train`.

    Raises
    ------
    TypeError
        `input_fn`, a hook or a listener is none.
    ValueError
        `max_steps` is not positive.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[SessionRunHook] = ()
    saving_listeners: Sequence[CheckpointSaverListener] = ()

    def __post_init__(self) -> None:
        require_input_fn(self.input_fn)
        require_positive({"max_steps": self.max_steps})
        object.__setattr__(self, "hooks", checked_hooks(self.hooks))
        object.__setattr__(self, "saving_listeners", checked_listeners(self.saving_listeners))


@dataclass(frozen=True)
class EvalSpec:
    """How `train_and_evaluate` evaluates.

    Parameters
    ----------
    input_fn, steps, name, hooks
        As for `Estimator.evaluate`; `steps` is 100 by default.
    exporters : object or sequence of objects
        Each has a ``name`` and ``export(estimator, export_path, checkpoint_path, eval_result,
        is_the_final_export)``, which is called on every rank after an evaluation.
    start_delay_secs : int
        How long an evaluator waits before it evaluates first, while the training goes on.
    throttle_secs : int
        How long it is from one evaluation to the next at least, while the training goes on.

    Raises
    ------
    TypeError
        `input_fn`, a hook or an exporter is none.
    ValueError
        A number is not positive, or a time is negative.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[SessionRunHook] = ()
    exporters: Any = ()
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        require_input_fn(self.input_fn)
        require_positive({"steps": self.steps})
        delays = {"start_delay_secs": self.start_delay_secs, "throttle_secs": self.throttle_secs}
        require_positive(delays, or_zero=True)
        object.__setattr__(self, "hooks", checked_hooks(self.hooks))
        object.__setattr__(self, "exporters", _checked_exporters(self.exporters))


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Any]]:
    """Train, and evaluate new checkpoints: the same line for every task of a cluster.

    Collective: every rank calls it in the same order.

    Where the cluster has no evaluator, all ranks train, evaluate after a save, and once more at the end.  Under a
    `ParameterServerStrategy` the first worker evaluates at the end.  Where there is an evaluator, the others train; it
    evaluates the newest checkpoint whenever there is a new one, until the training has ended or has reached
    `max_steps`.

    Parameters
    ----------
    estimator : Estimator
    train_spec : TrainSpec
    eval_spec : EvalSpec

    Returns
    -------
    results : dict or None
        The last evaluation; None on ranks that do not evaluate.
    exports : list
        What the exporters returned after it.

    Raises
    ------
    TypeError
        An argument is of another type.
    ValueError
        An evaluator outside of the job cannot know when a training without `max_steps` ends.
    """
    for name, argument, kind in (
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ):
        if not isinstance(argument, kind):
            raise TypeError(f"`{name}` must have type {kind.__name__}, given {type(argument).__name__}")
    config = estimator.config
    if config.is_evaluator:
        return _Evaluator(estimator, train_spec, eval_spec).run()
    if config.has_evaluator:
        _train(estimator, train_spec, [])
        return None, []
    if config.train_distribute is not None and config.train_distribute.extended is (job := workers.of_job()):
        _train(estimator, train_spec, [])
        return _evaluated(estimator, eval_spec, True) if job.writes_checkpoints else (None, [])
    listener = _EvaluatingListener(estimator, eval_spec)
    _train(estimator, train_spec, [listener])
    if listener.found is None:  # nothing was left to train
        listener.evaluate(is_final=True)
    return listener.found or (None, [])


def _train(estimator: Estimator, spec: TrainSpec, listeners: list[CheckpointSaverListener]) -> None:
    estimator.train(
        spec.input_fn, spec.hooks, max_steps=spec.max_steps, saving_listeners=[*spec.saving_listeners, *listeners]
    )


def _evaluated(estimator: Estimator, spec: EvalSpec, is_final: bool) -> tuple[dict[str, Any], list[Any]]:
    """Evaluate the newest checkpoint, and export it.  Collective."""
    results = estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, name=spec.name)
    return results, _exported(estimator, spec, results, is_final)


def _exported(estimator: Estimator, spec: EvalSpec, results: dict[str, Any], is_final: bool) -> list[Any]:
    path = estimator.latest_checkpoint()
    folder = Path(estimator.model_dir, "export")
    return [
        each.export(estimator, str(folder / each.name), path, results, is_the_final_export=is_final)
        for each in spec.exporters
    ]


class _EvaluatingListener(CheckpointSaverListener):
    """Evaluates after saves, as often as the chief's clock allows, and at the end."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self._strategy: Any = estimator.config.train_distribute
        self._evaluated_at: float | None = None
        self._step = -1
        self.found: tuple[dict[str, Any], list[Any]] | None = None

    def after_save(self, session: Session, global_step_value: int) -> None:
        """Evaluate, unless the last evaluation began a short time ago."""
        if self._is_time():
            self._step = global_step_value
            self.evaluate(is_final=False)

    def end(self, session: Session, global_step_value: int) -> None:
        """Evaluate the last checkpoint, unless that was done."""
        if self._step != global_step_value or self.found is None:
            self.evaluate(is_final=True)
        elif self._spec.exporters:
            results = self.found[0]
            self.found = results, _exported(self._estimator, self._spec, results, True)

    def evaluate(self, is_final: bool) -> None:
        """Evaluate the newest checkpoint.  Collective."""
        self._evaluated_at = time.monotonic()
        self.found = _evaluated(self._estimator, self._spec, is_final)

    def _is_time(self) -> bool:
        """Return whether the chief says so.  Collective."""
        if self._evaluated_at is None:
            return True
        is_late = time.monotonic() - self._evaluated_at >= self._spec.throttle_secs
        if self._strategy is None:
            return is_late
        return any_rank(self._strategy, is_late and self._strategy.extended.is_chief)


class _Evaluator:
    """The task that evaluates the newest checkpoint of a training again and again.  Local."""

    def __init__(self, estimator: Estimator, train_spec: TrainSpec, spec: EvalSpec) -> None:
        self._estimator, self._spec, self._max_steps = estimator, spec, train_spec.max_steps
        self._folder = Path(estimator.model_dir)
        strategy = estimator.config.train_distribute
        self._ended = end_of_training(strategy)
        if self._ended is None and train_spec.max_steps is None:
            raise ValueError(
                "an evaluator that is no rank of the training's job ends at max_steps: give TrainSpec(max_steps=...)"
            )
        self._seen: tuple[Path, int] | None = None
        self._step = -1
        self._next_at = time.monotonic() + spec.start_delay_secs
        self._found: tuple[dict[str, Any] | None, list[Any]] = (None, [])

    def run(self) -> tuple[dict[str, Any] | None, list[Any]]:
        """Evaluate until the training has ended; return the last results and exports."""
        while not (self._max_steps is not None and self._step >= self._max_steps):
            has_ended = self._ended is not None and self._ended()  # before the look: what was saved by then is there
            new = self._new()
            if new is not None and (has_ended or self._may_be_last(new[0]) or time.monotonic() >= self._next_at):
                self._evaluate(new, has_ended)
            elif has_ended:
                break
            else:
                time.sleep(_POLL_SECONDS)
        return self._found

    def _new(self) -> tuple[Path, int] | None:
        """Return the newest checkpoint, and when it was written, if it was not evaluated."""
        newest = written(checkpoints_in(self._folder)[-1:])
        return next((each for each in newest if each != self._seen), None)

    def _may_be_last(self, path: Path) -> bool:
        return self._max_steps is not None and number_of(path) >= self._max_steps

    def _evaluate(self, new: tuple[Path, int], has_ended: bool) -> None:
        self._seen, self._next_at = new, time.monotonic() + self._spec.throttle_secs
        estimator, spec = self._estimator, self._spec
        evaluation, batches = estimator.evaluation(spec.input_fn, spec.steps, spec.hooks)
        try:  # nothing else is passed over: the model, the data and hooks may raise the same for checkpoints of theirs
            evaluation.built.checkpoint.restore_here(new[0])
        except CheckpointError as error:
            _log.warning("%s; the evaluator passes it over", error)
            return
        results = evaluation.results(batches)
        record(estimator.eval_dir(spec.name), results)
        self._step = evaluation.built.position.global_step
        self._found = results, _exported(estimator, spec, results, has_ended or self._may_be_last(new[0]))


def _checked_exporters(given: Any) -> list[Any]:
    exporters = list(given or ()) if isinstance(given, Iterable) or given is None else [given]
    for each in exporters:
        if not (callable(getattr(each, "export", None)) and isinstance(getattr(each, "name", None), str)):
            raise TypeError(f"`exporters` must have a name and a method export, given: {quoted(each)}")
    return exporters
