"""The output of every rank as a stream of its own, so that lines and tracebacks of several ranks do not get mixed.

Each rank writes into named pipes in a private folder; a shell line in front of the program connects them and is gone
(``exec``).  A rank that cannot reach the folder, on another machine, writes to the launcher as usual.
"""

from __future__ import annotations

import os
import re
import selectors
import shlex
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from mpidist.commands.launch.destinations import Terminal
from mpidist.commands.launch.launcher_notes import LauncherNotes
from mpidist.commands.launch.mpi_files import RUN, SEGMENTS
from mpidist.options import FAULT_TOLERANT
from mpidist.own_machine import BOOT_ID, PROCESS_NUMBERS, boot_id, process_numbers

#: Descriptors of standard output and standard error.
STDOUT, STDERR = 1, 2

#: What a rank's Python imports first is there; a job that goes on when a rank dies is not to be ended by it.
_PYTHON_START = shlex.quote(str(Path(__file__).with_name("python_start")))

#: Notes the process, connects the pipes there are, and takes the job's folder of shared memory if it is on this
#: machine; $0 is the folder, $1 the machine that it is of, the rest the program.  A file system that machines share
#: shows the folder on all of them, and there nobody reads its pipes.  MPICH gives ranks but 0 an input that never ends.
_CONNECT = f"""\
r="${{OMPI_COMM_WORLD_RANK:-${{PMI_RANK:-none}}}}"
here=/dev/null/$r  # where nothing can be
if [ "$({{ cat {BOOT_ID}; readlink {PROCESS_NUMBERS}; }} 2>/dev/null)" = "$1" ]; then here="$0/$r"; fi
shift
if [ -p "$here.2" ]; then echo $$ >"$here.process"; fi
if [ -p "$here.0" ]; then exec <"$here.0"; elif [ "$r" -gt 0 ] 2>/dev/null; then exec </dev/null; fi
if [ -p "$here.1" ]; then exec >"$here.1"; fi
if [ -p "$here.2" ]; then exec 2>"$here.2"; fi
s="{SEGMENTS}${{0##*/{RUN}}}"
if [ -d "$s" ]; then export OMPI_MCA_btl_sm_backing_directory="${{OMPI_MCA_btl_sm_backing_directory:-$s}}"; fi
p={_PYTHON_START}
if [ -d "$p" ] && [ "${{{FAULT_TOLERANT}:-0}}" = 0 ]; then
    export PYTHONPATH="$p${{PYTHONPATH:+:$PYTHONPATH}}" mpidist_notes="$here"
fi
"""

_READ_BYTES = 1 << 16


class Origin(NamedTuple):
    """Where output comes from: the rank, None for the launcher, and `STDOUT` or `STDERR`."""

    rank: int | None
    descriptor: int


class OutputStreams:
    """Named pipes for `ranks` ranks, and the launcher's own error output."""

    def __init__(
        self,
        ranks: int,
        descriptors: Sequence[int],
        destination: Terminal,
        error_fn: Callable[[int | None, str], None],
        tagged: re.Pattern[bytes] | None = None,
    ) -> None:
        self._ranks, self._destination, self._error_fn, self._tagged = ranks, destination, error_fn, tagged
        self._selector = selectors.DefaultSelector()
        self.folder = tempfile.mkdtemp(prefix=RUN)
        # lines whose end has not come: what is added to one is not to copy all of it
        self._shown: defaultdict[Origin, bytearray] = defaultdict(bytearray)
        self._errors: defaultdict[Origin, bytearray] = defaultdict(bytearray)
        self._notes: dict[Origin, LauncherNotes] = defaultdict(LauncherNotes)
        self._pipes = [self._add_pipe(Origin(rank, number)) for rank in range(ranks) for number in descriptors]

    def _add_pipe(self, source: Origin) -> int:
        path = os.path.join(self.folder, f"{source.rank}.{source.descriptor}")
        os.mkfifo(path, 0o600)
        # open for writing too: else the pipe reads as ended whenever no rank has it open
        pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._selector.register(pipe, selectors.EVENT_READ, source)
        return pipe

    @property
    def held_back(self) -> bytes:
        """What launchers and MPI have said of the end of the job, which has not been shown."""
        return b"".join(notes.held for notes in self._notes.values())

    def command(self, program: Sequence[str]) -> list[str]:
        """Return the command that runs `program` connected to its rank's pipes."""
        machine = "\n".join(filter(None, (boot_id(), process_numbers())))  # as the shell's line finds it
        # at a word ":" launchers begin another program
        hidden = f"set -- {shlex.join(program)}\n" if ":" in program else ""
        return ["sh", "-c", f'{_CONNECT}{hidden}exec "$@"', self.folder, machine, *([] if hidden else program)]

    def add_launcher(self, pipe: int, descriptor: int) -> None:
        """Read the launcher's own output, `STDOUT` or `STDERR`, from `pipe` too."""
        os.set_blocking(pipe, False)
        self._selector.register(pipe, selectors.EVENT_READ, Origin(None, descriptor))

    def watch(self, descriptor: int, came_fn: Callable[[], object]) -> None:
        """Call ``came_fn()`` from `pump` when `descriptor` can be read, in its turn among the output."""
        self._selector.register(descriptor, selectors.EVENT_READ, came_fn)

    def unwatch(self, descriptor: int) -> None:
        """Call no more for `descriptor`."""
        self._selector.unregister(descriptor)

    def rank_of_process(self) -> dict[int, int]:
        """Return the rank of every process that has been started, by its number; before `close`."""
        noted = {int(path.stem): path.read_text().strip() for path in Path(self.folder).glob("*.process")}
        return {int(process): rank for rank, process in noted.items() if process}

    def pump(self, timeout_seconds: float) -> bool:
        """Pass on what has come, waiting up to `timeout_seconds`; return whether anything came."""
        events = self._selector.select(timeout_seconds)
        came = [self._come(key.fd, key.data) for key, _ in events]
        if not events and self._destination.takes_parts:
            self._show_partial_lines()
        return any(came)

    def _come(self, descriptor: int, data: Origin | Callable[[], object]) -> bool:
        if isinstance(data, Origin):
            return self._read(descriptor, data)
        data()
        return True

    def _read(self, pipe: int, source: Origin) -> bool:
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:  # the launcher has closed its end
            self._selector.unregister(pipe)
            return False
        if source == Origin(None, STDERR):  # Open MPI's ends its messages as C does, and grep would see no text
            data = data.replace(b"\0", b"")
        self._show(source, data)
        if source.descriptor == STDERR or source.rank is None:
            self._pass_lines(source, data)
        return True

    def _show(self, source: Origin, data: bytes) -> None:
        """Show whole lines; a progress bar's lines end in carriage returns."""
        kept, lines = self._shown[source], b""
        end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if end:
            lines = bytes(kept) + data[:end]
            kept.clear()
        kept += data[end:]
        self._hand_over(source, self._notes[source].take(lines))

    def _hand_over(self, source: Origin, data: bytes) -> None:
        whole = source.rank is not None or self._tagged is None
        for part in [data] if whole else data.splitlines(keepends=True):
            if part:
                (rank, descriptor), text = self._origin(source, part)
                self._destination.take(rank, descriptor, text)

    def _origin(self, source: Origin, line: bytes) -> tuple[Origin, bytes]:
        """Return where a line comes from, and the line: the launcher tells of those that it passes on."""
        match = self._tagged.match(line) if self._tagged is not None and source.rank is None else None
        if match is None or int(match[1]) >= self._ranks:
            return source, line
        descriptor = {b"out": STDOUT, b"err": STDERR}.get(match[2], source.descriptor)
        return Origin(int(match[1]), descriptor), line[match.end() :]

    def _show_partial_lines(self) -> None:
        """Show what has come without the end of its line, a prompt or dots: nothing else is coming just now."""
        for source, notes in self._notes.items():
            self._hand_over(source, notes.flush() + bytes(self._shown.pop(source, b"")))

    def _pass_lines(self, source: Origin, data: bytes) -> None:
        kept = self._errors[source]
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._pass_line(source, bytes(kept) + line)
            kept.clear()
        kept += rest

    def _pass_line(self, source: Origin, line: bytes) -> None:
        origin, text = self._origin(source, line)
        if origin.rank is None or origin.descriptor == STDERR:
            self._error_fn(origin.rank, text.decode(errors="replace"))

    def close(self) -> None:
        """Pass on what is left, and give back the pipes."""
        while self.pump(0):
            pass
        self._show_partial_lines()
        for source, rest in self._errors.items():
            if rest:
                self._pass_line(source, bytes(rest))
        self._destination.close()
        self._selector.close()
        for pipe in self._pipes:
            os.close(pipe)
        shutil.rmtree(self.folder, ignore_errors=True)  # a process that cannot be ended may remove files of its own
