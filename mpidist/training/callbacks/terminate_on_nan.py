"""`TerminateOnNaN`: end a training whose loss is no number any more."""

from __future__ import annotations

import logging
import math

from mpidist.training.callbacks.base import Callback, Logs

_log = logging.getLogger("mpidist")


class TerminateOnNaN(Callback):
    """End the training after the step in which the loss is NaN or infinite on any rank.

    Local: the loss of a step is that of all ranks.  Collective once, when the training ends: the chief logs the ranks.
    """

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        loss = (logs or {}).get("loss", 0.0)
        if math.isfinite(loss):
            return
        trainer = self.trainer
        ranks = [rank for rank, own in enumerate(trainer.each_rank(trainer.last_loss)) if not math.isfinite(own)]
        if trainer.is_chief:
            where = f"on ranks {ranks}" if ranks else "in the sum over the ranks"
            _log.warning("the loss is %s in step %d of epoch %d, %s: training ends", loss, batch, trainer.epoch, where)
        trainer.stop_now()
