"""The error output of every rank as a stream of its own, so that tracebacks of several ranks do not get mixed.

Each rank writes into a named pipe in a private folder; a shell line in front of the program connects it and is gone
(``exec``).  A rank that cannot reach the folder, on another machine, writes to the launcher as usual.
"""

from __future__ import annotations

import os
import selectors
import shutil
import tempfile
from collections.abc import Callable, Sequence

#: Connects standard error and becomes the program; $0 is the folder, $@ the program.
_CONNECT = (
    'f="$0/${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-none}}"; if [ -p "$f" ]; then exec "$@" 2>"$f"; else exec "$@"; fi'
)

_READ_BYTES = 1 << 16


class ErrorStreams:
    """Named pipes for `ranks` ranks, and the launcher's own error output.

    Parameters
    ----------
    ranks : int
    echo_fn : callable
        ``echo_fn(data)`` is given everything that is to be shown, whole lines of one rank at a time.
    line_fn : callable
        ``line_fn(rank, line)`` is given every line; `rank` is None for the launcher's.

    Attributes
    ----------
    folder : str
        Where the pipes are.
    """

    def __init__(
        self, ranks: int, echo_fn: Callable[[bytes], None], line_fn: Callable[[int | None, str], None]
    ) -> None:
        self._echo_fn, self._line_fn = echo_fn, line_fn
        self._selector = selectors.DefaultSelector()
        self.folder = tempfile.mkdtemp(prefix="mpidist-run-")
        self._shown: dict[int | None, bytes] = {}
        self._parsed: dict[int | None, bytes] = {}
        self._descriptors = [self._add_pipe(rank) for rank in range(ranks)]

    def _add_pipe(self, rank: int) -> int:
        path = os.path.join(self.folder, str(rank))
        os.mkfifo(path, 0o600)
        # open for writing too: else the pipe reads as ended whenever no rank has it open
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._selector.register(descriptor, selectors.EVENT_READ, rank)
        return descriptor

    def command(self, program: Sequence[str]) -> list[str]:
        """Return the command that runs `program` with its standard error connected to its rank's pipe."""
        return ["sh", "-c", _CONNECT, self.folder, *program]

    def add_launcher(self, descriptor: int) -> None:
        """Read the launcher's own error output from this descriptor too."""
        os.set_blocking(descriptor, False)
        self._selector.register(descriptor, selectors.EVENT_READ, None)

    def pump(self, timeout_seconds: float) -> bool:
        """Pass on what has come, waiting up to `timeout_seconds`; return whether anything came."""
        events = self._selector.select(timeout_seconds)
        came = [self._read(key.fd, key.data) for key, _ in events]
        if not events:
            self._show_partial_lines()
        return any(came)

    def _read(self, descriptor: int, rank: int | None) -> bool:
        try:
            data = os.read(descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:  # the launcher has closed its end
            self._selector.unregister(descriptor)
            return False
        self._show(rank, data)
        self._parse(rank, data)
        return True

    def _show(self, rank: int | None, data: bytes) -> None:
        """Show whole lines; a progress bar's lines end in carriage returns."""
        data = self._shown.pop(rank, b"") + data
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if data[:end]:
            self._echo_fn(data[:end])
        if data[end:]:
            self._shown[rank] = data[end:]

    def _show_partial_lines(self) -> None:
        """Show what has come without the end of its line, a prompt or dots: nothing else is coming just now."""
        for data in self._shown.values():
            self._echo_fn(data)
        self._shown.clear()

    def _parse(self, rank: int | None, data: bytes) -> None:
        *lines, rest = (self._parsed.pop(rank, b"") + data).split(b"\n")
        for line in lines:
            self._line_fn(rank, line.decode(errors="replace"))
        self._parsed[rank] = rest

    def close(self) -> None:
        """Pass on what is left, and give back the pipes."""
        while self.pump(0):
            pass
        self._show_partial_lines()
        for rank, rest in self._parsed.items():
            if rest:
                self._line_fn(rank, rest.decode(errors="replace"))
        self._selector.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        shutil.rmtree(self.folder)
