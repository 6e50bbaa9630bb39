"""`ModelEvaluation`: loss and metrics of a built model over an input function's rows; and their record in a file."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy

from mpidist.strategies import workers
from mpidist.training.checkpoint import CHIEF
from mpidist.training.estimator.built_model import BuiltModel
from mpidist.training.estimator.hooks import Hooks, Session, SessionRunHook
from mpidist.training.estimator.step_batches import StepBatches
from mpidist.training.metrics.base import over_replicas
from mpidist.training.train_step import any_rank, count, rows_of
from mpidist.world import world_communicator

_FILE = "evaluations.jsonl"
_log = logging.getLogger("mpidist")


class ModelEvaluation:
    """What is evaluated, again and again: a model, with the variables that it has by then.

    `steps` are batches of each replica; None is all.
    """

    def __init__(self, built: BuiltModel, steps: int | None, hooks: Sequence[SessionRunHook]) -> None:
        self.built, self._steps = built, steps
        self._given_hooks = [*hooks, *built.spec.evaluation_hooks]

    def results(self, batches: StepBatches) -> dict[str, Any]:
        """Return loss, metrics and global step, in the order of the names.

        Collective: every rank calls it in the same order, with data of its own.  ValueError, on all ranks, where the
        data have no rows.
        """
        built, strategy = self.built, self.built.strategy
        hooks = Hooks(self._given_hooks, Session(built.position.global_step))
        hooks.begin()
        for metric in built.metrics:
            metric.reset_state()
        asks = any_rank(strategy, bool(hooks))
        strategy.run(built.model.read_variables)
        hooks.created()
        for batch in islice(batches, self._steps):
            hooks.before()
            if rows_of(batch):
                hooks.session.loss = strategy.run(self._count, (batch,))
            stops = hooks.after()
            if asks and any_rank(strategy, stops):
                break
        found = {**self._reduced(), "global_step": built.position.global_step}
        hooks.end()
        return dict(sorted(found.items()))

    def _count(self, batch: Any) -> float:
        """Take this replica's batch into account, and return its loss; runs in the replica."""
        evaluation = self.built.model.test(batch)
        count(self.built.metrics, batch, evaluation)
        return evaluation.loss

    def _reduced(self) -> dict[str, Any]:
        metrics, extended = self.built.metrics, self.built.strategy.extended
        is_one = extended.num_replicas == 1  # its sums are all: the default strategy would warn that it adds up nothing
        totals = [metric.sums for metric in metrics] if is_one else over_replicas(metrics, extended)
        if not totals[0]["count"]:
            raise ValueError("there is nothing to evaluate: the data of input_fn have no rows")
        return {metric.name: metric.compute(each) for metric, each in zip(metrics, totals, strict=True)}


def record(folder: str, results: Mapping[str, Any]) -> None:
    """Write the results as a line of ``evaluations.jsonl`` in a folder, and to the log, on the chief.  Local.

    A folder that cannot be written to is a warning in the log: an evaluation only reads.
    """
    if world_communicator().rank != CHIEF or not workers.of_job().writes_checkpoints:
        return
    plain = {name: numpy.asarray(value).tolist() for name, value in results.items()}
    _log.info("Saving dict for global step %s: %s", plain["global_step"], plain)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with Path(folder, _FILE).open("a") as file:
            file.write(json.dumps(plain) + "\n")
    except OSError as error:
        _log.warning("the results of an evaluation were not recorded: %s", error)
