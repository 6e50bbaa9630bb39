"""The control channel: how ranks know of each other while they wait, so that no rank waits forever.

Every collective call has a number, counted alike on all ranks, and a digest of what it works on.  A rank posts both
on the status board of its node before it moves data.  Every waiting loop calls `Watch.tick`, which looks at the board
(has a rank failed, left, been killed?) and at the clock (is it time to warn, has the deadline passed?).  Between nodes
a `Messenger` carries the same facts.  Nothing here blocks, and nothing is done by a second thread.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from mpidist.errors import MpidistError, RankFailedError, RemoteReplicaError, TransportError, TransportTimeoutError
from mpidist.options import Settings, settings
from mpidist.runtime import board as states
from mpidist.runtime.board import StatusBoard, fence
from mpidist.runtime.missed_calls import MissedCalls
from mpidist.runtime.stall import Arbiter, Messenger
from mpidist.runtime.turnstile import Turnstile

#: Turns of a waiting loop between two looks at the alarm word, and seconds between two looks at clock and processes.
_LOOK_TURNS = 64
_LOOK_SECONDS = 0.05
#: A rank that comes a little earlier than another looks so often before its first look around, which takes longer.
_SPINS = range(50)
#: Seconds of waiting after which a rank sleeps between looks instead of spinning, and for how long.
_PATIENCE_SECONDS = 0.1
_NAP_SECONDS = 0.0002
#: A rank that waits says so every `_LOOK_SECONDS`.  One that has come and is silent for this long does not wait.
_SILENT_SECONDS = 2.0


class ControlChannel:
    """What one rank knows and tells about the state of all ranks.

    Parameters
    ----------
    rank, size : int
        Place in the world, and its size.
    board : StatusBoard
        Shared with the ranks in `board_ranks`.
    board_ranks : sequence of int
        World ranks of the board's lines.
    hosts : sequence of str, optional
        Host of every world rank, for messages.
    messenger : Messenger, optional
        Carries notices to ranks that do not share the board.
    pause : callable, optional
        Called in every turn of a waiting loop to let others run; None to spin, where cores suffice.
    whole : ControlChannel, optional
        Of the world that this one's ranks are a part of: its fate is theirs.
    members : sequence of int, optional
        By rank of this channel: its rank in `whole`.

    Attributes
    ----------
    call : int
        Number of the last collective call begun by this rank.
    turnstile : Turnstile
        To be entered around every collective call.
    vital_ranks : frozenset of int
        The ranks that a fault-tolerant job cannot do without; to be set alike on all ranks.  While it is empty, the job
        can do without none.
    duties : dict of int to (str, str)
        By rank, where it has one of its own: what it is, such as "ps 1", and what to do when it has died.
    missed : MissedCalls
        The calls that this rank, or others, do not make because the function given to `run` raised there.
    broken : MpidistError or None
        The error that ended the channel, None while it works.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        board: StatusBoard,
        board_ranks: Sequence[int],
        *,
        hosts: Sequence[str] = (),
        messenger: Messenger | None = None,
        pause: Callable[[], object] | None = None,
        chosen: Settings | None = None,
        whole: ControlChannel | None = None,
        members: Sequence[int] = (),
    ) -> None:
        self.rank = rank
        self.size = size
        self._whole = whole
        self._parts: list[ControlChannel] = []
        self._world_ranks = tuple(whole.world_rank(member) for member in members) if whole else tuple(range(size))
        self.world_size: int = whole.world_size if whole else size
        if whole is not None:
            whole._parts.append(self)
        self.board = board
        self.board_ranks = tuple(board_ranks)
        self.hosts = tuple(hosts)
        self.pause = pause
        self.settings = settings() if chosen is None else chosen
        self.call = 0
        self.vital_ranks: frozenset[int] = frozenset()
        self.duties: dict[int, tuple[str, str]] = {}
        self._lost: dict[int, str] = {}
        self.turnstile = Turnstile(self)
        self.missed = MissedCalls(self)
        self._what = ""
        self.line = self.board_ranks.index(rank)
        self.arbiter = Arbiter(self, messenger) if messenger is not None else None
        self.broken: MpidistError | None = None
        self._own_words = board.call_words(self.line)
        lines = [line for line in range(board.lines) if line != self.line]
        self._peer_words = tuple(tuple(board.call_words(line)[parity] for line in lines) for parity in (0, 1))
        board.sign_on(self.line)

    @classmethod
    def alone(cls, chosen: Settings | None = None) -> ControlChannel:
        """Return the channel of a world of one rank."""
        return cls(0, 1, StatusBoard(bytearray(StatusBoard.nbytes(1)), 1), [0], chosen=chosen)

    @classmethod
    def for_threads(cls, size: int, hosts: Sequence[str] = (), chosen: Settings | None = None) -> list[ControlChannel]:
        """Return one channel a rank for a world whose ranks are threads of this process."""
        board = StatusBoard(bytearray(StatusBoard.nbytes(size)), size)
        ranks = range(size)
        return [cls(rank, size, board, ranks, hosts=hosts, pause=_let_threads_run, chosen=chosen) for rank in ranks]

    # -- calls ----------------------------------------------------------------------------------------------------

    def begin(self, what: str, digest: int, timeout_seconds: float | None = None) -> Watch:
        """Number a collective call, post it with its `digest` on the board, and return the watch over its waits.

        Local; inside the `turnstile`.
        """
        self._what = what
        self.call += 1
        self.board.post(self.line, self.call, digest)
        return Watch(self, what, timeout_seconds, self.call)

    def meet(self, watch: Watch) -> bool:
        """Wait until every rank of the board has come to this call; return whether all digests are the same.

        Raises
        ------
        RemoteReplicaError
            A rank misses this call because the function given to `run` raised there; all ranks that come raise this.
        """
        words, parity = self.board.words, watch.call & 1
        mine = words[self._own_words[parity] + 1]
        for word in self.gather(watch):
            if words[word + 1] != mine:
                remote = self.missed.error(watch)
                if remote is not None:
                    raise remote
                return False
        return True

    def gather(self, watch: Watch) -> tuple[int, ...]:
        """Wait until every rank of the board has come to this call; return where the others have posted it."""
        words, call = self.board.words, watch.call
        peers = self._peer_words[call & 1]
        for word in peers:
            if words[word] < call:
                self._await(word, watch)
        fence()
        return peers

    def _await(self, word: int, watch: Watch) -> None:
        """Wait until another rank has posted the call of `watch` in that word."""
        words, call = self.board.words, watch.call
        for _ in _SPINS if self.pause is None else ():
            if words[word] >= call:
                return
        while words[word] < call:
            watch.tick()

    def watch(self, what: str, timeout_seconds: float | None = None) -> Watch:
        """Return a watch over waits that belong to no numbered call."""
        return Watch(self, what, timeout_seconds, 0)

    @contextmanager
    def deadline(self, timeout_seconds: float | None) -> Iterator[None]:
        """Give calls and waits that name no deadline this one, for a while; None leaves theirs.  Local."""
        before = self.settings
        if timeout_seconds is not None:
            self.settings = replace(before, timeout_seconds=timeout_seconds)
        try:
            yield
        finally:
            self.settings = before

    def call_watch(self, what: str) -> Watch:
        """Return a watch over further waits for the call that this rank has posted last."""
        return Watch(self, what, None, self.call)

    # -- what this rank says ----------------------------------------------------------------------------------------

    def fail(self, text: str, tell: bool = True) -> None:
        """Tell all ranks that this one has failed, with the text of its error; Local.

        Without `tell` only those of the board learn it: for errors that every rank raises on its own account.
        """
        if self.board.state(self.line) != states.EXPIRED:  # then the others raise that error, not this consequence
            self.board.set_state(self.line, states.FAILED, text)
        if tell and self.arbiter is not None:
            self.arbiter.tell_failed(text)
        for part in self._parts:
            part.fail(text, tell)

    def leave(self) -> None:
        """Tell all ranks that this one takes part in no further call; Local."""
        if self.board.state(self.line) == states.RUNNING:
            self.board.set_state(self.line, states.LEFT)
            if self.arbiter is not None:
                self.arbiter.tell_left()
        for part in self._parts:
            part.leave()

    def end(self) -> None:
        """Say that this rank prints nothing more: who waits to print last may go on."""
        self.board.set_quiet(self.line)
        for part in self._parts:
            part.end()

    def deadline_text(self, what: str, call: int, waited: float) -> str:
        """Return what is said when the deadline of a call has passed: who is missing, and what to do."""
        return (
            f"{what} (call {call}) waited {waited:.1f} s for {self.awaited(call, waited)}. "
            "Every rank must make the same calls in the same order; look at what those ranks do instead "
            "(py-spy dump), or give more time with timeout_seconds or MPIDIST_TIMEOUT_SECONDS"
        )

    def expire(self, text: str) -> MpidistError:
        """Tell the ranks of the board that a deadline has passed, and return the error that all of them raise."""
        self.board.set_state(self.line, states.EXPIRED, text)
        return self.breaks(self.error(TransportTimeoutError, text))

    # -- what this rank knows -----------------------------------------------------------------------------------------

    def world_rank(self, rank: int) -> int:
        """Return the number in the world of a rank of this channel, which may be of a part of it."""
        return self._world_ranks[rank]

    @property
    def own_name(self) -> str:
        """How messages of this rank begin."""
        return f"rank {self.world_rank(self.rank)} of {self.world_size}"

    def name(self, rank: int) -> str:
        """Return how messages call a rank: its number in the world, and its host where that is known."""
        number = self.world_rank(rank)
        return f"rank {number} ({self.hosts[rank]})" if rank < len(self.hosts) else f"rank {number}"

    def missing(self, call: int) -> list[int]:
        """Return the ranks, as far as this one knows, that have not come to `call`."""
        here = [r for line, r in enumerate(self.board_ranks) if self.board.call(line) < call]
        return sorted(here + (self.arbiter.missing(call) if self.arbiter is not None else []))

    def silent(self, call: int, waited: float) -> list[int]:
        """Return the ranks that have come to `call` and do not wait in it, as far as this one knows.

        Parameters
        ----------
        call : int
        waited : float
            Seconds that this rank has waited.
        """
        if not call:
            return []
        least = min(_SILENT_SECONDS, waited / 2)
        found = [rank for rank, seconds in self.silences() if seconds > least and rank != self.rank]
        return sorted(found + (self.arbiter.silent(least) if self.arbiter is not None else []))

    def silences(self) -> list[tuple[int, float]]:
        """Return each rank of the board, and for how many seconds it has not said that it waits."""
        return [(rank, self.board.silent_seconds(line)) for line, rank in enumerate(self.board_ranks)]

    def awaited(self, call: int, waited: float) -> str:
        """Return whom a rank waits for that has waited so many seconds in `call`, for messages."""
        if missing := self.missing(call):
            return _listed(missing, self.name)
        if silent := self.silent(call, waited):
            names = _listed(silent, self.name)
            return f"{names}, which came to this call and does not move on in it (stopped, swapped out, in a debugger)"
        return "a message (all ranks have come, and wait)"

    def dead(self) -> list[int]:
        """Return the ranks of the board whose processes are gone without having said that they leave."""
        silent = (states.UNKNOWN, states.RUNNING)
        return [
            rank
            for line, rank in enumerate(self.board_ranks)
            if self.board.state(line) in silent and not self.board.quiet(line) and not self.board.alive(line)
        ]

    def failure(self, watch: Watch) -> MpidistError | None:
        """Return the error that a rank waiting in `watch` must raise because of another rank, if any.

        A deadline comes first: all ranks raise it alike, and the late rank may have left by now.  A rank that left or
        was killed comes before those that failed, since they may have failed because of it.
        """
        seen = [(line, rank, self.board.state(line)) for line, rank in enumerate(self.board_ranks) if rank != self.rank]
        for line, rank, state in seen:
            if state == states.EXPIRED:
                return self.error(TransportTimeoutError, f"{self.name(rank)} gave up: {self.board.text(line)}")
        for line, rank, state in seen:
            if state == states.LEFT and self.board.call(line) < watch.call:
                return self.left(rank, self.board.call(line), watch)
            # Between nodes a rank joins a call that it missed at its next one; who leaves makes none.
            if state == states.LEFT and self.arbiter is not None and (remote := self.missed.error_of(rank, watch)):
                return remote
        dead = self.killed(watch)
        if dead is not None:
            return dead
        # A rank that has come to a later call has done its part of this one: whoever is to blame is met there.
        failed = [
            (rank, self.board.text(line))
            for line, rank, state in seen
            if state == states.FAILED and not 0 < watch.call < self.board.call(line)
        ]
        if failed:
            # Who only failed because another did says so in its last line.
            return self.failed(*min(failed, key=lambda pair: is_consequence(pair[1])), watch)
        return self.arbiter.failure(watch) if self.arbiter is not None else None

    def note_lost(self, rank: int, why: str) -> None:
        """Take note that a rank of another board is gone, which its transport has found out.  Local."""
        self._lost[rank] = why

    def vital_failure(self, watch: Watch) -> MpidistError | None:
        """Return the error that names a rank which this job cannot do without, and which has failed or was killed."""
        for rank in sorted(self.vital_ranks - {self.rank}):
            if rank in self.board_ranks:
                line = self.board_ranks.index(rank)
                state = self.board.state(line)
                if state in (states.FAILED, states.EXPIRED):
                    return self.failed(rank, self.board.text(line), watch)
                if state != states.LEFT and not self.board.alive(line):
                    return self.died(rank, watch)
            elif rank in self._lost and not self._has_left(rank):
                return self.loss(rank, f"died in {watch.what}: {self._lost[rank]}")
            elif self.arbiter is not None and rank in self.arbiter.failed_texts:
                return self.failed(rank, self.arbiter.failed_texts[rank], watch)
        return None

    def _has_left(self, rank: int) -> bool:
        """Whether a rank of another board has said that it leaves; it may be gone when that is read."""
        if self.arbiter is None:
            return False
        self.arbiter.poll()
        return rank in self.arbiter.left_ranks

    @property
    def goes_on(self) -> bool:
        """Whether the job goes on, as far as is known, when this rank leaves it: others can do without it."""
        if not self.settings.fault_tolerant or not self.vital_ranks or self.rank in self.vital_ranks:
            return False
        return self.vital_failure(self.watch("")) is None

    def failure_outside(self, watch: Watch) -> MpidistError | None:
        """Return the error of a rank that waits in a part of the world, when a rank outside of it has failed.

        None where the job goes on without that rank.
        """
        if self._whole is None or self.settings.fault_tolerant:
            return None
        return self._whole.failure(Watch(self._whole, watch.what, 0, 0))

    def killed(self, watch: Watch) -> MpidistError | None:
        """Return the error that names a rank of the board whose process is gone, if there is one."""
        return next((self.died(rank, watch) for rank in self.dead()), None)

    def died(self, rank: int, watch: Watch) -> MpidistError:
        """Return the error that names a rank of the board whose process is gone, or about to be."""
        text = f"its process {self.board.pid(self.board_ranks.index(rank))} is gone (killed, or out of memory)"
        return self.loss(rank, f"died in {watch.what}: {text}")

    def loss(self, rank: int, how: str) -> MpidistError:
        """Return the error that names a rank that is gone, and says what to do where it had a duty."""
        if rank not in self.duties:
            return self.error(RankFailedError, f"{self.name(rank)} {how}", rank)
        title, remedy = self.duties[rank]
        return self.error(RankFailedError, f"{title} ({self.name(rank)}) {how}. {remedy}", rank)

    def error(self, kind: Callable[..., MpidistError], text: str, *rest: int) -> MpidistError:
        """Return an error that begins with this rank's name; what else there is, is the rank that it is about."""
        return kind(f"{self.own_name}: {text}", *map(self.world_rank, rest))

    def breaks(self, error: MpidistError) -> MpidistError:
        """Remember `error` as the end of the channel and return it: every later call raises it again.

        It is the end of the whole world's channel too, and of those of its other parts.
        """
        if self._whole is not None:
            return self._whole.breaks(error)
        for channel in self._family():
            channel.broken = error
        return error

    def _family(self) -> Iterator[ControlChannel]:
        """Yield this channel and those of its parts."""
        yield self
        for part in self._parts:
            yield from part._family()

    def warn(self, text: str) -> None:
        """Print a warning of this rank, now."""
        print(f"mpidist: {self.own_name}: {text}", file=sys.stderr, flush=True)

    def break_off(self, error: BaseException) -> None:
        """End the channel because `error` was raised in the middle of a call; the others are told.  Local."""
        if self.broken is None and self.size > 1:
            cause = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            text = f"{self._what} (call {self.call}) was broken off by {cause}"
            self.fail(text)
            self.breaks(self.error(TransportError, f"{text}; the ranks no longer agree on where they are: end the job"))

    def again(self) -> MpidistError:
        """Return the error that ended the channel, once more."""
        error = self.broken
        assert error is not None
        if isinstance(error, RemoteReplicaError):
            return RemoteReplicaError(str(error), error.rank, error.cause, error.call)
        arguments = (error.rank,) if isinstance(error, RankFailedError) else ()
        return type(error)(str(error), *arguments)

    def failed(self, rank: int, text: str, watch: Watch) -> MpidistError:
        """Return the error of a rank that waits for one that has failed with the traceback `text`."""
        remote = self.missed.error_of(rank, watch)
        if remote is not None:
            return remote
        what = f"{self.name(rank)} failed while this rank was in {watch.what}: {last_line(text)}"
        return self.error(RankFailedError, what, rank)

    def left(self, rank: int, call: int, watch: Watch) -> MpidistError:
        """Return the error of a rank that waits for one that has left after `call` calls."""
        text = (
            f"{self.name(rank)} left (its program ended, or called sys.exit) after {call} collective calls, "
            f"while this rank is in call {watch.call}, {watch.what}; every rank must make the same calls"
        )
        return self.error(RankFailedError, text, rank)


class Watch:
    """One eye on the control channel during the waits of one call.

    Parameters
    ----------
    control : ControlChannel
    what : str
        What is waited for, for messages.
    timeout_seconds : float or None
        None means the default of the settings, 0 never.
    call : int
        Number of the collective call, 0 when the waits belong to none.
    """

    __slots__ = ("control", "what", "call", "_timeout", "_turns", "_start", "_looked", "_warned")

    def __init__(self, control: ControlChannel, what: str, timeout_seconds: float | None, call: int) -> None:
        self.control = control
        self.what = what
        self.call = call
        self._timeout = timeout_seconds
        self._turns = 0
        self._start = 0.0
        self._looked = 0.0
        self._warned = False

    def tick(self) -> None:
        """Be called in every turn of a waiting loop: look around, let others run, or raise.

        Raises
        ------
        TransportTimeoutError
            The deadline has passed; names the ranks that did not come.
        RankFailedError
            A rank failed, was killed, or left before it came to this call; names it.
        """
        self._turns += 1
        control = self.control
        if control.pause is not None:
            control.pause()
        if self._turns % _LOOK_TURNS and self._turns != 1:
            return
        if control.board.alarm:
            self._raise(control.failure(self))
        now = time.monotonic()
        if self._start == 0.0:
            self._start = self._looked = now
        waited = now - self._start
        if waited > _PATIENCE_SECONDS:
            time.sleep(_NAP_SECONDS)
        if now - self._looked > _LOOK_SECONDS:
            self._looked = now
            self._look(waited)

    @property
    def timeout_seconds(self) -> float:
        """Seconds until the deadline, counted from the first wait; 0 for never."""
        return self.control.settings.timeout_seconds if self._timeout is None else self._timeout

    def look(self) -> None:
        """Raise, as `tick`, if something is known to be wrong; without waiting.  Local."""
        self._raise(self.control.failure(self))

    def _look(self, waited: float) -> None:
        """The slow look: processes, other nodes, warning, deadline."""
        control = self.control
        control.board.set_waiting(control.line, self.call)  # long before anybody warns: the lowest that waits does
        self._raise(control.killed(self))
        if control.arbiter is not None:
            control.arbiter.poll()
            self._raise(control.arbiter.failure(self))
        self._raise(control.failure_outside(self))
        if 0 < control.settings.warn_seconds < waited and not self._warned:
            self._warned = True
            self._warn(waited)
        if 0 < self.timeout_seconds < waited:
            self._expire(waited)

    def _warn(self, waited: float) -> None:
        """Warn about a long wait: the lowest rank of the board that waits in this call speaks."""
        control = self.control
        stopped = control.silent(self.call, waited)  # who has waited before it stopped cannot speak
        lower = [line for line in range(control.line) if control.board_ranks[line] not in stopped]
        if self.call and any(control.board.waiting(line) == self.call for line in lower):
            return
        if control.arbiter is not None and control.rank == 0:
            control.arbiter.ask()
        known = control.missing(self.call) or control.silent(self.call, waited)
        if not known and control.rank != 0:
            return  # whoever is missing is on another node: rank 0, or that node, knows
        limit = f"it fails after {self.timeout_seconds:g} s" if self.timeout_seconds else "it waits without a limit"
        names = control.awaited(self.call, waited)
        control.warn(f"{self.what} (call {self.call}) has waited {waited:.0f} s for {names}; {limit}")

    def _expire(self, waited: float) -> None:
        control = self.control
        if control.arbiter is not None and self.call:
            control.arbiter.decide(self)
            self._raise(control.failure(self))
        raise control.expire(control.deadline_text(self.what, self.call, waited))

    def _raise(self, error: MpidistError | None) -> None:
        if error is not None:
            raise self.control.breaks(error)


def yield_processor() -> Callable[[], object]:
    """Return the cheapest call that lets other processes run on this core."""
    return getattr(os, "sched_yield", _let_threads_run)


def _let_threads_run() -> None:
    time.sleep(0)


def last_line(text: str) -> str:
    """Return the last line of a traceback: the error itself."""
    return text.strip().rpartition("\n")[2]


def is_consequence(text: str) -> bool:
    """Return whether a rank that failed with this traceback did so because another one had failed."""
    return any(kind.__name__ in last_line(text) for kind in (RankFailedError, RemoteReplicaError))


def _listed(ranks: Sequence[int], name: Callable[[int], str]) -> str:
    """Return the names of some ranks, the first few in full."""
    shown = ", ".join(name(rank) for rank in ranks[:8])
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"
