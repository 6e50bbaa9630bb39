"""The notes in which launchers tell that a job has ended: held back, since ``mpidist run`` tells why in a line.

They are shown after all where nothing else tells why.  Other notes and lines pass at once.
"""

from __future__ import annotations

import re

#: Lines that begin and end a note: Open MPI's, and MPICH's.
_EDGE = re.compile(rb"-{74}|={83}")

#: How the first line of a note begins that says no more than that ranks have ended, and which.
_ENDS = re.compile(
    rb"MPI_ABORT was invoked on rank|(prterun|mpirun|mpiexec) (noticed that process|has exited due to process)"
    rb"|(prterun|mpirun|mpiexec) detected that one or more processes exited|Primary job +terminated normally"
    rb"|=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
)

#: The same without a note: what libevent says of files that a rank had open, and what MPICH says beside its note.
_LINE = re.compile(
    rb"\[warn\] Epoll |YOUR APPLICATION TERMINATED WITH THE EXIT STRING: |This typically refers to a problem with your"
    rb"|Please see the FAQ page for debugging suggestions|Abort\(-?\d+\) on node \d+ \(rank \d+ in comm "
)

#: A note of more lines is none that is known.
_MOST_LINES = 40


class LauncherNotes:
    """Takes the output of one process as lines, and holds back those that only tell that the job has ended.

    `held` is what was held back.
    """

    def __init__(self) -> None:
        self.held = b""
        self._edge, self._left = b"", 0

    def take(self, data: bytes) -> bytes:
        """Return what is to be shown of these whole lines."""
        return b"".join(map(self._passed, data.splitlines(keepends=True))) if data else b""

    def flush(self) -> bytes:
        """Return the edge of a note that has not come, and perhaps does not come."""
        edge, self._edge = self._edge, b""
        return edge

    def _passed(self, line: bytes) -> bytes:
        text = line.strip()
        if self._left:
            self.held += line
            self._left = 0 if _EDGE.fullmatch(text) else self._left - 1
            return b""
        if self._edge and _ENDS.match(text):
            self.held += self.flush() + line
            self._left = _MOST_LINES
            return b""
        before = self.flush()
        if _EDGE.fullmatch(text):
            self._edge = line
            return before
        if _LINE.match(text):
            self.held += line
            return before
        return before + line
