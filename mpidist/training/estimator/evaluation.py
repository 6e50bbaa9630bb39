"""`ModelEvaluation`: loss and metrics of a built model over an input function's rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from mpidist.training.estimator.built_model import BuiltModel
from mpidist.training.estimator.hooks import Hooks, Session, SessionRunHook
from mpidist.training.estimator.step_batches import StepBatches
from mpidist.training.metrics.base import over_replicas
from mpidist.training.train_step import any_rank, count, rows_of


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
