"""`Saver`: when a training saves, and what is called around it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mpidist.strategies import workers
from mpidist.training.checkpoint_manager import CheckpointManager
from mpidist.training.estimator.built_model import BuiltModel
from mpidist.training.estimator.hooks import CheckpointSaverListener, Session
from mpidist.training.estimator.run_config import RunConfig


class Saver:
    """The saves of one training.

    Collective: every rank makes it in the same order.  CheckpointError, on all ranks, where the chief cannot write to
    the directory.
    """

    def __init__(
        self, built: BuiltModel, directory: Any, config: RunConfig, listeners: Sequence[CheckpointSaverListener]
    ) -> None:
        self.manager = CheckpointManager(
            built.checkpoint,
            directory,
            max_to_keep=config.keep_checkpoint_max or None,
            keep_checkpoint_every_n_hours=config.keep_checkpoint_every_n_hours,
        )
        self._position = built.position
        self._is_chief = built.strategy.extended.is_chief
        self._steps, self._seconds = config.save_checkpoints_steps, config.save_checkpoints_secs
        self.listeners = listeners
        self._saved = (0, 0)

    def begin(self, is_restored: bool) -> None:
        """Take note that the training begins here.  Local."""
        self._saved = self._here() if is_restored else (-1, 0)
        self._begun_at, self._saved_at = self._position.global_step, time.monotonic()
        for listener in self.listeners:
            listener.begin()

    @property
    def wants_to_save(self) -> bool:
        """Whether the chief's clock says that a save is due; False on other ranks."""
        return self._is_chief and bool(self._seconds) and time.monotonic() - self._saved_at >= (self._seconds or 0)

    def save_if_due(self, session: Session, is_wanted: bool) -> bool:
        """Save if so many steps have been made, or it is wanted; return whether a listener asks for the end.

        Collective.
        """
        since = self._position.global_step - max(self._saved[0], self._begun_at)
        is_due = bool(self._steps) and since >= (self._steps or 0)
        return self.save(session) if is_due or is_wanted else False

    def save(self, session: Session) -> bool:
        """Save, unless this is saved already; return whether a listener asks for the end.  Collective."""
        if self._saved == self._here() or not workers.of_job().writes_checkpoints:
            return False
        step = self._position.global_step
        for listener in self.listeners:
            listener.before_save(session, step)
        self.manager.save(step)
        self._saved, self._saved_at = self._here(), time.monotonic()
        return any([listener.after_save(session, step) for listener in self.listeners])

    def end(self, session: Session) -> None:
        """Save the end of the training.  Collective."""
        self._position.batches_read = 0
        self.save(session)
        for listener in self.listeners:
            listener.end(session, self._position.global_step)

    def _here(self) -> tuple[int, int]:
        return self._position.global_step, self._position.batches_read
