"""`ModelCheckpoint` and `BackupAndRestore`: checkpoints from which a training goes on."""

from __future__ import annotations

import logging
from pathlib import Path

from mpidist.training.callbacks.base import Logs
from mpidist.training.callbacks.monitor import Monitor, Monitoring
from mpidist.training.checkpoint import Checkpoint
from mpidist.training.checkpoint_manager import CheckpointManager
from mpidist.training.given_path import given_path
from mpidist.training.preemption import PreemptionCheckpointHandler, TerminationConfig

_log = logging.getLogger("mpidist")


class ModelCheckpoint(Monitoring):
    """Save checkpoints of the training: variables, optimizer, metrics, and the positions of training and data set.

    Collective: all ranks save together; the chief writes.  The number of a checkpoint is the number of steps made.

    Parameters
    ----------
    directory : str or Path
        All ranks take the chief's.
    monitor : str
        The log by which checkpoints are compared.
    save_best_only : bool
        Save only when the log is better than ever before.
    mode : str
        ``"min"``, ``"max"``, or ``"auto"``: by the metric, or the name of the log; ValueError when training begins if
        neither tells.
    save_freq : str or int
        ``"epoch"``, or a number of steps.
    max_to_keep : int or None
        See `CheckpointManager`.
    resume : bool
        Whether `fit` goes on from the newest whole checkpoint of the directory, if there is one.  It goes on with the
        step after it and the rows that were not seen yet, on any number of ranks and with any batch size.  Otherwise it
        begins anew, with step 0: checkpoints that an earlier training has left there are older than its own.

    Raises
    ------
    ValueError
        Another `save_freq`, or an empty directory.
    """

    is_last = True
    _remembered = ("best",)
    _directory_parameter = "directory"
    _checkpoint_name = "checkpoint"

    def __init__(
        self,
        directory: str | Path,
        monitor: str = "val_loss",
        save_best_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        max_to_keep: int | None = 3,
        resume: bool = False,
    ) -> None:
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ValueError(f"save_freq must be 'epoch' or a number of steps, got {save_freq!r}")
        self.directory = given_path(directory, self._directory_parameter)
        self.monitor = Monitor(monitor, mode)
        self.save_best_only = save_best_only
        self.save_freq = save_freq
        self.max_to_keep = max_to_keep
        self.resume = resume
        self.best = self.monitor.worst

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Open the directory, and restore its newest checkpoint if asked for.  Collective."""
        if self.save_best_only:
            is_new = self.best == self.monitor.worst
            self._look_at_metrics()
            self.best = self.monitor.worst if is_new else self.best
        checkpoint = Checkpoint(**self.trainer.checkpoint_objects())
        self.manager = CheckpointManager(
            checkpoint, self.directory, self.max_to_keep, checkpoint_name=self._checkpoint_name
        )
        if self.resume:
            restored = self.manager.restore_or_initialize()
            if restored is not None and self.trainer.is_chief:
                _log.info("training goes on from %s, in epoch %d", restored, self.trainer.epoch)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save after every so many steps.  Collective then."""
        if self.save_freq != "epoch" and self.trainer.steps_made % int(self.save_freq) == 0:
            self._save(logs)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Save after every epoch.  Collective."""
        if self.save_freq == "epoch":
            self._save(logs)

    def _save(self, logs: Logs | None) -> None:
        if self.save_best_only:
            value = self.monitor.value(logs, type(self).__name__)
            if value is None or not self.monitor.is_better(value, self.best):
                return
            self.best = value
        self.manager.save(self.trainer.steps_made)


class BackupAndRestore(ModelCheckpoint):
    """Go on where a training was interrupted, by ``backup-<steps>.h5``; these are removed when it has come to its end.

    Collective: all ranks save together, the chief writes.  Nothing else in the directory is touched.

    Parameters
    ----------
    backup_dir : str or Path
        For this training alone.
    save_freq : str or int
        ``"epoch"``, or a number of steps.
    delete_checkpoint : bool
        Whether to remove, at the end, the checkpoints of this training, and the directory if nothing else is in it.
    save_before_preemption : bool
        Whether to save, and exit, when the job is told to end, too: see `PreemptionCheckpointHandler`.
    termination_config : TerminationConfig, optional
        When that is, and how to exit.

    Raises
    ------
    ValueError
        As for `ModelCheckpoint`.
    """

    _directory_parameter = "backup_dir"
    _checkpoint_name = "backup"  # so that it never takes another callback's checkpoints for its own

    def __init__(
        self,
        backup_dir: str | Path,
        save_freq: str | int = "epoch",
        delete_checkpoint: bool = True,
        save_before_preemption: bool = False,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        super().__init__(backup_dir, save_freq=save_freq, max_to_keep=2, resume=True)
        self.delete_checkpoint = delete_checkpoint
        self.save_before_preemption = save_before_preemption
        self.termination_config = termination_config
        self._handler: PreemptionCheckpointHandler | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Restore the newest backup.  Collective."""
        super().on_train_begin(logs)
        if self.save_before_preemption:
            self._handler = PreemptionCheckpointHandler(None, self.manager, None, self.termination_config)
            self._handler.steps_fn = lambda: self.trainer.steps_made

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Save where it is time; save and exit if the job is told to end.  Collective then."""
        super().on_train_batch_end(batch, logs)
        if self._handler is not None:  # the step is over, and the next batch not yet taken out of the data set
            self._handler.save_checkpoint_if_preempted()

    def on_train_end(self, logs: Logs | None = None) -> None:
        if self._handler is not None:
            self._handler.close()
            self._handler = None
        if self.delete_checkpoint and self.trainer.is_chief:
            self.manager.clear()
