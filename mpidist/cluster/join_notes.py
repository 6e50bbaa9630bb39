"""Notes that a rank leaves in the folder of ``mpidist run`` while MPI starts and the ranks meet.

MPI waits there for all ranks, without a limit and without a word.  ``mpidist run`` reads the notes: it sees which ranks
wait, and which will never come because they have ended.  Under another launcher there is no folder, and no notes:
`start_deadline` speaks there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpidist.cluster.launchers import Launcher
from mpidist.cluster.start_deadline import start_deadline
from mpidist.options import settings

#: Suffixes of the notes, after the rank: its process, noted where it is started; waiting for the others; met them.
PROCESS, JOINING, JOINED = ".process", ".joining", ".joined"


@contextmanager
def joining(launcher: Launcher | None) -> Iterator[None]:
    """Note, while the body runs, that this rank waits for all others, which has a deadline; Local."""
    note = _note(launcher, JOINING)
    _write(note)
    try:
        with start_deadline(launcher):
            yield
    finally:
        if note is not None:
            note.unlink(missing_ok=True)


def note_joined(launcher: Launcher | None) -> None:
    """Note that this rank has met all others, and which shared memory MPI has given it; Local."""
    _write(_note(launcher, JOINED), _shared_memory())


def _note(launcher: Launcher | None, suffix: str) -> Path | None:
    """Return where this process's note goes, None if it is no rank of the ``mpidist run`` that made the folder."""
    folder = settings().run_folder
    if launcher is None or not folder:
        return None
    try:
        noted = Path(folder, f"{launcher.rank}{PROCESS}").read_text().strip()
    except OSError:  # another machine, or a job that has lost its `mpidist run`
        return None
    # The rank itself, or the program of a script that is.  A rank of another job, which a rank of this one has started
    # and which has inherited the folder, is neither.
    own = noted in (str(os.getpid()), str(os.getppid()))
    return Path(folder, f"{launcher.rank}{suffix}") if own else None


def _write(note: Path | None, text: str = "") -> None:
    """Write a note at once: whoever sees it sees all of it."""
    if note is None:
        return
    draft = note.with_suffix(".draft")
    try:
        draft.write_text(text)
        draft.replace(note)
    except FileNotFoundError:  # `mpidist run` has taken its folder away: it is ending this process
        return


def _shared_memory() -> str:
    """Return the lines of this process's memory map that name shared memory."""
    try:
        with open("/proc/self/maps") as file:
            return "".join(line for line in file if " /dev/shm/" in line)
    except OSError:  # not Linux
        return ""
