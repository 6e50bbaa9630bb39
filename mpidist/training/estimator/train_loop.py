"""`TrainLoop`: the steps of one call of `train`."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

from mpidist.input.sharding import Share
from mpidist.training.estimator.built_model import BuiltModel
from mpidist.training.estimator.hooks import Hooks
from mpidist.training.estimator.saver import Saver
from mpidist.training.estimator.step_batches import StepBatches
from mpidist.training.train_step import Totals, TrainStep, any_rank

_log = logging.getLogger("mpidist")


class NanLossDuringTrainingError(RuntimeError):
    """The loss of a step is NaN: the variables have no meaning any more.  Raised on all ranks."""


class TrainLoop:
    """Steps until the data end, a number of steps is reached, or somebody asks for the end.

    `log_steps` lie between two lines in the log.
    """

    def __init__(self, built: BuiltModel, saver: Saver, hooks: Hooks, log_steps: int | None) -> None:
        assert built.optimizer is not None
        self._built, self._saver, self._hooks, self._log_steps = built, saver, hooks, log_steps
        self._strategy, self._position = built.strategy, built.position
        self._optimizer = built.optimizer
        self._step = TrainStep(built.model, built.optimizer)
        self._logged = (self._position.global_step, time.monotonic())

    def run(self, batches: StepBatches, last_step: int | None) -> None:
        """Make the steps, and save.  Collective: every rank calls it in the same order."""
        hooks, saver, session = self._hooks, self._saver, self._hooks.session
        asks = any_rank(self._strategy, bool(hooks or saver.listeners))
        self._strategy.run(self._built.model.read_variables)
        self._position.batch_size = batches.batch_size
        for batch in batches:
            hooks.before()
            totals = self._strategy.run(self._step_on, (batch, batches.share, saver.wants_to_save))
            self._count(totals, batches.pipelines)
            stops = hooks.after()
            is_last = last_step is not None and self._position.global_step >= last_step
            if not is_last:
                stops |= saver.save_if_due(session, totals.votes > 0)
            if is_last or (asks and any_rank(self._strategy, stops)):
                break
        saver.end(session)
        _log.info("Loss for final step: %s", session.loss)

    def _step_on(self, batch: Any, share: Share | None, wants_to_save: bool) -> Totals:
        """Make a step with this replica's batch; runs in the replica."""
        vote = self._strategy.extended.any_in_replica(wants_to_save)
        return self._step(batch, share, vote)[0]

    def _count(self, totals: Totals, pipelines: int) -> None:
        """Take note of a step; NanLossDuringTrainingError on all ranks if its loss is none."""
        position, session = self._position, self._hooks.session
        if self._built.is_served:  # all workers' steps count
            position.global_step = self._optimizer.iterations
        else:
            position.global_step += 1
            position.batches_read += pipelines
        session.global_step = position.global_step
        session.loss = totals.loss / totals.rows if totals.rows else session.loss
        if math.isnan(totals.loss):
            raise NanLossDuringTrainingError(
                f"NaN loss during training: the loss of global step {position.global_step} is NaN. Try a smaller "
                "learning rate; the newest checkpoint has the variables of before"
            )
        self._log_speed()

    def _log_speed(self) -> None:
        step, seconds = self._logged
        made = self._position.global_step - step
        if self._log_steps and made >= self._log_steps and self._strategy.extended.is_chief:
            now = time.monotonic()
            speed = made / max(now - seconds, 1e-9)
            _log.info("loss = %s, step = %d (%.4g steps/s)", self._hooks.session.loss, step + made, speed)
            self._logged = (step + made, now)
