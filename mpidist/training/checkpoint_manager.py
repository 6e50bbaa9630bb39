"""`CheckpointManager`: the checkpoints of one directory; keeps the newest, restores the newest that is whole."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

from mpidist.collectives.communicator import Communicator
from mpidist.errors import CheckpointError
from mpidist.training import hdf5_file
from mpidist.training.checkpoint import CHIEF, Checkpoint, together

_NAME = re.compile(r"checkpoint-(\d+)\.h5")
_log = logging.getLogger("mpidist")


class CheckpointManager:
    """Numbered checkpoints ``checkpoint-<number>.h5`` in a directory.

    Collective: every rank makes it in the same order.  The chief tries at once whether it can write to the directory,
    and leaves nothing behind.  To read only, use `Checkpoint.restore`.

    Parameters
    ----------
    checkpoint : Checkpoint
    directory : str or Path
        The chief's counts.  Made at the first save.
    max_to_keep : int or None
        How many to keep; older ones are removed after a save.  None keeps all.

    Raises
    ------
    ValueError
        If `max_to_keep` is less than 1.
    CheckpointError
        On all ranks: the chief cannot write to the directory; the message has the reason.
    """

    def __init__(self, checkpoint: Checkpoint, directory: str | Path, max_to_keep: int | None = 3) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be 1 or more, or None for all; got {max_to_keep}")
        self.checkpoint = checkpoint
        self.directory = Path(directory)
        self.max_to_keep = max_to_keep
        together(
            lambda: _try(self.directory),
            f"no checkpoint can be written to {self.directory}; choose a directory that rank {CHIEF} can write to",
        )

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that are in the directory, as this rank sees it, by ascending number.  Local."""
        found = self.directory.iterdir() if self.directory.is_dir() else ()
        numbered = {path: match for path in found if (match := _NAME.fullmatch(path.name))}
        return sorted(numbered, key=lambda path: int(numbered[path][1]))

    @property
    def latest_checkpoint(self) -> Path | None:
        """The one with the highest number, whole or not; None if there is none.  Local."""
        return max(self.checkpoints[-1:], default=None)

    def save(self, checkpoint_number: int) -> Path:
        """Save a checkpoint under a number, then remove those that are too many.

        Collective: every rank calls it in the same order.

        Raises
        ------
        CheckpointError
            On all ranks: the chief could not write it.
        """
        path = self.checkpoint.save(self.directory / f"checkpoint-{checkpoint_number}.h5")
        if Communicator.world().rank == CHIEF and self.max_to_keep is not None:
            for old in [other for other in self.checkpoints if other != path][: -self.max_to_keep + 1 or None]:
                old.unlink(missing_ok=True)
        return path

    def restore_or_initialize(self) -> Path | None:
        """Restore the newest checkpoint that is whole.

        Collective: every rank calls it in the same order.  A damaged one is passed over, with a warning in the log.

        Returns
        -------
        Path or None
            What was restored; None, with nothing changed, if the directory has no checkpoint.

        Raises
        ------
        CheckpointError
            On all ranks: there are checkpoints, and none can be restored; has the reason for each.
        """
        communicator = Communicator.world()
        seen = json.dumps([str(path) for path in reversed(self.checkpoints)]) if communicator.rank == CHIEF else ""
        newest_first = json.loads(communicator.exchange(seen.encode(), what="checkpoint")[CHIEF])
        reasons = []
        for path in newest_first:
            try:
                self.checkpoint.restore(path)
                return Path(path)
            except CheckpointError as error:
                reasons.append(str(error))
                if communicator.rank == CHIEF:
                    _log.warning("%s; trying the checkpoint before it", error)
        if reasons:
            raise CheckpointError(f"no checkpoint in {self.directory} can be restored: " + "; ".join(reasons))
        return None


def _try(directory: Path) -> None:
    """Write an empty checkpoint and remove it, and the directories that were made for it.  Local."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    trial = directory / f".trial-{os.getpid()}.h5"
    try:
        hdf5_file.write(trial, {}, {})
        trial.unlink()
    finally:
        for path in missing:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
