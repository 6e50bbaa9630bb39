"""`RunConfig`: how an estimator runs: strategies, folder, saves."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mpidist.cluster.spec import ClusterSpec
from mpidist.strategies.base import Strategy
from mpidist.training.estimator.cluster_task import ClusterTask, of_environment, of_strategy

#: A checkpoint is saved after so many seconds where nothing else is said.
_SAVE_SECONDS = 600


class _Unset:
    """The value of a setting that was left out."""

    def __repr__(self) -> str:
        return "<default>"


_UNSET: Final[Any] = _Unset()
_SAVES = ("save_checkpoints_steps", "save_checkpoints_secs")


@dataclass(frozen=True)
class RunConfig:
    """The settings of an estimator, and the task of this process.  Local.

    The task comes from the cluster of `train_distribute`.  Without a strategy it comes from ``TF_CONFIG``, with
    TensorFlow's rules.  A process whose ``TF_CONFIG`` says ``evaluator`` is one, whatever the strategy.

    Parameters
    ----------
    model_dir : str or Path, optional
        Where checkpoints are.
    tf_random_seed : int, optional
        For model functions, which find it in ``config.tf_random_seed``.
    save_summary_steps : int
        Accepted for TensorFlow's sake; no summaries are written.
    save_checkpoints_steps, save_checkpoints_secs : int or None
        Steps, or seconds by the chief's clock, from one save to the next; at most one of them.  Default: 600 seconds.
        With None for both, checkpoints are saved at the end of a training only.
    keep_checkpoint_max : int or None
        How many checkpoints stay; 0 and None keep all.
    keep_checkpoint_every_n_hours : float
        An older checkpoint is kept for good after so many hours.
    log_step_count_steps : int or None
        Steps from one line in the log to the next.
    train_distribute, eval_distribute : Strategy, optional
        Under what `train` and `evaluate` work.  Without a strategy each rank evaluates by itself, and a training has
        one rank.

    Raises
    ------
    ValueError
        Both times of saves are set, a number is negative, or ``TF_CONFIG`` is wrong.
    TypeError
        A strategy is none.
    """

    model_dir: str | Path | None = None
    tf_random_seed: int | None = None
    save_summary_steps: int | None = 100
    save_checkpoints_steps: int | None = _UNSET
    save_checkpoints_secs: int | None = _UNSET
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    _task: ClusterTask = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._settle_saves()
        for name in ("save_summary_steps", *_SAVES, "keep_checkpoint_max"):
            _require(name, getattr(self, name), "0 or more", lambda value: value >= 0)
        for name in ("keep_checkpoint_every_n_hours", "log_step_count_steps"):
            _require(name, getattr(self, name), "positive", lambda value: value > 0)
        for name in ("train_distribute", "eval_distribute"):
            if not isinstance(given := getattr(self, name), (Strategy, type(None))):
                raise TypeError(f"{name} must be a strategy of mpidist, got {type(given).__name__}")
        strategy = self.train_distribute or self.eval_distribute
        task = of_environment(os.environ) if strategy is None else of_strategy(strategy, os.environ)
        object.__setattr__(self, "_task", task)

    def _settle_saves(self) -> None:
        given = [name for name in _SAVES if getattr(self, name) is not _UNSET]
        if all(getattr(self, name) is not None for name in _SAVES) and len(given) == 2:
            raise ValueError("`save_checkpoints_steps` and `save_checkpoints_secs` cannot be both set.")
        if not given:
            object.__setattr__(self, "save_checkpoints_secs", _SAVE_SECONDS)
        for name in _SAVES:
            if getattr(self, name) is _UNSET:
                object.__setattr__(self, name, None)

    def replace(self, **settings: Any) -> RunConfig:
        """Return a copy with other settings; a time of saves that is set takes the place of the other one.

        Raises
        ------
        ValueError
            There is no such setting.
        """
        allowed = [each.name for each in dataclasses.fields(self) if each.init]
        if wrong := sorted(settings.keys() - set(allowed)):
            raise ValueError(f"Replacing {', '.join(wrong)} is not supported. Allowed properties are {allowed}.")
        for name, other in (_SAVES, _SAVES[::-1]):
            if settings.get(name) is not None:
                settings.setdefault(other, None)
        return dataclasses.replace(self, **settings)

    # -- the task of this process -------------------------------------------------------------------------------------

    @property
    def task_type(self) -> str:
        """Chief, worker, ps or evaluator."""
        return self._task.task_type

    @property
    def task_id(self) -> int:
        """The number of the task in its job."""
        return self._task.task_id

    @property
    def is_chief(self) -> bool:
        """Whether this rank writes files."""
        return self._task.is_chief

    @property
    def is_evaluator(self) -> bool:
        """Whether this process evaluates what others train."""
        return self._task.is_evaluator

    @property
    def has_evaluator(self) -> bool:
        """Whether the cluster has an evaluator, so that those who train do not evaluate."""
        return self._task.has_evaluator

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The tasks that train together."""
        return self._task.cluster_spec

    @property
    def master(self) -> str:
        """TensorFlow's address of this task; nothing here connects to it."""
        return self._task.master

    @property
    def evaluation_master(self) -> str:
        """TensorFlow's address for evaluations; always empty."""
        return self._task.evaluation_master

    @property
    def num_ps_replicas(self) -> int:
        """How many servers there are."""
        return self._task.num_ps_replicas

    @property
    def num_worker_replicas(self) -> int:
        """How many tasks train: chief and workers."""
        return self._task.num_worker_replicas

    @property
    def global_id_in_cluster(self) -> int | None:
        """The number of this task among all that train, and the servers behind them."""
        return self._task.global_id_in_cluster


def _require(name: str, value: Any, what: str, is_right: Any) -> None:
    if value is not None and not is_right(value):
        raise ValueError(f"{name} must be {what}, got {value!r}")
