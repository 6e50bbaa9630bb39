"""Where the output of the ranks goes: to the terminal, perhaps with the rank in front of each line, or into files."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from mpidist.errors import LaunchError


class Terminal:
    """Everything goes to this process's own output."""

    def __init__(self, has_tags: bool = False) -> None:
        self._has_tags = has_tags
        self.takes_parts = not has_tags
        self.unread = False

    def take(self, rank: int | None, descriptor: int, data: bytes) -> None:
        """Show lines of a rank, or of the launcher if it is None, on this descriptor."""
        if self._has_tags and rank is not None:
            data = b"".join(b"[%d] %s" % (rank, line) for line in data.splitlines(keepends=True))
            data += b"" if data.endswith((b"\n", b"\r")) else b"\n"
        self.show(descriptor, data)

    def show(self, descriptor: int, data: bytes) -> None:
        """Write all of `data`, at once, as long as somebody reads it."""
        left = memoryview(data)
        while left and not self.unread:
            try:
                left = left[os.write(descriptor, left) :]
            except BlockingIOError:  # who started this process has made its output so, as Node.js does
                select.select([], [descriptor], [])
            except BrokenPipeError:
                self.unread = True

    def close(self) -> None:
        """Take no more."""


class LogFiles(Terminal):
    """What ranks print goes to the end of a file for each, ``rank3.log``; what the launcher says is shown."""

    def __init__(self, folder: str, ranks: int) -> None:
        super().__init__()
        self._files: list[BinaryIO] = []
        try:
            os.makedirs(folder, exist_ok=True)
            for rank in range(ranks):
                # at the end: a job that is started again must not lose what it had said before
                self._files.append(open(Path(folder, f"rank{rank}.log"), "ab"))  # noqa: SIM115 - until close
        except OSError as error:
            self.close()
            raise LaunchError(f"--log-dir {folder}: {error}") from error

    def take(self, rank: int | None, descriptor: int, data: bytes) -> None:
        """Write the lines to the rank's file; show them where that fails, as on a full disk."""
        if rank is None:
            self.show(descriptor, data)
            return
        file = self._files[rank]
        try:
            file.write(data)
            file.flush()
        except OSError as error:
            self.show(descriptor, f"mpidist run: {file.name}: {error}\n".encode() + data)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            with suppress(OSError):  # what could not be written has been shown
                file.close()
