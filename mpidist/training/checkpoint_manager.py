"""`CheckpointManager`: the checkpoints of one directory; keeps the newest, restores the newest that is whole."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from mpidist.errors import CheckpointError, listed, quoted
from mpidist.strategies import workers
from mpidist.training import hdf5_file
from mpidist.training.array_task import check_task, forget_task
from mpidist.training.checkpoint import CHIEF, Checkpoint, together
from mpidist.training.given_path import given_path
from mpidist.training.owner import Owner
from mpidist.training.temporary_files import left_behind, temporary
from mpidist.transports import WorldKept, in_kept_world, innermost
from mpidist.world import world_communicator

#: What the name of the file ends with that has the order in which checkpoints were saved.
_ORDER = ".order"

#: Other files that are written under a temporary name.
_OTHERS = r"\.owner(\.before)?|\.job|\.?trial\.h5.*"
_log = logging.getLogger("mpidist")


class CheckpointManager:
    """Numbered checkpoints ``<name>-<number>.h5`` in a directory.

    The newest is the one saved last, whatever its number.  Where the numbers do not tell the order of the saves, the
    file ``<name>.order`` does.

    Collective: every rank makes it in the same order.  The chief writes a trial file to the directory at once, and
    removes it.  To read only, use `Checkpoint.restore`.

    Parameters
    ----------
    checkpoint : Checkpoint
    directory : str or Path
        All ranks take the chief's.  Made at the first save.
    max_to_keep : int or None
        How many to keep; older ones are removed after a save.  None keeps all.
    keep_checkpoint_every_n_hours : float, optional
        Hours between checkpoints that are kept for good.  They count from the last one that is kept for good.  Before
        there is one, they count from the oldest checkpoint in the directory, or else from now.
    checkpoint_name : str
        Managers of different names share a directory and leave each other's checkpoints alone.

    Raises
    ------
    ValueError
        The directory or the name is empty, the name has a directory in it, `max_to_keep` is less than 1, or the hours
        are not positive.
    CheckpointError
        On all ranks: the chief cannot write to the directory, its file of the order is damaged, or it has the
        checkpoints of another task of the job array that this job is a task of; the message has the reason.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | Path,
        max_to_keep: int | None = 3,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "checkpoint",
    ) -> None:
        if Path(checkpoint_name).name != checkpoint_name:
            raise ValueError(f"checkpoint_name must be the beginning of a file's name, got {checkpoint_name!r}")
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be 1 or more, or None for all; got {max_to_keep}")
        if keep_checkpoint_every_n_hours is not None and not keep_checkpoint_every_n_hours > 0:
            raise ValueError(f"keep_checkpoint_every_n_hours must be positive, got {keep_checkpoint_every_n_hours}")
        self.checkpoint = checkpoint
        self.kept_world = WorldKept(innermost())
        self.directory = given_path(directory, "directory")
        self.checkpoint_name = checkpoint_name
        of_order = re.escape(checkpoint_name + _ORDER)
        self._is_temporary = re.compile(rf"{_pattern(checkpoint_name)}|{of_order}|{_OTHERS}").fullmatch
        self.max_to_keep = max_to_keep
        self.keep_checkpoint_every_n_hours = keep_checkpoint_every_n_hours
        if workers.of_job().writes_checkpoints:
            together(
                lambda: _try(self.directory),
                f"no checkpoint can be written to {self.directory}; choose a directory that rank {CHIEF} can write to",
            )
            together(self._require_usable, f"no checkpoint is written to {self.directory}")
        self._owner = Owner.of(self.directory)
        is_chief = world_communicator().rank == CHIEF
        self._kept, self._kept_at = self._kept_before() if is_chief else (set(), 0.0)

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints that are in the directory, as this rank sees it, in the order of their saves.  Local."""
        return checkpoints_in(self.directory, self.checkpoint_name)

    @property
    def latest_checkpoint(self) -> Path | None:
        """The one saved last, whole or not; None if there is none.  Local."""
        return max(self.checkpoints[-1:], default=None)

    @in_kept_world
    def save(self, checkpoint_number: int | None = None) -> Path:
        """Save a checkpoint under a number, then remove the oldest if they are too many.

        Collective: every rank calls it in the same order.

        Parameters
        ----------
        checkpoint_number : int, optional
            Default: one more than the highest that the chief sees.  An older checkpoint of the number is removed
            before.

        Returns
        -------
        Path

        Raises
        ------
        ValueError
            The number is negative.
        CheckpointError
            On all ranks: it could not be written, or another job saves in the directory; names that job.
        """
        if checkpoint_number is None:
            what = f"no checkpoint can be numbered in {self.directory}"
            checkpoint_number = together(lambda: max(map(number_of, self.checkpoints), default=0) + 1, what)
        number = int(checkpoint_number)
        if number < 0:
            raise ValueError(f"a checkpoint's number must be 0 or more, got {number}")
        path = self.directory / f"{self.checkpoint_name}-{number}.h5"
        if not workers.of_job().writes_checkpoints:
            return path
        together(lambda: self._prepare_order(path), f"checkpoint {path} was not saved")
        self.checkpoint.save_owned(path, self._owner)
        together(lambda: self._note_order(number), f"checkpoint {path} was saved, and not noted as the newest")
        if world_communicator().rank == CHIEF:
            self._owner.saved(path, self)
            self._remove_old(path)
        return path

    @in_kept_world
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
        restored = workers.of_job().by_first_worker(lambda: str(self._restore_newest() or ""))
        if not restored:
            return None
        self.checkpoint.note_restored()
        return Path(restored)

    def clear(self) -> None:
        """Remove the checkpoints saved here, and those found by `restore_or_initialize`; nothing else.

        Local, for the chief.  Checkpoints that another manager has saved too stay.  The directory is removed if nothing
        else is in it.
        """
        self._remove([path for path in self._owner.paths_of(self) if self._owner.gives_up(path, self)])
        self._remove(left_behind(self.directory, self._is_temporary))
        self._owner.release_unused()
        forget_task(self.directory)
        with suppress(OSError, CheckpointError):  # it has other files, or is gone; its order is damaged
            self._note_order()
            self.directory.rmdir()

    def _require_usable(self) -> None:
        """Raise CheckpointError unless this manager may save in the directory, and can tell what is old.  Local."""
        check_task(self.directory)
        _noted_order(self.directory, self.checkpoint_name)

    def _restore_newest(self) -> Path | None:
        is_chief = world_communicator().rank == CHIEF
        what = f"checkpoints in {self.directory} were not found"
        newest_first = together(lambda: [str(path) for path in reversed(self.checkpoints)], what)
        if is_chief:
            self._owner.found(map(Path, newest_first), self)
        reasons: dict[str, list[str]] = {}  # without the path -> the first reason, and further files with it
        for path in newest_first:
            try:
                self.checkpoint.restore_here(path)
                return Path(path)
            except CheckpointError as error:
                alike = reasons.setdefault(str(error).replace(path, ""), [])
                if is_chief:
                    _log.warning("%s; trying the checkpoint before it", f"{path}: the same" if alike else error)
                alike.append(Path(path).name if alike else str(error))
        if reasons:
            told = [first + (f" (the same: {listed(others)})" if others else "") for first, *others in reasons.values()]
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be restored: {listed(told, '; ')}. "
                "To train anew, use another directory, or move these files away"
            )
        return None

    def _prepare_order(self, path: Path) -> None:
        """See to it that a checkpoint is the newest as soon as it is there, before `_note_order` says so.  Local."""
        place_fn = _place_fn(self.directory, self.checkpoint_name)
        number, others = number_of(path), [number_of(each) for each in self.checkpoints if each != path]
        if any(place_fn(other) > place_fn(number) for other in others):
            self._owner.claim()
            path.unlink(missing_ok=True)  # else it passes for the newest if the process is killed in the save
            self._write_order(others)

    def _note_order(self, *last: int) -> None:
        """Note the order of the checkpoints, with the `last` at the end; no file if their numbers tell it.  Local."""
        order = [*(number for number in map(number_of, self.checkpoints) if number not in last), *last]
        if order == sorted(order):
            (self.directory / f"{self.checkpoint_name}{_ORDER}").unlink(missing_ok=True)
        else:
            self._write_order(order)

    def _write_order(self, order: list[int]) -> None:
        file = self.directory / f"{self.checkpoint_name}{_ORDER}"
        written = temporary(file)
        with open(written, "w") as text:
            json.dump(order, text)
            text.flush()
            os.fsync(text.fileno())
        written.replace(file)

    def _kept_before(self) -> tuple[set[Path], float]:
        """Return the checkpoints that an earlier manager kept for good, and since when hours are counted.  Local."""
        if self.max_to_keep is None or self.keep_checkpoint_every_n_hours is None:
            return set(), 0.0
        found = self.checkpoints
        kept = found[: -self.max_to_keep]
        first = kept[-1:] or found[:1]
        return set(kept), first[0].stat().st_mtime if first else time.time()

    def _remove_old(self, newest: Path) -> None:
        """Remove the checkpoints that are too old, and the unfinished files of killed saves.  Local."""
        too_old = left_behind(self.directory, self._is_temporary, is_owned=True)
        if self.max_to_keep is not None:
            others = [
                each for each in self.checkpoints if each not in {newest, *self._kept} and self._owner.is_of(each, self)
            ]
            too_many = others[: max(0, len(others) - self.max_to_keep + 1)]
            too_old += [path for path in too_many if not self._keeps(path) and self._owner.gives_up(path, self)]
        self._remove(too_old)

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                _log.warning("checkpoint %s is no longer needed, and cannot be removed: %s", path, error)

    def _keeps(self, path: Path) -> bool:
        """Return whether an old checkpoint is kept for good, and remember it."""
        if self.keep_checkpoint_every_n_hours is None:
            return False
        written = path.stat().st_mtime
        if written - self._kept_at < self.keep_checkpoint_every_n_hours * 3600:
            return False
        self._kept.add(path)
        self._kept_at = written
        return True


def checkpoints_in(directory: Path, name: str = "checkpoint") -> list[Path]:
    """Return the checkpoints of a name that are in a directory, in the order of their saves.  Local."""
    is_one = re.compile(_pattern(name)).fullmatch
    place_fn = _place_fn(directory, name)
    found = [path for path in directory.iterdir() if is_one(path.name)] if directory.is_dir() else []
    return sorted(found, key=lambda path: place_fn(number_of(path)))


def newest_in(directory: Path) -> str:
    """Return the path of the newest checkpoint in a directory, "" if there is none.  Local."""
    return str(max(checkpoints_in(directory)[-1:], default=""))


def _place_fn(directory: Path, name: str) -> Callable[[int], tuple[int, int]]:
    """Return the function that gives a number its place in the order of the saves.  Local."""
    places = {number: place for place, number in enumerate(_noted_order(directory, name))}
    # a number that is not noted was saved after those that are: the process was killed before it came to that
    return lambda number: (places.get(number, len(places)), number)


def _noted_order(directory: Path, name: str) -> list[int]:
    """Return the numbers in the order of their saves; none where that is the ascending one.  Local."""
    file, text = directory / f"{name}{_ORDER}", ""
    try:
        text = file.read_text(errors="replace")
        return [int(number) for number in json.loads(text)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, TypeError):
        raise CheckpointError(
            f"{file} is damaged: got {quoted(text)}, expected the numbers of the checkpoints in the order of their "
            "saves, such as [40, 4, 8]; write it anew, or remove it: then the highest number is the newest"
        ) from None


def _pattern(name: str) -> str:
    return rf"{re.escape(name)}-(\d+)\.h5"


def number_of(path: Path) -> int:
    """Return the number of a checkpoint, by its name.  Local."""
    return int(path.stem.rpartition("-")[2])


def _try(directory: Path) -> None:
    """Write an empty checkpoint and remove it, and the directories that were made for it.  Local."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    trial = temporary(directory / "trial.h5")
    try:
        hdf5_file.write(trial, {}, {})
        trial.unlink()
    finally:
        for path in missing:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
