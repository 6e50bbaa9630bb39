"""Run a launcher to its end: show its output, pass signals on, leave no process behind."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType

from mpidist.cluster.join_notes import asked_status
from mpidist.commands.launch.destinations import Terminal
from mpidist.commands.launch.failures import FailedRank, FailureLog
from mpidist.commands.launch.launcher_notes import LauncherNotes
from mpidist.commands.launch.leftovers import Leftovers
from mpidist.commands.launch.mpi_files import open_mpi_folders, remove_segments
from mpidist.commands.launch.output_streams import STDERR, STDOUT, OutputStreams
from mpidist.commands.launch.rank_deaths import KilledRanks, RankDeath, RankDeaths
from mpidist.commands.launch.rank_processes import end_processes, ranks_of, send
from mpidist.commands.launch.start_up import StartUp
from mpidist.commands.launch.watchdog import OVER, start_watchdog
from mpidist.options import RUN_FOLDER, RUN_TOKEN, settings

#: Exit status of a job that was ended because its time was up, as of timeout(1).
TIMED_OUT = 124

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_FATAL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_TURN_SECONDS = 0.05

#: How long a launcher that is told to end may take to clean up behind its ranks.
_GRACE_SECONDS = 2.0

#: Lines of a rank's error output that are kept to be shown where it goes to a file.
_LAST_LINES = 20

#: How long a launcher may take to end after its ranks have, or after MPI has said that it ends the job.  It may never
#: do: over several hosts, or where all ranks fail at once, upon which Open MPI's can wait on a lock of its own.
_ENDING_SECONDS = 10.0

#: The descriptor of standard input.
_STDIN = 0

_READ_BYTES = 1 << 16

#: How often it is looked whether a terminal's input is for this process.
_LOOK_SECONDS = 0.1


@dataclass
class Ended:
    """How a job ended."""

    status: int  # exit status for the shell: 128 + n when signal n ended it
    failure: FailedRank | None = field(default=None, repr=False)  # the first that a rank told in its error output
    death: RankDeath | None = None  # the rank whose end, of which it could not tell itself, ended the job
    timed_out: bool = False
    interrupted: bool = False  # whether a signal that ends programs was passed on
    unread: bool = False  # whether nobody read the output any more: as of any program in a pipe, that is the end of it
    # true for a job that goes on without a rank that others can do without; the ends of ranks have been told
    tolerant: bool = False
    lost: int = 0  # the signal that ended the launcher itself; 0 if none did
    stuck: str = ""  # why the job was ended from here, in MPI's start-up or after its end; empty if it was not
    removed: list[str] = field(default_factory=list)  # files that MPI had left behind
    lines_after: int = 0  # of error output that were shown after `failure`
    held_back: str = ""  # what the launcher and MPI have said of the end, where nothing else tells of it
    # the last ones of the error output of the rank that ended first, if a rank is known to have done so
    last_lines: list[str] = field(default_factory=list, repr=False)


def supervise(
    launcher: Sequence[str],
    program: Sequence[str],
    ranks: int,
    environ: Mapping[str, str],
    timeout_seconds: float | None = None,
    terminal: bool = False,
    destination: Terminal | None = None,
    tagged: re.Pattern[bytes] | None = None,
    takes_input: bool = True,
) -> Ended:
    """Run ``launcher program`` to its end from the main thread; with `terminal` the launcher shows standard output.

    With `takes_input` rank 0 takes standard input here, else by way of the launcher: it may be on another machine.
    """
    # a launcher gives its ranks a terminal of its own, in which progress bars move; else lines are kept whole
    descriptors = (STDERR,) if terminal else (STDOUT, STDERR)
    job = _Job(launcher, program, ranks, environ, descriptors, destination or Terminal(), tagged, takes_input)
    try:
        with _signals(job):
            job.wait(timeout_seconds)
    finally:
        job.end()
    return job.ended()


class _Job:
    """A launcher, its ranks, and the watchdog that ends them if this process is killed."""

    def __init__(
        self,
        launcher: Sequence[str],
        program: Sequence[str],
        ranks: int,
        environ: Mapping[str, str],
        descriptors: Sequence[int],
        destination: Terminal,
        tagged: re.Pattern[bytes] | None,
        takes_input: bool,
    ) -> None:
        self.token = uuid.uuid4().hex
        self.failures = FailureLog()
        self.lines = 0  # of error output that have been shown
        self.notes: dict[int | None, LauncherNotes] = defaultdict(LauncherNotes)
        self.killed = KilledRanks()
        self.passed_on: list[int] = []
        self.timed_out, self.outlived, self.stuck = False, False, ""
        self._ending_since: float | None = None
        self._asked: int | None = None
        chosen = settings(environ)
        self.tolerant = chosen.fault_tolerant
        self.last_lines: dict[int, deque[str]] = defaultdict(lambda: deque(maxlen=_LAST_LINES))
        self.destination = destination
        self.streams = OutputStreams(ranks, descriptors, destination, self._take_line, tagged)
        self.deaths = RankDeaths(ranks, self.streams.rank_of_process, self.streams)
        self.start_up = StartUp(self.streams.folder, ranks, chosen)
        self.leftovers = Leftovers(self.token)
        self.removed: list[str] = []
        folder = self.streams.folder
        self.watchdog = start_watchdog(self.token, folder)
        variables = {**environ, RUN_TOKEN: self.token, RUN_FOLDER: folder}
        variables |= open_mpi_folders(launcher, environ, folder)
        self.process = self._started(launcher, program, variables, STDOUT in descriptors, takes_input)
        for pipe, descriptor in ((self.process.stdout, STDOUT), (self.process.stderr, STDERR)):
            if pipe is not None:
                self.streams.add_launcher(pipe.fileno(), descriptor)

    def _started(
        self,
        launcher: Sequence[str],
        program: Sequence[str],
        environ: Mapping[str, str],
        takes_output: bool,
        takes_input: bool,
    ) -> subprocess.Popen[bytes]:
        """Return the launcher's process."""
        pipe = os.path.join(self.streams.folder, f"{0 if takes_input else 'launcher'}.{_STDIN}")
        _start_input(pipe)
        # a session of its own: a Ctrl-C at the terminal reaches the job through this process only, once
        with open(os.devnull if takes_input else pipe, "rb", buffering=0) as source:
            return subprocess.Popen(
                [*launcher, *self.streams.command(program)],
                env=dict(environ),
                stdin=source,
                stdout=subprocess.PIPE if takes_output else None,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )

    def _take_line(self, rank: int | None, line: str) -> None:
        self.lines += self.notes[rank].take(f"{line}\n".encode()).count(b"\n")
        self.failures.feed(rank, line, self.lines)
        self.killed.feed(rank, line)
        if rank is not None:
            self.last_lines[rank].append(line)

    def wait(self, timeout_seconds: float | None) -> None:
        """Show the job's output until the launcher has ended, or end it when its time is up."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self.process.poll() is None and not (self.stuck or self.outlived or self.destination.unread):
            self.deaths.look()
            came = self.streams.pump(_TURN_SECONDS)
            self._tell_deaths()
            now = time.monotonic()
            self.leftovers.look_at(now)
            self._judge_start_up(now)
            self._judge_end(now, came)
            if deadline is not None and now > deadline:
                self.timed_out = True
                break

    def _tell_deaths(self) -> None:
        """Say which ranks have ended too early, where the others go on."""
        for death in self.deaths.news() if self.tolerant else ():
            if death.by_signal or not self.failures.framed():  # else it has told of its end itself
                print(f"mpidist run: {death.describe()}; the job goes on if it can do without", file=sys.stderr)

    def _judge_start_up(self, now: float) -> None:
        verdict = self.start_up.look(now)
        if verdict is not None and verdict.fatal:
            self.stuck = verdict.message
        elif verdict is not None:
            print(f"mpidist run: warning: {verdict.message}", file=sys.stderr)

    def _judge_end(self, now: float, came: bool) -> None:
        ended = self.deaths.all_ended()
        if not (ended or self.killed.ending):
            return
        if ended and (came or _stands((STDOUT, STDERR))):  # the launcher may still have something to show
            self._ending_since = now
        self._ending_since = self._ending_since or now
        if now - self._ending_since <= _ENDING_SECONDS or self.process.poll() is not None:
            return  # it may have ended while this process could not write, or was stopped
        if ended:
            self.outlived = True
            late = f"the launcher did not end within {_ENDING_SECONDS:g} s after all ranks had, and was ended"
            print(f"mpidist run: warning: {late}", file=sys.stderr)
        else:
            self.stuck = (
                "a connection between ranks broke, as when one is killed, and MPI ended the job; its launcher did not "
                f"end within {_ENDING_SECONDS:g} s, and was ended"
            )

    def pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Send a signal to the ranks; a second Ctrl-C ends them."""
        again = signum == signal.SIGINT and signum in self.passed_on
        self.passed_on.append(signum)
        if again:
            end_processes(self.token)
            return
        # straight to the ranks: Open MPI's launcher would kill them on SIGINT and SIGTERM without letting them know
        for pid in ranks_of(self.token) or [self.process.pid]:
            send(pid, signum)

    def end(self) -> None:
        """End what is left of the job: the launcher first, which knows what to clean up."""
        deadline = time.monotonic() + _GRACE_SECONDS
        if self.process.poll() is not None:
            self.streams.pump(0)  # the last ranks may have ended since
            self._tell_deaths()
        self.deaths.close()
        self.leftovers.look()  # while there are processes that show what they use
        if self.process.poll() is None:
            self.process.terminate()
        while self.process.poll() is None and time.monotonic() < deadline:
            self.streams.pump(_TURN_SECONDS)
        left = end_processes(self.token)
        self.process.wait()
        self.leftovers.take_notes(self.streams.folder)
        self._asked = asked_status(self.streams.folder)
        self.removed = self.leftovers.remove()
        remove_segments(self.streams.folder)
        self.streams.close()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.watchdog.communicate(OVER)
        if left:
            print(f"mpidist run: processes {left} could not be ended", file=sys.stderr)

    def ended(self) -> Ended:
        """Return how the job ended."""
        interrupted = any(signum in _FATAL for signum in self.passed_on)
        # who ended because it was told to is not to blame; neither are ranks that have lost their launcher
        told_to = interrupted or self.timed_out or self.stuck or self.destination.unread or self._asked is not None
        lost = 0 if told_to else max(0, -self._returned())
        failure, death = (self.failures.first(), None) if told_to or lost else self._blame()
        status = self._status(interrupted, death)
        ways = (self.timed_out, interrupted, self.destination.unread, self.tolerant)
        lines = self.last_lines[death.ranks[0]] if death is not None and len(death.ranks) == 1 else ()
        shown = None if self.tolerant else death
        after = self.lines - failure.shown if failure is not None else 0
        held = "" if told_to or lost or failure or death else self.streams.held_back.decode(errors="replace")
        return Ended(status, failure, shown, *ways, lost, self.stuck, self.removed, after, held, list(lines))

    def _blame(self) -> tuple[FailedRank | None, RankDeath | None]:
        """Return the failure and the death that ended the job; one that explains the other stands alone."""
        failure = self.failures.first()
        if failure is not None and failure.framed:
            # it names the rank that it is about; the ends of all others follow from it
            cause = failure.cause()
            if cause is None or cause.did != "died":  # it was there to tell of its end itself
                return failure, None
            said = self.killed.first
            return failure, said if said is not None and said.ranks == (cause.rank,) else self.deaths.of(cause.rank)
        death = self._first_death()
        if death is None or death.by_signal:
            return failure, death
        own = self.failures.first(death.ranks)
        if own is not None:
            return own, None
        return failure, death if failure is None or death.status is not None else None

    def _first_death(self) -> RankDeath | None:
        said = self.killed.first
        if said is not None and said.ranks:
            return said
        if self.killed.aborted:  # the launcher tells of it, and ends the ranks in any order
            return None
        seen = self.deaths.first()
        if seen is not None and seen.status is None and said is not None:  # it ended before it was watched
            seen = replace(seen, status=said.status)
        # that nobody knows how a rank has ended is no news of a job that went well
        return None if seen is not None and seen.status is None and self._returned() == 0 else seen or said

    def _status(self, interrupted: bool, death: RankDeath | None) -> int:
        status = self._returned()
        if self.timed_out:
            return TIMED_OUT
        if self._asked is not None:
            return self._asked
        if status != 0 and interrupted:
            return self._own_status() or 128 + next(signum for signum in self.passed_on if signum in _FATAL)
        if self.destination.unread:
            return 128 + signal.SIGPIPE
        if self.stuck:
            return 1
        failed = self.failures.framed() or self.killed.host_lost
        if self.tolerant and (status != 0 or not self.deaths.all_ended_badly()):
            return 1 if status == 0 and failed else status if status >= 0 else 128 - status
        if death is not None and death.shell_status is not None:  # launchers mix the statuses of several ranks
            return death.shell_status
        if status == 0 and failed:  # Open MPI 5.0.11 can exit 0 although a rank was lost, or a whole host
            return 1
        return 128 - status if status < 0 else status

    def _returned(self) -> int:
        """Return the launcher's status; where it was ended after its ranks, theirs."""
        if not self.outlived:
            return self.process.returncode
        if self.tolerant and not self.deaths.all_ended_badly():
            return 0  # the others did without who is dead
        first = self.deaths.first()
        return 0 if first is None else 1 if first.shell_status is None else first.shell_status

    def _own_status(self) -> int:
        """Return the exit status that a rank which was told to end has chosen; 0 if none has: 1 is any exception's."""
        first = self.deaths.first()
        status = 0 if first is None or first.status is None else first.status
        return status if status > 1 else 0


def _stands(descriptors: Sequence[int]) -> bool:
    """Whether nobody takes what is written there now, as on a terminal after Ctrl-S."""
    try:
        return len(select.select([], descriptors, [], 0)[1]) < len(descriptors)
    except OSError:  # one is closed
        return False


def _start_input(path: str) -> None:
    """Pass standard input on to rank 0 from a thread, as mpirun does: through a named pipe, which is made at `path`.

    Rank 0 finds its end where it is at its end here, or where there is none.  A rank 0 on another machine cannot reach
    the pipe: the launcher has it then, and passes it on.
    """
    is_there = sys.stdin is not None  # else the descriptor is another file's
    os.mkfifo(path, 0o600)
    # A daemon: it may be waiting for input, or for rank 0, when the job is over.
    threading.Thread(target=_pass_input, args=(path, is_there), name="mpidist-input", daemon=True).start()


def _pass_input(path: str, is_there: bool) -> None:
    with suppress(OSError):  # the folder is gone, rank 0 has ended, or there is no more input
        pipe = os.open(path, os.O_WRONLY)
        try:
            while is_there and (data := _read()):
                while data:
                    data = data[os.write(pipe, data) :]
        finally:
            os.close(pipe)


def _read() -> bytes:
    """Return what comes next; nothing at the end."""
    while os.isatty(_STDIN) and not (_may_read() and select.select([_STDIN], [], [], _LOOK_SECONDS)[0]):
        threading.Event().wait(_LOOK_SECONDS)
    select.select([_STDIN], [], [])  # who started this process may have made it so that a read does not wait
    return os.read(_STDIN, _READ_BYTES)


def _may_read() -> bool:
    """Return whether the terminal lets this process read: it stops a job in the background that tries to."""
    try:
        return os.tcgetpgrp(_STDIN) == os.getpgrp()
    except OSError:  # it is not the terminal of this session, and stops nobody in it
        return True


@contextmanager
def _signals(job: _Job) -> Iterator[None]:
    """Pass the signals that this process gets on to the job, but under nohup leave a lost terminal unnoticed."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    before = {signum: signal.signal(signum, job.pass_on) for signum in _PASSED_ON if signum not in ignored}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
