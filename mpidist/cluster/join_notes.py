"""Notes that a rank leaves in the folder of ``mpidist run``: while MPI starts and the ranks meet, and at its end.

MPI waits in its start for all ranks, without a limit and without a word.  ``mpidist run`` reads the notes: it sees
which ranks wait, and which will never come because they have ended.  A launcher ends all ranks when one exits, and may
report another status than that one's: the status that a job has asked for is in a note too.  Under another launcher
there is no folder, and no notes: `start_deadline` speaks there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mpidist.cluster.launchers import Launcher
from mpidist.cluster.start_deadline import start_deadline
from mpidist.options import settings

#: Suffixes of the notes, after the rank: its process, noted where it is started; waiting for the others; met them; the
#: exit status that it has asked for; its program is over, and what is left is MPI's end.
PROCESS, JOINING, JOINED, EXIT, OVER = ".process", ".joining", ".joined", ".exit", ".over"


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


@contextmanager
def noting_exit(launcher: Launcher | None) -> Iterator[None]:
    """Note the exit status that the body asks for by SystemExit; Local."""
    try:
        yield
    except SystemExit as leaving:
        code = leaving.code
        status = 0 if code is None else code & 0xFF if isinstance(code, int) else 1  # as the interpreter makes it
        _write(_note(launcher, EXIT), str(status))
        raise


def asked_status(folder: str) -> int | None:
    """Return the exit status that the first rank with such a note has asked for, None if there is none; Local."""
    notes = sorted(Path(folder).glob(f"*{EXIT}"), key=lambda note: int(note.stem))
    return int(notes[0].read_text()) if notes else None


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
