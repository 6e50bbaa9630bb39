"""`Owner`: the right of one process to save in a directory, which other jobs see and respect.

The directory has a file that names its owner.  A job claims the directory at its first save, and renews the claim at
every save.  It looks at the file again before and after a checkpoint gets its name: a job that has lost the directory
never says that it has saved.  An owner on this machine is gone when its process is.  An owner on another machine is
gone when it has not renewed its file for `LEASE_SECONDS`; a claim waits for that.  A damaged file belongs to nobody.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpidist.errors import CheckpointError
from mpidist.runtime.process_identity import ProcessIdentity
from mpidist.training.array_task import note_task
from mpidist.training.temporary_files import temporary

#: How long an owner on another machine keeps a directory without a save.
LEASE_SECONDS = 60.0
_POLL_SECONDS = 1.0

_FILE = ".owner"
_log = logging.getLogger("mpidist")


class Unowned:
    """A directory that no job keeps for itself."""

    def claim(self) -> None:
        """Make the directory this process's own, or renew that, before a save; CheckpointError if it is another's."""

    def require(self) -> None:
        """Raise CheckpointError, which names the other job, unless this process may give a checkpoint its name."""


class Owner(Unowned):
    """This process's claim of a directory; all its managers of the directory share it.  All Local."""

    _of_directory: weakref.WeakValueDictionary[str, Owner] = weakref.WeakValueDictionary()

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.file = directory / _FILE
        self._managers: dict[Path, weakref.WeakSet[Any]] = {}  # those that need a checkpoint
        self._was_ours = False
        weakref.finalize(self, _release, self.file)

    @classmethod
    def of(cls, directory: Path) -> Owner:
        """Return the one of a directory."""
        key = os.path.realpath(directory)
        found = cls._of_directory.get(key)
        if found is None:
            found = cls._of_directory[key] = cls(Path(key))
        return found

    def claim(self) -> None:
        claimed = _read(self.file)
        if claimed is not None and claimed.is_own:
            os.utime(self.file)
        elif self._was_ours and self._directory.exists():
            raise self._refusal(claimed, "has taken")
        else:
            self._take(claimed)
            self._was_ours = True

    def require(self) -> None:
        found = _read(self.file)
        if found is None or not found.is_own:
            raise self._refusal(found, "has taken")

    def release_unused(self) -> None:
        """Give the directory up if no manager needs a checkpoint in it."""
        if not any(self._managers.values()):
            self._was_ours = False
            _release(self.file)

    def saved(self, path: Path, manager: Any) -> None:
        """Take note of a manager that has saved a checkpoint, and needs it."""
        self._managers.setdefault(path, weakref.WeakSet()).add(manager)

    def found(self, paths: Iterable[Path], manager: Any) -> None:
        """Take note of a manager that goes on with checkpoints, whoever has saved them."""
        self._managers.update((path, weakref.WeakSet([manager])) for path in paths)

    def paths_of(self, manager: Any) -> list[Path]:
        """Return the checkpoints that a manager needs."""
        return [path for path, managers in self._managers.items() if manager in managers]

    def is_of(self, path: Path, manager: Any) -> bool:
        """Return whether a manager needs a checkpoint, or no other manager of this process does."""
        managers = self._managers.get(path)
        return not managers or manager in managers

    def gives_up(self, path: Path, manager: Any) -> bool:
        """Take note that a manager does not need a checkpoint any more; return whether no other one does."""
        managers = self._managers.get(path, weakref.WeakSet())
        managers.discard(manager)
        if not managers:
            self._managers.pop(path, None)
        return not managers

    def _take(self, found: _Claim | None) -> None:
        os.makedirs(self._directory, exist_ok=True)
        own = temporary(self.file)
        own.write_text(_own_text())
        try:
            if found is not None:
                if self._lives(found, own):
                    raise self._refusal(found, "saves in")
                self._remove(found)
            self._create(own)
            note_task(self._directory)
        finally:
            own.unlink(missing_ok=True)

    def _create(self, own: Path) -> None:
        """Give our file its name, unless another process is quicker."""
        try:
            _put(own, self.file)
        except FileExistsError:
            raise self._refusal(_read(self.file), "has just taken") from None

    def _remove(self, claim: _Claim) -> None:
        """Remove the file of an owner that is gone, and no other."""
        aside = temporary(self._directory / f"{_FILE}.before")
        try:
            os.rename(self.file, aside)
        except FileNotFoundError:
            return
        try:
            if _read(aside) != claim:
                with suppress(FileExistsError):
                    _put(aside, self.file)
                raise self._refusal(_read(self.file), "has just taken")
        finally:
            aside.unlink()
        _log.warning("%s was left by %s, which is gone; this job goes on there", self.file, claim.about)

    def _lives(self, claim: _Claim, own: Path) -> bool:
        """Return whether an owner is at work; of one on another machine, wait for its next sign of life."""
        identity = claim.identity
        if identity is None:
            return False
        lives = identity.lives
        if lives is not None:
            return lives
        _log.warning("%s is of %s, on another machine; waiting for a sign of life", self.file, claim.about)
        end = time.monotonic() + LEASE_SECONDS
        while True:
            os.utime(own)
            written = _modified(self.file)
            if written is None or own.stat().st_mtime - written > LEASE_SECONDS or time.monotonic() > end:
                return False
            if written != claim.modified:  # a clock may have been set back
                return True
            time.sleep(_POLL_SECONDS)

    def _refusal(self, claim: _Claim | None, does: str) -> CheckpointError:
        who = "it has left again" if claim is None else claim.about
        return CheckpointError(
            f"another job {does} {self._directory}: {who}. Give every job a directory of its "
            f"own; if that job has ended, remove {self.file}"
        )


class _Claim(NamedTuple):
    """The claim in the file of an owner."""

    text: str
    modified: float
    identity: ProcessIdentity | None = None
    about: str = "a job whose file is damaged"

    @property
    def is_own(self) -> bool:
        """Whether it is this process's."""
        return self.identity == ProcessIdentity.own()


def _own_text() -> str:
    identity = ProcessIdentity.own()
    job, since = os.environ.get("SLURM_JOB_ID"), time.strftime("%Y-%m-%d %H:%M:%S")
    about = {"job": f"Slurm job {job}" if job else "", "script": " ".join(sys.argv[:1]), "since": since}
    return json.dumps({**identity._asdict(), **about})


def _read(file: Path) -> _Claim | None:
    """Return the claim in a file, None if there is no file."""
    try:
        text, modified = file.read_text(errors="replace"), file.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        identity = ProcessIdentity(*[found[name] for name in ProcessIdentity._fields])
        host, process, since = found["host"], found["process"], found["since"]
        about = ", ".join(filter(None, [f"process {process} on {host}", found["job"], found["script"]]))
    except (ValueError, TypeError, KeyError):
        return _Claim(text, modified)
    return _Claim(text, modified, identity, f"{about}, since {since}")


def _put(written: Path, file: Path) -> None:
    """Let a file have another name too, or a copy of it; FileExistsError where there is one of that name."""
    try:
        os.link(written, file)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        with open(file, "xb") as copy:
            copy.write(written.read_bytes())


def _modified(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:
        return None


def _release(file: Path) -> None:
    with suppress(OSError):  # the directory is gone, or can no longer be written to
        found = _read(file)
        if found is not None and found.is_own:
            file.unlink()
